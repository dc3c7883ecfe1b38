"""A plan to start from: which rounds to open, and who drafts in them. Loops over arrays, compiled.

Knows nothing of views, names and seconds. Rounds are taken as linear in the requests that draft in
them, and a request's options by their concave envelope; what that gets wrong, `search` puts right.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.policies.problem import IntArray
from sdcontrol.policies.search import PRICED, STATE, Priced, State, seat

__all__ = ["open_alone", "open_plan"]

_NEVER = -1e30  # tokens, for what is not open
_BUCKETS = 512
_MOST_ASCENTS = 3
_LEAST = 1e-9  # tokens by which a move must be better
_FEW_TOKENS = 2  # per request
_FEW_REQUESTS = 5  # for which many openings are tried anyway
_PRICES = 20  # of a token to try then, and fewer where requests are many
_PRICED_REQUESTS = 1280  # of all tries together

_Shared = tuple[FloatArray, float, IntArray]
"""What rounds cost whoever drafts in them: bases `[families]`, padding; rounds that are already spent."""
_SHARED = "Tuple((float64[::1], float64, int64[::1]))"


@compiled(f"Tuple((float64[:,:,::1], float64[::1]))({PRICED}, int64)")
def _linear(priced: Priced, crowd: int) -> tuple[FloatArray, FloatArray]:
    """Own worth less a request's part of the rounds, `[families, requests, lengths]`; their bases.

    A round's price is on the line through those for one request and for `crowd`.
    """
    own, _, rounds, drafted = priced
    requests, families, lengths = own.shape
    worth, bases = np.empty((families, requests, lengths)), np.empty(families)
    for f in range(families):
        slope = (rounds[f, crowd] - rounds[f, 1]) / max(crowd - 1, 1)
        bases[f] = max(rounds[f, 1] - slope, 0.0)
        for r in range(requests):
            for n in range(lengths):
                worth[f, r, n] = own[r, f, n] - slope * max(n - drafted[f], 0)
    return worth, bases


@compiled("float64[:,:,::1](float64[:,:,::1], float64)")
def _reaches(worth: FloatArray, token_price: float) -> FloatArray:
    """The most that each request makes of up to n tokens of each family, like `worth`."""
    reach = worth.copy()
    families, requests, lengths = worth.shape
    for f in range(families):
        for r in range(requests):
            for n in range(1, lengths):
                reach[f, r, n] = max(worth[f, r, n] - token_price * n, reach[f, r, n - 1])
    return reach


@compiled("void(float64[:,:,::1], int64[::1], int64, float64[::1])")
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


@compiled(f"float64(float64[:,:,::1], {_SHARED}, int64[::1])")
def _ascend(reach: FloatArray, shared: _Shared, caps: IntArray) -> float:
    """Move one family's cap at a time, the best move first, until none helps; the value reached."""
    families, _, lengths = reach.shape
    bases, padding, drafted = shared
    sums, values = np.empty((families, lengths)), np.empty((families, lengths))
    moved = -1  # its own sums stay, since the others' caps do
    while True:
        paid = bases * np.maximum(caps - drafted, 0)
        for f in range(families):
            if f != moved:
                _sum_up(reach, caps, f, sums[f])
            longest = 0
            for g in range(families):
                if g != f:
                    longest = max(longest, caps[g])
            for n in range(lengths):
                rounds = bases[f] * max(n - drafted[f], 0) + padding * max(n, longest)
                values[f, n] = sums[f, n] - (rounds + paid.sum() - paid[f])
        best = int(np.argmax(values))
        f, n = best // lengths, best % lengths
        if values[f, n] <= values[f, caps[f]] + _LEAST:
            return float(values[f, caps[f]])
        caps[f], moved = n, f


@compiled(f"void(float64[:,:,::1], {_SHARED}, int64[::1])")
def _ascend_afresh(reach: FloatArray, shared: _Shared, caps: IntArray) -> None:
    """Set `caps` to the better end of two ascents: from no open round, and from all."""
    other = np.full(len(caps), reach.shape[2] - 1)
    caps[:] = 0
    if _ascend(reach, shared, other) > _ascend(reach, shared, caps):
        caps[:] = other


@compiled(
    "Tuple((int64, float64[::1], int64[::1], int64[::1], int64[::1]))"
    "(float64[:,:,::1], int64[::1], int64)"
)
def _envelopes(
    worth: FloatArray, caps: IntArray, room: int
) -> tuple[int, FloatArray, IntArray, IntArray, IntArray]:
    """The falling slopes of every request's concave envelope.

    Their number; slope, request, length before and length after of each.
    """
    families, requests, lengths = worth.shape
    size = requests * (lengths - 1)
    slopes, who = np.empty(size), np.empty(size, dtype=np.int64)
    start, end = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    value, hull = np.zeros(lengths), np.zeros(lengths, dtype=np.int64)
    count = 0
    for r in range(requests):
        top, value[1:] = 0, _NEVER
        for f in range(families):
            for n in range(1, caps[f] + 1):
                value[n] = max(value[n], worth[f, r, n])
        for n in range(1, min(lengths, room + 1)):
            if value[n] <= value[hull[top]]:
                continue
            while top > 0:
                last, before = hull[top], hull[top - 1]
                rise = (value[last] - value[before]) * (n - last)
                if rise > (value[n] - value[last]) * (last - before):
                    break
                top -= 1
            top += 1
            hull[top] = n
        for i in range(1, top + 1):
            start[count], end[count], who[count] = hull[i - 1], hull[i], r
            slopes[count] = (value[hull[i]] - value[hull[i - 1]]) / (hull[i] - hull[i - 1])
            count += 1
    return count, slopes, who, start, end


