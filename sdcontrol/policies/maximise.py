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

_WORK = 6144  # array elements that ranking caps may touch: prices x caps x requests
_SOLVED = 512  # array elements that solving caps may touch: caps x lengths x requests
_PRICES = 6
_TOTALS = 12
_SCARCE = np.array([0.1, 0.25, 0.5, 0.75])
_CLOSE = 1.05
_ENOUGH = 1.005  # a rate that grew by less changes the plan's value by its square


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
        answer, _ = _respond(problem, rate, None)
        worth = answer.gain - best.gain - rate * (answer.seconds - best.seconds)
        return answer if worth > 0.0 else best
    rate = max(_uniform_rate(problem), best.rate)
    caps: IntArray | None = None
    for _ in range(4):
        answer, caps = _respond(problem, rate, caps)
        if answer.rate > best.rate:
            best = answer
        grown = best.rate / rate
        if 1.0 <= grown < _ENOUGH:
            break
        if not 1.0 / _CLOSE < grown < _CLOSE:
            caps = None
        rate = best.rate
    return best


def evaluate(problem: Problem, arm: IntArray, length: IntArray) -> Answer:
    """What `length[r]` tokens by `arm[r]` for every request r are worth."""
    rows = _range(problem.batch)
    families, lengths = problem.round.shape[0], problem.lengths
    gain = problem.batch + float(_sum(problem.gain[arm, length, rows]))
    cells = np.bincount(problem.family[arm] * lengths + length, minlength=families * lengths)
    ending = cells.reshape(families, lengths)[:, :0:-1]  # who drafts K, K - 1, ..., 1 tokens
    drafting = np.add.accumulate(ending, axis=1)
    if problem.drafted is not None:  # only rounds to come: columns are rounds K, K - 1, ..., 1
        drafting = drafting * (_range(lengths)[:0:-1] > problem.drafted[:, None])
    seconds = float(problem.verify[int(_sum(length))])
    seconds += float(_sum(problem.round[_column(families), drafting], axis=None))
    if problem.excess is not None:
        seconds += float(problem.excess[arm, rows] @ _to_come(problem, problem.family[arm], length))
    if problem.catch_up is not None:
        seconds += float(problem.catch_up[arm, rows] @ (length > 0))
    return Answer(arm, length, gain, seconds)


def _to_come(problem: Problem, family: IntArray, length: IntArray) -> IntArray:
    """Of `length` drafting rounds by `family`, those that are not spent yet."""
    if problem.drafted is None:
        return length
    return np.maximum(length - problem.drafted[family], 0)


def _nothing(problem: Problem) -> Answer:
    zeros = np.zeros(problem.batch, dtype=np.int64)
    return Answer(zeros, zeros, float(problem.batch), float(problem.verify[0]))


def _uniform_rate(problem: Problem) -> float:
    """The best rate of one arm and one length for all."""
    batch = problem.batch
    verify = problem.verify[: problem.lengths * batch : batch]  # lengths that the KV slots allow
    lengths = len(verify)
    gain = batch + _sum(problem.gain[:, :lengths], axis=2)  # [arms, lengths]
    rounds = problem.round[problem.family, batch]
    return float(_max(gain / (verify + rounds[:, None] * _range(lengths)), axis=None))


def _respond(problem: Problem, rate: float, caps: IntArray | None) -> tuple[Answer, IntArray]:
    """The best plan at a price of `rate` tokens per second, and the caps to try next time."""
    batch = problem.batch
    each = (problem.round[:, batch] - problem.round[:, 1]) * (rate / max(batch - 1, 1))
    base = rate * problem.round[:, 1] - each  # tokens per round, however many draft in it
    worth = _worth(problem, rate, each)
    by_family = worth
    if len(base) < len(problem.family):
        by_family = np.maximum.reduceat(worth, problem.first, axis=0)
    if caps is None:
        caps = _rank_caps(problem, by_family, base, rate)
    winner, length = _fill(problem, by_family, base, caps, rate)
    rows = _range(batch)
    capped = np.minimum(length, caps[winner, problem.family][:, None])  # [arms, requests]
    arm = worth[_column(len(capped)), capped, rows].argmax(axis=0)
    return evaluate(problem, arm, capped[arm, rows]), caps


