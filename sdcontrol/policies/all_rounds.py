"""Plans of few requests: any numbers of rounds, each filled exactly. Loops over arrays, compiled.

Those who share a round are better off without it only once all of them leave, and so are those who share a stair of
verification: no request finds that alone. So what is asked for is the best of so many rounds of each family, by
dynamic programming over the tokens of the step, whatever verification costs. Rounds are taken as linear in the
requests that draft in them; what that gets wrong, responses put right. Knows nothing of views, names and seconds.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.policies.filling import NEVER
from sdcontrol.policies.opening import SHARED, Shared, linear, paid, place
from sdcontrol.policies.plan_state import PRICED, STATE, Priced, State, blank, reprice, value
from sdcontrol.policies.problem import IntArray
from sdcontrol.policies.search import settle

__all__ = ["is_small", "open_rounds"]

_MOST_OPENINGS = 128  # numbers of rounds to open
_KEPT = 8  # of the best of those, to which requests respond
_MOST_OPTIONS = 96  # of all requests
_MOST_SUMS = 80_000  # of all openings

_Table = tuple[FloatArray, IntArray]
"""What the first requests make of every total of tokens, `[requests + 1, tokens + 1]`, and how many of those the
last one of them takes, `[requests, tokens + 1]`."""
_TABLE = "Tuple((float64[:,::1], int64[:,::1]))"


@compiled("UniTuple(int64, 2)(int64, int64)", is_inlined=True)
def _openings(families: int, lengths: int) -> tuple[int, int]:
    """How many numbers of rounds are tried of each family, and of all together."""
    levels = min(int(_MOST_OPENINGS ** (1.0 / families) + 1e-9), lengths)
    return levels, levels**families


@compiled("boolean(UniTuple(int64, 3), int64)", is_inlined=True)
def is_small(shape: tuple[int, int, int], room: int) -> bool:
    """Whether a problem of so many requests, families and lengths, with room for so many tokens, is small enough."""
    requests, families, lengths = shape
    sums = requests * min(room, requests * (lengths - 1)) * lengths
    is_short = _openings(families, lengths)[1] * sums <= _MOST_SUMS
    return is_short and requests * families * lengths <= _MOST_OPTIONS


@compiled("int64(float64[:,:,::1], int64, int64[::1], float64[::1])", is_inlined=True)
def _own(worth: FloatArray, r: int, caps: IntArray, own: FloatArray) -> int:
    """Set what request `r` makes of every length in so many rounds; the longest that it may have."""
    longest = 0
    own[0] = 0.0
    for n in range(1, len(own)):
        own[n] = NEVER
        for f in range(len(caps)):
            if n <= caps[f]:
                own[n] = max(own[n], worth[f, r, n])
        if own[n] > 0.5 * NEVER:
            longest = n
    return longest


@compiled(f"Tuple((float64, int64))(float64[:,:,::1], float64[::1], int64[::1], {_TABLE})")
def _fill(
    worth: FloatArray, verify: FloatArray, caps: IntArray, table: _Table
) -> tuple[float, int]:
    """What requests make of so many rounds at best, and of how many tokens; bases of rounds left out. Sets `table`."""
    requests, lengths = worth.shape[1:]
    reached, taken = table
    own, most = np.empty(lengths), 0
    reached[0, 0] = 0.0
    for r in range(requests):
        longest, before = _own(worth, r, caps, own), most
        most = min(before + longest, len(verify) - 1)
        for t in range(most + 1):
            best, length = NEVER, 0
            for n in range(max(t - before, 0), min(longest, t) + 1):
                here = reached[r, t - n] + own[n]
                if here > best:
                    best, length = here, n
            reached[r + 1, t], taken[r, t] = best, length
    best, tokens = 0.0, 0
    for t in range(1, most + 1):
        here = reached[requests, t] - (verify[t] - verify[0])
        if here > best:
            best, tokens = here, t
    return best, tokens


@compiled("void(int64, int64, int64, int64[::1])", is_inlined=True)
def _set_caps(k: int, levels: int, lengths: int, caps: IntArray) -> None:
    """The `k`-th numbers of rounds, by family."""
    for f in range(len(caps)):
        caps[f] = k // levels**f % levels * (lengths - 1) // (levels - 1)


@compiled(
    f"int64[::1](float64[:,:,::1], float64[::1], {SHARED}, int64[::1], {_TABLE})", is_inlined=True
)
def _best_of_all(
    worth: FloatArray, verify: FloatArray, shared: Shared, caps: IntArray, table: _Table
) -> IntArray:
    """Which numbers of rounds make most; 0 for none."""
    families, _, lengths = worth.shape
    levels, openings = _openings(families, lengths)
    values, kept = np.zeros(_KEPT), np.zeros(_KEPT, np.int64)
    for k in range(1, openings):
        _set_caps(k, levels, lengths, caps)
        made = _fill(worth, verify, caps, table)[0] - paid(shared, caps)
        worst = np.argmin(values)
        if made > values[worst]:
            values[worst], kept[worst] = made, k
    return kept


@compiled(f"{STATE}({PRICED}, {STATE})")
def open_rounds(priced: Priced, state: State) -> State:
    """The best of `state` and what comes of any numbers of rounds, so many of each family.

    Of many families, or rounds, some numbers are left out.
    """
    own, verify, rounds, drafted = priced
    requests, families, lengths = own.shape
    levels, _ = _openings(families, lengths)
    worth, bases = linear(priced)
    room = min(len(verify), requests * (lengths - 1) + 1)
    table = np.empty((requests + 1, room)), np.zeros((requests, room), np.int64)
    caps, length = np.zeros(families, np.int64), np.zeros(requests, np.int64)
    shared = bases, rounds[-1, 1], drafted[:-1]
    kept = _best_of_all(worth, verify, shared, caps, table)
    reprice(priced, state)
    best, most = state, value(priced, state)
    for k in kept:
        if k == 0:
            continue
        _set_caps(k, levels, lengths, caps)
        _, tokens = _fill(worth, verify, caps, table)
        for r in range(requests - 1, -1, -1):
            length[r] = table[1][r, tokens]
            tokens -= length[r]
        opened = blank(priced)
        place(priced, opened, worth, caps, length)
        settle(priced, opened, 0)
        here = value(priced, opened)
        if here > most:
            best, most = opened, here
    return best
