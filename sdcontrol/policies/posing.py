"""From columns and prices to the arrays of a problem: loops, compiled.

Knows nothing of names, views or estimators, nor of how the best plan is found.
"""

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.policies.endings import to_go
from sdcontrol.policies.problem import IntArray

__all__ = [
    "BOLD",
    "HORIZON",
    "SURELY",
    "Horizon",
    "Posed",
    "Prices",
    "bolder",
    "charged",
    "lags_of",
    "pose",
    "price",
    "spare",
    "spent",
]

Posed = tuple[FloatArray, IntArray, FloatArray, FloatArray, int]
"""Gain and limit as in `Problem`; KV tokens that each request's round reads, `[arms, requests]`, and
on average, `[families]`; the most draft tokens of the step."""
SURELY = 0.9  # of the tokens to go, that a first catch-up is charged to: it cannot be taken back
BOLD = 8.0  # times as many tokens may a first catch-up be charged to, of one request or where it is known what comes of it
_POSED = "Tuple((float64[:,:,::1], int64[:,::1], float64[:,::1], float64[::1], int64))"

Prices = tuple[FloatArray, FloatArray]

Horizon = tuple[float, float, float, float]
"""Tokens that a catch-up is charged to at most: a request's first, and others; the share of those to go that
a request gets from a drafter after its first; and how probable each is to be its last (`endings`)."""
HORIZON = "UniTuple(float64, 4)"


@compiled(
    f"{_POSED}(float64[:,:,::1], Tuple((int64[::1], int64[::1], int64[:,::1], bool_[:,::1])), "
    "UniTuple(int64[::1], 3))",
    is_inlined=True,
)
def pose(
    survival: FloatArray,
    columns: tuple[IntArray, IntArray, IntArray, NDArray[np.bool_]],
    layout: tuple[IntArray, IntArray, IntArray],
) -> Posed:
    """The problem without seconds, from context, remaining, most draft tokens and permission."""
    context, remaining, most, is_allowed = columns
    rows, budgets, family = layout
    arms, requests, depth = survival.shape
    gain, limit = np.zeros((arms, requests, depth + 1)), np.zeros((arms, requests), dtype=np.int64)
    reads, means, most_tokens = np.zeros((arms, requests)), np.zeros(family.max() + 1), 0
    members = np.zeros(len(means))
    for a in range(arms):
        row = rows[a]
        members[family[a]] += requests
        for r in range(requests):
            last = 0
            if is_allowed[row, r]:
                last = max(min(depth, remaining[r] - 1, most[row, r]), 0)
            limit[a, r], total = last, 0.0
            for j in range(depth):
                if j < last:
                    total += survival[a, r, j]
                gain[a, r, j + 1] = total
            reads[a, r] = min(context[r], budgets[a])
            means[family[a]] += reads[a, r]
    for r in range(requests):
        longest = 0
        for a in range(arms):
            longest = max(longest, limit[a, r])
        most_tokens += longest
    return gain, limit, reads, means / members, most_tokens


@compiled("float64[:,::1](float64[:,::1], float64[::1], int64)", is_inlined=True)
def _rounds_on_lines(lines: FloatArray, means: FloatArray, batch: int) -> FloatArray:
    """See `Problem.rounds`; the last column is that of all requests with half the KV tokens."""
    rounds = np.zeros((len(lines) + 1, batch + 2))
    for f in range(len(lines)):
        for n in range(1, batch + 1):
            rounds[f, n] = lines[f, 0] + (lines[f, 1] + lines[f, 2] * means[f]) * n
        half = 0.5 * lines[f, 2] * means[f]
        rounds[f, batch + 1] = lines[f, 0] + (lines[f, 1] + half) * batch
    return rounds


@compiled(f"float64(UniTuple(int64, 2), float64, float64, {HORIZON})", is_inlined=True)
def charged(request: tuple[int, int], context: float, tokens: float, horizon: Horizon) -> float:
    """The share of a catch-up that is charged to a step that may emit `tokens`, of a request that lags by so
    many tokens, has so many to go, and a `context`; one that lags by less than half of that did not before.
    """
    (lag, remaining), (first, again, share, per_token) = request, horizon
    expected = to_go(float(remaining), per_token)
    served = min(expected, again)
    if 2 * lag >= context:
        served = min(SURELY * share * expected, first)
    return min(tokens / max(served, 1.0), 1.0)