def _worth(problem: Problem, rate: float, each: FloatArray) -> FloatArray:
    """`[arms, lengths, requests]`: tokens gained less drafting, before bases and verification."""
    price = each[problem.family][:, None]
    if problem.excess is not None:
        price = price + rate * problem.excess
    rounds = _column(problem.lengths)
    if problem.drafted is not None:
        rounds = np.maximum(rounds - problem.drafted[problem.family][:, None, None], 0)
    worth: FloatArray = problem.gain - price[:, None, :] * rounds
    if problem.catch_up is not None:
        worth[:, 1:] -= rate * problem.catch_up[:, None, :]
    return worth


def _rank_caps(
    problem: Problem, by_family: FloatArray, base: FloatArray, rate: float
) -> IntArray:
    """The most promising caps, `[candidates, families]`."""
    families, lengths, batch = by_family.shape
    costly = [f for f, tokens in enumerate(base.tolist()) if tokens > 1e-12]
    if not costly:
        return np.full((1, families), lengths - 1)
    levels, grid = _grid(lengths, len(costly), _WORK // batch)
    prices = _token_prices(problem, rate, _WORK // (batch * len(grid)))
    # [families, prices, lengths, requests], then the best of at most so many tokens
    reach = by_family[:, None] - prices[:, None, None] * _column(lengths)
    np.maximum.accumulate(reach, axis=2, out=reach)
    if len(levels) < lengths:
        reach = reach[:, :, levels]
    value = reach[costly[0]]
    if len(costly) < families:
        free = [f for f in range(families) if f not in costly]
        value = np.maximum(value, _max(reach[free, :, -1], axis=0)[:, None])
    for f in costly[1:]:  # [prices, caps so far, requests]
        value = np.maximum(value[:, :, None], reach[f][:, None])
        value = value.reshape(len(prices), -1, batch)
    paid = grid if problem.drafted is None else np.maximum(grid - problem.drafted[costly], 0)
    bound = _sum(value, axis=2) - paid @ base[costly]  # [prices, caps]
    score = bound[0]
    if len(prices) > 1:
        totals = _totals(problem.verify)
        # for every total, what caps can be worth is the least over token prices
        worth = _min(bound[:, None] + np.multiply.outer(prices, totals)[:, :, None], axis=0)
        score = _max(worth - rate * problem.verify[totals][:, None], axis=0)
    keep = max(1, min(_SOLVED // (lengths * batch), len(score)))
    chosen = [int(score.argmax())] if keep == 1 else (-score).argsort(kind="stable")[:keep]
    caps = np.full((keep, families), lengths - 1)
    caps[:, costly] = grid[chosen]
    return caps


def _token_prices(problem: Problem, rate: float, most: int) -> FloatArray:
    """Prices of a draft token in tokens: slopes of chords of the verification cost."""
    verify, last = problem.verify, len(problem.verify) - 1
    starts, ends = _spans(last, most)
    prices: FloatArray = (verify[ends] - verify[starts]) * (rate / (ends - starts))
    if last < problem.batch * (problem.lengths - 1):  # KV slots are scarce: they have a price too
        prices = np.concatenate([prices, _SCARCE])
    return prices


@cache
def _spans(last: int, most: int) -> tuple[IntArray, IntArray]:
    """Where chords of the verification cost start and end: the whole, halves, ..."""
    cuts = [(0, 1), (0.5, 1), (0, 0.5), (0.25, 0.75), (0, 0.25), (0.75, 1)][: max(1, most)]
    spans = np.array(cuts[:_PRICES]).T * last
    starts = np.floor(spans[0]).astype(int)
    return starts, np.maximum(np.ceil(spans[1]).astype(int), starts + 1)


@cache
def _ends(last: int, count: int) -> IntArray:
    return np.ceil(np.linspace(0, last, count + 1)[1:]).astype(np.int64)


def _totals(verify: FloatArray) -> IntArray:
    """Some totals of draft tokens, each the largest of its price."""
    totals = verify.searchsorted(verify[_ends(len(verify) - 1, _TOTALS)], "right") - 1
    return np.maximum(totals, 0)


@cache
def _grid(lengths: int, families: int, work: int) -> tuple[IntArray, IntArray]:
    """Caps to consider, `[levels]` and `[levels ** families, families]`.

    All lengths where their combinations fit the work, else fewer, denser near zero.
    """
    count = lengths
    while count > 2 and count**families > work:
        count -= 1
    levels = np.arange(lengths)
    if count < lengths:
        levels = np.unique(np.round(np.linspace(0, levels[-1] ** 0.5, count) ** 2).astype(int))
    axes = np.meshgrid(*[levels] * families, indexing="ij")
    return levels, np.stack([axis.ravel() for axis in axes], axis=1)


def _fill(
    problem: Problem, by_family: FloatArray, base: FloatArray, caps: IntArray, rate: float
) -> tuple[int, IntArray]:
    """The index of the best of the caps, and the length of every request under it."""
    families, lengths, batch = by_family.shape
    capped = np.minimum(caps[:, :, None], _range(lengths))  # [candidates, families, lengths]
    value = _max(by_family[_column(families), capped], axis=1)
    slope = _envelope_slopes(value)  # [candidates, K, requests]
    falling = -slope.reshape(len(caps), -1)
    falling.sort(axis=1)
    total = np.zeros((len(caps), len(problem.verify)))
    np.add.accumulate(falling[:, : total.shape[1] - 1], axis=1, out=total[:, 1:])
    total += rate * problem.verify
    paid = caps if problem.drafted is None else np.maximum(caps - problem.drafted, 0)
    total += (paid @ base)[:, None]
    winner, tokens = divmod(int(total.argmin()), total.shape[1])
    if not tokens:
        return winner, np.zeros(batch, dtype=np.int64)
    return winner, _take(slope[winner], -float(falling[winner, tokens - 1]), tokens)


def _envelope_slopes(value: FloatArray) -> FloatArray:
    """Slopes of the least concave majorant of `value[c, n, r]` over n, `[c, K, r]`.

    slope[n] = min over m <= n of max over k >= m of (value[k] - value[m - 1]) / (k - m + 1)
    """
    slope = value[:, 1:] - value[:, :-1]
    if not (slope[:, 1:] > slope[:, :-1]).any():
        return slope
    start, end, length, first = _chords(value.shape[1])
    chord = value[:, end] - value[:, start]
    chord /= length
    ahead = np.maximum.reduceat(chord, first, axis=1)
    return np.minimum.accumulate(ahead, axis=1, out=ahead)


@cache
def _chords(lengths: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """All pairs start < end of lengths, sorted; their distances `[pairs, 1]`; where starts begin."""
    start, end = np.triu_indices(lengths, 1)
    return start, end, (end - start)[:, None], np.searchsorted(start, np.arange(lengths - 1))


def _take(slope: FloatArray, least: float, tokens: int) -> IntArray:
    """Lengths `[requests]` that take the `tokens` largest slopes, the last of which is `least`.

    Among equal slopes the first requests win, so that the answer does not depend on a sort.
    """
    length = _sum(slope >= least, axis=0)
    while (surplus := int(_sum(length)) - tokens) > 0:
        last = slope[np.maximum(length - 1, 0), _range(len(length))]
        equal = np.flatnonzero((last == least) & (length > 0))
        length[equal[-surplus:]] -= 1
    return length


@cache
def _range(count: int) -> IntArray:
    return np.arange(count)


@cache
def _column(count: int) -> IntArray:
    return np.arange(count)[:, None]


_sum = np.add.reduce
_max = np.maximum.reduce
_min = np.minimum.reduce
