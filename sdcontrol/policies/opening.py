"""A plan to start from: which rounds to open, and who drafts in them. Loops over arrays, compiled.

Knows nothing of views, names and seconds. Rounds are taken as linear in the requests that draft in
them, and a request's options by their concave envelope; what that gets wrong, `search` puts right.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.policies.filling import NEVER, fill
from sdcontrol.policies.plan_state import PRICED, STATE, Priced, State, seat
from sdcontrol.policies.problem import IntArray

__all__ = ["SHARED", "Shared", "linear", "open_plan", "paid", "place"]

_MOST_ASCENTS = 3
_LEAST = 1e-9  # tokens by which a move must be better
_FEW_TOKENS = 2  # per request
_FEW_REQUESTS = 5  # for which many openings are tried anyway
_PRICES = 20  # of a token to try then, and fewer where requests are many
_PRICED_REQUESTS = 1280  # of all tries together

Shared = tuple[FloatArray, float, IntArray]
"""What rounds cost whoever drafts in them: bases `[families]`, padding; rounds that are already spent."""
SHARED = "Tuple((float64[::1], float64, int64[::1]))"


@compiled(f"Tuple((float64[:,:,::1], float64[::1]))({PRICED})", is_inlined=True)
def linear(priced: Priced) -> tuple[FloatArray, FloatArray]:
    """Own worth less a request's part of the rounds, `[families, requests, lengths]`; their bases.

    A round's price is on the line through those for one request and for all.
    """
    own, _, rounds, drafted = priced
    requests, families, lengths = own.shape
    worth, bases = np.empty((families, requests, lengths)), np.empty(families)
    for f in range(families):
        slope = (rounds[f, requests] - rounds[f, 1]) / max(requests - 1, 1)
        bases[f] = max(rounds[f, 1] - slope, 0.0)
        for r in range(requests):
            for n in range(lengths):
                worth[f, r, n] = own[r, f, n] - slope * max(n - drafted[f], 0)
    return worth, bases


@compiled("float64[:,:,::1](float64[:,:,::1], float64)", is_inlined=True)
def _reaches(worth: FloatArray, token_price: float) -> FloatArray:
    """The most that each request makes of up to n tokens of each family, like `worth`."""
    reach = worth.copy()
    families, requests, lengths = worth.shape
    for f in range(families):
        for r in range(requests):
            for n in range(1, lengths):
                reach[f, r, n] = max(worth[f, r, n] - token_price * n, reach[f, r, n - 1])
    return reach


@compiled("void(float64[:,:,::1], int64[::1], int64, float64[::1])", is_inlined=True)
def _sum_up(reach: FloatArray, caps: IntArray, f: int, sums: FloatArray) -> None:
    """Set what all requests make of every cap of family `f` while the others' stay, `[lengths]`."""
    families, requests, lengths = reach.shape
    sums[:] = 0.0
    for r in range(requests):
        other = 0.0
        for g in range(families):
            if g != f:
                other = max(other, reach[g, r, caps[g]])
        for n in range(lengths):
            sums[n] += max(other, reach[f, r, n])


@compiled(f"float64(float64[:,:,::1], {SHARED}, int64[::1])", is_inlined=True)
def _ascend(reach: FloatArray, shared: Shared, caps: IntArray) -> float:
    """Move one family's cap at a time, the best move first, until none helps; the value reached."""
    families, _, lengths = reach.shape
    bases, padding, drafted = shared
    sums = np.empty((families, lengths))
    moved = -1  # whose own sums stay, since the others' caps do
    while True:
        spent = (bases * np.maximum(caps - drafted, 0)).sum()
        best, held, best_family, best_cap = -np.inf, -np.inf, 0, caps[0]
        for f in range(families):
            if f != moved:
                _sum_up(reach, caps, f, sums[f])
            longest = 0
            for g in range(families):
                if g != f:
                    longest = max(longest, caps[g])
            others = spent - bases[f] * max(caps[f] - drafted[f], 0)
            for n in range(lengths):
                rounds = bases[f] * max(n - drafted[f], 0) + padding * max(n, longest)
                value = sums[f, n] - (rounds + others)
                if n == caps[f]:
                    held = value
                if value > best:
                    best, best_family, best_cap = value, f, n
        if not best > held + _LEAST:  # nor where it is no number
            return float(held)
        caps[best_family], moved = best_cap, best_family


@compiled(f"void(float64[:,:,::1], {SHARED}, int64[::1])")
def _ascend_afresh(reach: FloatArray, shared: Shared, caps: IntArray) -> None:
    """Set `caps` to the better end of two ascents: from no open round, and from all."""
    other = np.full(len(caps), reach.shape[2] - 1)
    caps[:] = 0
    if _ascend(reach, shared, other) > _ascend(reach, shared, caps):
        caps[:] = other


