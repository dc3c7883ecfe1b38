"""A plan while it is being improved, and what its rounds cost: loops over arrays, compiled.

Knows nothing of views, names and seconds, nor of what is a better plan. `priced` is a problem with every
second in tokens, at one price; `state` is a plan with what it takes to change it. Both are tuples, since
that is what compiled code can be given.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.policies.problem import IntArray

__all__ = [
    "PRICED",
    "STATE",
    "Priced",
    "State",
    "adopt",
    "assign",
    "blank",
    "reprice",
    "seat",
    "value",
]

Priced = tuple[FloatArray, FloatArray, FloatArray, IntArray]
"""What a request with n tokens of a family brings, less what it alone costs, hugely negative where
it may not `[requests, families, lengths]`; price of verification `[tokens + 1]`; price of a round
by the requests in it `[families + 1, requests + 2]`; rounds that are already spent `[families + 1]`.
The last row is what everybody's round j costs beside that of a family: padding to the longest draft."""

State = tuple[IntArray, IntArray, IntArray, FloatArray, FloatArray, IntArray]
"""family `[requests]`, length `[requests]`, requests that draft in round j `[families + 1, lengths]`,
price of the rounds that one more request with n tokens adds and that one less saves, alike; tokens `[1]`.
Everybody counts in the last row too."""

PRICED = "Tuple((float64[:,:,::1], float64[::1], float64[:,::1], int64[::1]))"
STATE = "Tuple((int64[::1], int64[::1], int64[:,::1], float64[:,::1], float64[:,::1], int64[::1]))"


@compiled(f"void({PRICED}, {STATE}, int64)", is_inlined=True)
def _price_rounds(priced: Priced, state: State, f: int) -> None:
    rounds, drafted = priced[2], priced[3]
    _, _, drafting, joining, leaving, _ = state
    more = less = 0.0
    for n in range(1, joining.shape[1]):
        if n > drafted[f]:
            count = drafting[f, n]
            more += rounds[f, count + 1] - rounds[f, count]
            less += rounds[f, count] - rounds[f, max(count - 1, 0)]
        joining[f, n], leaving[f, n] = more, less


@compiled(f"void({PRICED}, {STATE})")
def reprice(priced: Priced, state: State) -> None:
    """What it takes to change a plan that was made at another price."""
    for f in range(len(state[2])):
        _price_rounds(priced, state, f)


@compiled(f"{STATE}({PRICED})")
def blank(priced: Priced) -> State:
    """Nobody drafts."""
    requests, families, lengths = priced[0].shape
    state = (
        np.zeros(requests, dtype=np.int64),
        np.zeros(requests, dtype=np.int64),
        np.zeros((families + 1, lengths), dtype=np.int64),
        np.zeros((families + 1, lengths)),
        np.zeros((families + 1, lengths)),
        np.zeros(1, dtype=np.int64),
    )
    reprice(priced, state)
    return state


@compiled(f"void({PRICED}, {STATE}, int64, int64, int64)")
def assign(priced: Priced, state: State, r: int, f: int, n: int) -> None:
    """Let request `r` draft `n` tokens with family `f`."""
    family, length, drafting, _, _, tokens = state
    before, last = family[r], len(drafting) - 1
    for j in range(1, length[r] + 1):
        drafting[before, j] -= 1
        drafting[last, j] -= 1
    for j in range(1, n + 1):
        drafting[f, j] += 1
        drafting[last, j] += 1
    if before != f and length[r]:
        _price_rounds(priced, state, before)
    if priced[2][last, 1] > 0.0:
        _price_rounds(priced, state, last)
    tokens[0] += n - length[r]
    family[r], length[r] = f, n
    _price_rounds(priced, state, f)


@compiled(f"void({PRICED}, {STATE}, int64[::1], int64[::1])")
def seat(priced: Priced, state: State, families: IntArray, lengths: IntArray) -> None:
    """Let all requests draft, where nobody did."""
    family, length, drafting, _, _, tokens = state
    for r in range(len(length)):
        family[r], length[r] = families[r], lengths[r]
        tokens[0] += lengths[r]
        for j in range(1, lengths[r] + 1):
            drafting[families[r], j] += 1
            drafting[len(drafting) - 1, j] += 1
    reprice(priced, state)


@compiled(f"void({STATE}, {STATE})")
def adopt(state: State, other: State) -> None:
    """Make `state` the plan of `other`."""
    state[0][:] = other[0]
    state[1][:] = other[1]
    state[2][:] = other[2]
    state[3][:] = other[3]
    state[4][:] = other[4]
    state[5][:] = other[5]


@compiled(f"float64({PRICED}, {STATE})")
def value(priced: Priced, state: State) -> float:
    """What the plan is worth beside that of no drafts."""
    own, verify, rounds, drafted = priced
    family, length, drafting, _, _, tokens = state
    total = verify[0] - verify[tokens[0]]
    for r in range(len(length)):
        total += own[r, family[r], length[r]]
    for f in range(len(rounds)):
        for j in range(drafted[f] + 1, drafting.shape[1]):
            total -= rounds[f, drafting[f, j]]
    return float(total)
