"""The plan of most expected tokens per second.

Knows nothing of views, names or learning: a `Problem` in, an arm and a length per request out.

With `rate` the price of a second in tokens, the best plan maximises `gain - rate * step`; at the
best ratio of gain to step that maximum is zero (Dinkelbach 1967), so the ratio is improved until
it stays. Three couplings tie the requests of a step together:

    drafting rounds   shared by a family: a round costs `base` however few draft in it, so the
                      number of rounds open to each family (its cap) is decided for the batch
    verification      any monotone function of the tokens of the step, staircases included
    free KV slots     the end of the table of verification costs

For given caps requests are independent but for the sum of their tokens. Each request's best value
with n tokens, over arms, has a concave envelope; sorting the envelopes' slopes of all requests
gives the best value of the batch for every total at once, and the price of verification, whatever
its shape, is subtracted there. Caps are ranked by the Lagrangian bound of the same problem at a
few token prices, and the few best are solved.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.policies.problem import IntArray, Problem

__all__ = ["Answer", "evaluate", "maximise"]

_WORK = 16384  # array elements that ranking caps may touch: prices x caps x requests
_SOLVED = 4096  # array elements that solving caps may touch: caps x lengths x requests
_ENOUGH = 1.01  # a rate that grew by less changes the plan's value by its square


@dataclass(slots=True)
class Answer:
    """An arm and a length per request, and what they are worth."""

    arm: IntArray  # [requests]
    length: IntArray  # [requests]
    gain: float  # expected tokens
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.gain / self.seconds


def maximise(problem: Problem, rate: float | None = None) -> Answer:
    """The best plan found: of `gain / seconds`, or of `gain - rate * seconds` at a given rate."""
    best = _nothing(problem)
    if len(problem.verify) == 1:
        return best
    if rate is not None:
        answer = _respond(problem, rate)
        worth = answer.gain - best.gain - rate * (answer.seconds - best.seconds)
        return answer if worth > 0.0 else best
    rate = max(_uniform_rate(problem), best.rate)
    for _ in range(4):
        answer = _respond(problem, rate)
        if answer.rate > best.rate:
            best = answer
        if best.rate < rate * _ENOUGH:
            break
        rate = best.rate
    return best


def evaluate(problem: Problem, arm: IntArray, length: IntArray) -> Answer:
    """What `length[r]` tokens by `arm[r]` for every request r are worth."""
    rows = _range(problem.batch)
    families, lengths = problem.round.shape[0], problem.lengths
    gain = problem.batch + float(np.add.reduce(problem.gain[arm, length, rows]))
    cells = np.bincount(problem.family[arm] * lengths + length, minlength=families * lengths)
    ending = cells.reshape(families, lengths)[:, :0:-1]  # who drafts K, K - 1, ..., 1 tokens
    drafting = np.add.accumulate(ending, axis=1)
    seconds = float(problem.verify[int(np.add.reduce(length))])
    seconds += float(problem.round[_range(families)[:, None], drafting].sum())
    if problem.excess is not None:
        seconds += float(problem.excess[arm, rows] @ length)
    if problem.catch_up is not None:
        seconds += float(problem.catch_up[arm, rows] @ (length > 0))
    return Answer(arm, length, gain, seconds)


def _nothing(problem: Problem) -> Answer:
    zeros = np.zeros(problem.batch, dtype=np.int64)
    return Answer(zeros, zeros, float(problem.batch), float(problem.verify[0]))


def _uniform_rate(problem: Problem) -> float:
    """The best rate of one arm and one length for all, averages standing for the rest."""
    batch = problem.batch
    gain = batch + np.add.reduce(problem.gain, axis=2)  # [arms, lengths]
    tokens = np.arange(0, min(problem.lengths * batch, len(problem.verify)), batch)
    rounds = problem.round[problem.family, batch][:, None] * _range(len(tokens))
    return float((gain[:, : len(tokens)] / (problem.verify[tokens] + rounds)).max())


def _respond(problem: Problem, rate: float) -> Answer:
    """The best plan at a price of `rate` tokens per second."""
    base, per_request = _round_prices(problem, rate)
    worth = _worth(problem, rate, per_request)
    by_family = _best_of_family(problem, worth)
    caps = _rank_caps(problem, by_family, base, rate)
    cap, length = _fill(problem, by_family, base, caps, rate)
    rows = _range(problem.batch)
    capped = np.minimum(length, cap[problem.family][:, None])  # [arms, requests]
    arm = worth[_range(len(capped))[:, None], capped, rows].argmax(axis=0)
    return evaluate(problem, arm, capped[arm, rows])


def _round_prices(problem: Problem, rate: float) -> tuple[FloatArray, FloatArray]:
    """Tokens per round of each family: `base` whoever drafts, and for every request that does."""
    batch = problem.batch
    each = (problem.round[:, batch] - problem.round[:, 1]) / max(batch - 1, 1)
    return rate * (problem.round[:, 1] - each), rate * each


def _worth(problem: Problem, rate: float, per_request: FloatArray) -> FloatArray:
    """`[arms, lengths, requests]`: tokens gained less drafting, before bases and verification."""
    price = per_request[problem.family][:, None]
    if problem.excess is not None:
        price = price + rate * problem.excess
    worth: FloatArray = problem.gain - price[:, None, :] * _range(problem.lengths)[:, None]
    if problem.catch_up is not None:
        worth[:, 1:] -= rate * problem.catch_up[:, None, :]
    return worth


def _best_of_family(problem: Problem, worth: FloatArray) -> FloatArray:
    """`[families, lengths, requests]`: the best arm of each family at each length."""
    families = problem.round.shape[0]
    if families == len(problem.family):
        return worth
    best = np.empty((families, *worth.shape[1:]))
    for f in range(families):
        np.maximum.reduce(worth[problem.family == f], axis=0, out=best[f])
    return best


def _rank_caps(
    problem: Problem, by_family: FloatArray, base: FloatArray, rate: float
) -> IntArray:
    """The most promising caps, `[candidates, families]`."""
    families, lengths, batch = by_family.shape
    costly = np.flatnonzero(base > 1e-12)
    if not len(costly):
        return np.full((1, families), lengths - 1)
    levels = _levels(lengths, len(costly), _WORK // batch)
    prices = _token_prices(problem, rate, max(1, _WORK // (batch * len(levels) ** len(costly))))
    # [families, prices, lengths, requests], then the best of at most so many tokens
    reach = by_family[:, None] - prices[:, None, None] * _range(lengths)[:, None]
    np.maximum.accumulate(reach, axis=2, out=reach)
    free = np.flatnonzero(base <= 1e-12)
    value = reach[free, :, -1].max(axis=0) if len(free) else np.zeros((len(prices), batch))
    paid = np.zeros(1)
    for f in costly:
        option = reach[f][:, levels]  # [prices, levels, requests]
        value = np.maximum(value.reshape(len(prices), -1, 1, batch), option[:, None])
        paid = np.add.outer(paid, base[f] * levels).ravel()
    bound = np.add.reduce(value, axis=-1).reshape(len(prices), -1) - paid
    tokens = _edges(problem.verify)
    # for every total, what caps can be worth is the least over token prices
    worth = (bound[:, None] + (prices[:, None] * tokens)[:, :, None]).min(axis=0)
    worth -= rate * problem.verify[tokens][:, None]
    score = worth.max(axis=0)
    keep = max(1, min(_SOLVED // (lengths * batch), len(score)))
    chosen = np.argsort(-score, kind="stable")[:keep]
    caps = np.full((keep, families), lengths - 1)
    caps[:, costly] = levels[np.stack(np.unravel_index(chosen, (len(levels),) * len(costly)), 1)]
    return caps


def _token_prices(problem: Problem, rate: float, num_prices: int) -> FloatArray:
    """Prices of a draft token in tokens: slopes of chords of the verification cost."""
    last = len(problem.verify) - 1
    ends = np.unique(np.ceil(np.linspace(0, last, min(num_prices, 6) + 1)).astype(np.int64))[1:]
    slopes = rate * (problem.verify[ends] - problem.verify[0]) / ends
    return np.unique(slopes)


def _edges(verify: FloatArray) -> IntArray:
    """Totals of draft tokens after which verification becomes dearer, at most 16 of them."""
    edges = np.flatnonzero(verify[1:] > verify[:-1])
    last = len(verify) - 1
    if len(edges) > 16:
        edges = edges[:: -(-len(edges) // 16)]
    return np.append(edges, last)


@cache
def _levels(lengths: int, families: int, work: int) -> IntArray:
    """Caps to consider: all of them where `levels ** families` fits the work, else fewer."""
    count = lengths
    while count > 2 and count**families > work:
        count -= 1
    if count == lengths:
        return np.arange(lengths)
    return np.unique(np.round(np.linspace(0, (lengths - 1) ** 0.5, count) ** 2).astype(np.int64))


def _fill(
    problem: Problem, by_family: FloatArray, base: FloatArray, caps: IntArray, rate: float
) -> tuple[IntArray, IntArray]:
    """The best of the caps `[families]`, and the length of every request under it."""
    lengths, batch = by_family.shape[1:]
    capped = np.minimum(caps[:, :, None], _range(lengths))  # [candidates, families, lengths]
    value = by_family[_range(len(by_family))[:, None], capped].max(axis=1)
    slope = _envelope_slopes(value)  # [candidates, K, requests]
    falling = -np.sort(-slope.reshape(len(caps), -1), axis=1)[:, : len(problem.verify) - 1]
    total = np.zeros((len(caps), len(problem.verify)))
    np.add.accumulate(falling, axis=1, out=total[:, 1:])
    total -= rate * problem.verify
    total -= (caps @ base)[:, None]
    winner, tokens = divmod(int(total.argmax()), total.shape[1])
    if not tokens:
        return caps[winner], np.zeros(batch, dtype=np.int64)
    return caps[winner], _take(slope[winner], falling[winner, tokens - 1], tokens)


def _envelope_slopes(value: FloatArray) -> FloatArray:
    """Slopes of the least concave majorant of `value[c, n, r]` over n, `[c, K, r]`.

    slope[n] = min over i < n of max over k >= n of (value[k] - value[i]) / (k - i)
    """
    slope = value[:, 1:] - value[:, :-1]
    if not (slope[:, 1:] > slope[:, :-1]).any():
        return slope
    lengths = value.shape[1]
    chord = np.full((lengths - 1, *slope.shape), np.inf)  # [i, c, n - 1, r]
    for i in range(lengths - 1):
        rise = value[:, :i:-1] - value[:, i : i + 1]  # to k = K, K - 1, ..., i + 1
        rise /= _range(lengths)[lengths - 1 - i : 0 : -1, None]
        np.maximum.accumulate(rise, axis=1, out=rise)
        chord[i, :, i:] = rise[:, ::-1]
    return np.minimum.reduce(chord, axis=0)


def _take(slope: FloatArray, least: float, tokens: int) -> IntArray:
    """Lengths `[requests]` that take the `tokens` largest slopes, the last of which is `least`.

    Among equal slopes the first requests win, so that the answer does not depend on a sort.
    """
    length = np.add.reduce(slope >= least, axis=0)
    while (surplus := int(np.add.reduce(length)) - tokens) > 0:
        last = slope[np.maximum(length - 1, 0), _range(len(length))]
        equal = np.flatnonzero((last == least) & (length > 0))
        length[equal[-surplus:]] -= 1
    return length


@cache
def _range(count: int) -> IntArray:
    return np.arange(count)