@compiled(f"{HORIZON}({HORIZON}, boolean)", is_inlined=True)
def bolder(horizon: Horizon, is_longest: bool) -> Horizon:
    """That of the request with most to go, which goes first where catching up is an investment."""
    first, again, share, per_token = horizon
    return (BOLD * first if is_longest else first), again, share, per_token


@compiled(
    f"UniTuple(float64[:,::1], 2)({_POSED}, UniTuple(float64[:,::1], 2), "
    "Tuple((int64[:,::1], int64[::1])), UniTuple(int64[::1], 2), "
    f"Tuple(({HORIZON}, float64)))",
    is_inlined=True,
)
def price(
    posed: Posed,
    prices: Prices,
    columns: tuple[IntArray, IntArray],
    layout: tuple[IntArray, IntArray],
    numbers: tuple[Horizon, float],  # and seconds of padding
) -> tuple[FloatArray, FloatArray]:
    """Rounds, and the catch-up charged to this step.

    Turns the KV tokens of a request's round into its seconds beyond those of an average one.
    """
    gain, _, reads, means, _ = posed
    rounds, lines = prices
    lagging, remaining = columns
    (rows, family), (horizon, padding) = layout, numbers
    batch, catch_up = reads.shape[1], np.zeros(reads.shape)
    if rounds.shape[0] == 0:
        rounds = _rounds_on_lines(lines, means, batch)
    rounds[-1, 1:] = padding
    longest = np.argmax(remaining)
    for a in range(len(family)):
        f = family[a]
        per_token = (rounds[f, batch] - rounds[f, batch + 1]) / max(0.5 * batch * means[f], 1.0)
        late = (lagging[rows[a]] > 0).sum()  # who share what a catch-up takes however long it is
        for r in range(batch):
            context, lag = reads[a, r], lagging[rows[a], r]
            reads[a, r] = (context - means[f]) * max(per_token, 0.0)
            if lag > 0:
                mine = bolder(horizon, r == longest)
                share = charged((lag, remaining[r]), context, 1.0 + gain[a, r, -1], mine)
                catch_up[a, r] = (lines[f, 3] / late + lines[f, 4] * lag) * share
    return rounds, catch_up


@compiled("void(float64[:,::1], float64[::1], float64[:,::1], int64[::1])")
def spare(reads: FloatArray, verify: FloatArray, coming: FloatArray, rows: IntArray) -> None:
    """Take off `reads`, seconds per token, what drafts that do not come spare the verification.

    `coming`, of which `rows` are those of the arms, is the share of drafts that do, by request; a token adds at
    least as much as the average one of any number of them.
    """
    if len(verify) < 2 or coming.min() >= 1.0:
        return
    least = np.inf
    for n in range(1, len(verify)):
        least = min(least, (verify[n] - verify[0]) / n)
    for a in range(len(rows)):
        for r in range(reads.shape[1]):
            reads[a, r] -= (1.0 - coming[rows[a], r]) * least


@compiled("int64[:,::1](int64[:,::1], Tuple((int64[::1], int64[::1])), int64)")
def lags_of(lagging: IntArray, layout: tuple[IntArray, IntArray], families: int) -> IntArray:
    """Fewest and most tokens to catch up with, of those who lag, `[families, 2]`; 0 where nobody does."""
    rows, family = layout
    lags = np.zeros((families, 2), np.int64)
    for a in range(len(rows)):
        of_family = lags[family[a]]
        for r in range(lagging.shape[1]):
            lag = lagging[rows[a], r]
            if lag > 0:
                of_family[0] = min(of_family[0] or lag, lag)
                of_family[1] = max(of_family[1], lag)
    return lags


@compiled("Tuple((int64[::1], float64))(float64[:,::1], int64[::1], int64[::1], int64[::1])")
def spent(
    rounds: FloatArray, family: IntArray, arm: IntArray, drafted: IntArray
) -> tuple[IntArray, float]:
    """By family, the rounds that were drafted; and the seconds of all of them."""
    done, seconds = np.zeros(len(rounds), dtype=np.int64), 0.0
    for r in range(len(arm)):
        if arm[r] >= 0:
            done[family[arm[r]]] = max(done[family[arm[r]]], drafted[r])
    for f in range(len(rounds)):
        for j in range(done[f]):
            count = 0
            for r in range(len(arm)):
                if arm[r] >= 0 and family[arm[r]] == f and drafted[r] > j:
                    count += 1
            seconds += rounds[f, count]
    return done, seconds