@compiled("int64[::1](float64[::1], int64)")
def _steepest_first(slopes: FloatArray, count: int) -> IntArray:
    """An order of the first `count` slopes, to a part of the steepest; stable."""
    buckets = min(4 * count, _BUCKETS)
    steepest = 0.0
    for i in range(count):
        steepest = max(steepest, slopes[i])
    first = np.zeros(buckets + 2, dtype=np.int64)
    bucket, order = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for i in range(count):
        bucket[i] = int((1.0 - slopes[i] / steepest) * buckets)
        first[bucket[i] + 1] += 1
    for b in range(1, buckets + 2):
        first[b] += first[b - 1]
    for i in range(count):
        order[first[bucket[i]]] = i
        first[bucket[i]] += 1
    return order


@compiled("UniTuple(float64, 2)(float64[:,:,::1], float64[::1], int64[::1], int64[::1])")
def _fill(
    worth: FloatArray, verify: FloatArray, caps: IntArray, length: IntArray
) -> tuple[float, float]:
    """Set the best lengths under `caps`, over every total of tokens.

    What they are worth, bases of rounds left out; and the price of a token there.
    """
    requests = len(length)
    count, slopes, who, start, end = _envelopes(worth, caps, len(verify) - 1)
    order = _steepest_first(slopes, count)
    length[:] = 0
    tokens, value, best, taken, most = 0, 0.0, 0.0, 0, 0
    for i in range(count):
        s = order[i]
        width = end[s] - start[s]
        if start[s] != length[who[s]] or tokens + width >= len(verify):
            continue
        tokens += width
        value += slopes[s] * width
        length[who[s]] = end[s]
        if value - (verify[tokens] - verify[0]) > best:
            best, taken, most = value - (verify[tokens] - verify[0]), i + 1, tokens
    for i in range(count - 1, taken - 1, -1):
        s = order[i]
        if length[who[s]] == end[s]:
            length[who[s]] = start[s]
    low = slopes[order[taken]] if taken < count else 0.0
    high = slopes[order[taken - 1]] if taken > 0 else np.inf
    left, right = max(most - requests, 0), min(most + requests, len(verify) - 1)
    price = (verify[right] - verify[left]) / (right - left)
    return best, min(max(price, low), high)


@compiled(f"float64({_SHARED}, int64[::1])")
def _paid(shared: _Shared, caps: IntArray) -> float:
    """For rounds up to `caps`, whoever drafts in them."""
    bases, padding, drafted = shared
    return float((bases * np.maximum(caps - drafted, 0)).sum() + padding * caps.max())


@compiled(f"void(float64[:,:,::1], float64[::1], {_SHARED}, float64, UniTuple(int64[::1], 2))")
def _open_by_price(
    worth: FloatArray,
    verify: FloatArray,
    shared: _Shared,
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
        value, token_price = _fill(worth, verify, caps, length)
        value -= _paid(shared, caps)
        if turn == 0 and value <= 0.0:  # nothing pays at that price; the first tokens may be free
            token_price, caps[:] = 0.0, -1
            continue
        if value <= best:
            break
        best, best_caps[:], best_length[:] = value, caps, length
    caps[:] = best_caps


@compiled(f"void(float64[:,:,::1], float64[::1], {_SHARED}, UniTuple(int64[::1], 2))")
def _open_by_trial(
    worth: FloatArray, verify: FloatArray, shared: _Shared, plan: tuple[IntArray, IntArray]
) -> None:
    """Set the caps and lengths of `plan`: the best of those at several prices of a token.

    For steps of few tokens, each of which is worth what it brings elsewhere: at most one token. Caps that
    are a guess stay.
    """
    caps, best_length = plan
    if caps[0] >= 0:
        _fill(worth, verify, caps, best_length)
        return
    tried, length, best = np.zeros_like(caps), np.zeros_like(best_length), 0.0
    caps[:] = 0
    prices = min(_PRICES, _PRICED_REQUESTS // len(best_length) + 1)
    for k in range(prices):
        reach = _reaches(worth, (k + 0.5) / prices)
        _ascend_afresh(reach, shared, tried)
        value = _fill(worth, verify, tried, length)[0] - _paid(shared, tried)
        if value > best:
            best, caps[:], best_length[:] = value, tried, length


@compiled(f"void({PRICED}, {STATE}, float64[:,:,::1], int64[::1], int64[::1])")
def _seat(
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
                if worth[f, r, n] > 0.5 * _NEVER:
                    most = n
                    break
        total += most
    return total


@compiled(f"void({PRICED}, {STATE}, float64, int64, int64[::1])")
def open_plan(priced: Priced, state: State, token_price: float, crowd: int, caps: IntArray) -> None:
    """Make `state`, in which nobody drafts, the plan that is best for linear rounds.

    `token_price` is a first guess at the price of a token of verification, `caps` one at the rounds
    to open to each family; caps below 0 are no guess. Sets them to those of the plan.
    """
    worth, bases = _linear(priced, crowd)
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
    _seat(priced, state, worth, caps, length)


@compiled(f"void({PRICED}, {STATE}, int64, int64, int64)")
def open_alone(priced: Priced, state: State, crowd: int, f: int, cap: int) -> None:
    """Make `state`, in which nobody drafts, the best plan of one family with `cap` rounds."""
    worth, _ = _linear(priced, crowd)
    caps, length = np.zeros(len(worth), dtype=np.int64), np.zeros(len(state[0]), dtype=np.int64)
    caps[f] = cap
    _fill(worth, priced[1], caps, length)
    _seat(priced, state, worth, caps, length)