@compiled(f"float64({SHARED}, int64[::1])", is_inlined=True)
def paid(shared: Shared, caps: IntArray) -> float:
    """For rounds up to `caps`, whoever drafts in them."""
    bases, padding, drafted = shared
    return float((bases * np.maximum(caps - drafted, 0)).sum() + padding * caps.max())


@compiled(f"void(float64[:,:,::1], float64[::1], {SHARED}, float64, UniTuple(int64[::1], 2))")
def _open_by_price(
    worth: FloatArray,
    verify: FloatArray,
    shared: Shared,
    token_price: float,
    plan: tuple[IntArray, IntArray],
) -> None:
    """Set the caps and lengths of `plan`: the best rounds at a price of a token, and the price there."""
    caps, best_length = plan
    best_caps, length = np.zeros_like(caps), np.zeros_like(best_length)
    before, best = caps.copy(), 0.0
    for turn in range(_MOST_ASCENTS):
        before[:] = caps
        reach = _reaches(worth, token_price)
        if caps[0] < 0:
            _ascend_afresh(reach, shared, caps)
        else:
            _ascend(reach, shared, caps)
        if turn > 0 and np.array_equal(before, caps):
            break
        value, token_price = fill(worth, verify, caps, length)
        value -= paid(shared, caps)
        if turn == 0 and value <= 0.0:  # nothing pays at that price; the first tokens may be free
            token_price, caps[:] = 0.0, -1
            continue
        if value <= best:
            break
        best, best_caps[:], best_length[:] = value, caps, length
    caps[:] = best_caps


@compiled(f"void(float64[:,:,::1], float64[::1], {SHARED}, UniTuple(int64[::1], 2))")
def _open_by_trial(
    worth: FloatArray, verify: FloatArray, shared: Shared, plan: tuple[IntArray, IntArray]
) -> None:
    """Set the caps and lengths of `plan`: the best of those at several prices of a token.

    For steps of few tokens, each of which is worth what it brings elsewhere: at most one token. Caps that
    are a guess stay.
    """
    caps, best_length = plan
    if caps[0] >= 0:
        fill(worth, verify, caps, best_length)
        return
    tried, before, best = np.zeros_like(caps), np.full_like(caps, -1), 0.0
    length = np.zeros_like(best_length)
    caps[:] = 0
    prices = min(_PRICES, _PRICED_REQUESTS // len(best_length) + 1)
    for k in range(prices):
        reach = _reaches(worth, (k + 0.5) / prices)
        _ascend_afresh(reach, shared, tried)
        if np.array_equal(tried, before):  # the price is not asked for again
            continue
        before[:] = tried
        value = fill(worth, verify, tried, length)[0] - paid(shared, tried)
        if value > best:
            best, caps[:], best_length[:] = value, tried, length


@compiled(f"void({PRICED}, {STATE}, float64[:,:,::1], int64[::1], int64[::1])", is_inlined=True)
def place(
    priced: Priced, state: State, worth: FloatArray, caps: IntArray, length: IntArray
) -> None:
    """Give every request its length, with the family that is best for it."""
    family = np.zeros_like(length)
    for r in range(len(length)):
        best, n = 0, length[r]
        for f in range(1, len(caps)):
            if n <= caps[f] and (n > caps[best] or worth[f, r, n] > worth[best, r, n]):
                best = f
        family[r] = best
    seat(priced, state, family, length)


@compiled("int64(float64[:,:,::1])")
def _wanted(worth: FloatArray) -> int:
    """The most tokens that all requests may draft."""
    families, requests, lengths = worth.shape
    total = 0
    for r in range(requests):
        most = 0
        for f in range(families):
            for n in range(lengths - 1, most, -1):
                if worth[f, r, n] > 0.5 * NEVER:
                    most = n
                    break
        total += most
    return total


@compiled(f"void({PRICED}, {STATE}, float64, int64[::1])")
def open_plan(priced: Priced, state: State, token_price: float, caps: IntArray) -> None:
    """Make `state`, in which nobody drafts, the plan that is best for linear rounds.

    `token_price` is a first guess at the price of a token of verification, `caps` one at the rounds
    to open to each family; caps below 0 are no guess. Sets them to those of the plan.
    """
    worth, bases = linear(priced)
    verify, shared = priced[1], (bases, priced[2][-1, 1], priced[3][:-1])
    length, room = np.zeros_like(state[0]), len(verify) - 1
    is_short = len(length) > _FEW_REQUESTS and room < _wanted(worth)
    is_scarce = is_short and room < _FEW_TOKENS * len(length)
    if not is_scarce:
        _open_by_price(worth, verify, shared, token_price, (caps, length))
        if is_short and caps.max() == 0:
            is_scarce, caps[:] = True, -1
    if is_scarce:
        _open_by_trial(worth, verify, shared, (caps, length))
    place(priced, state, worth, caps, length)
