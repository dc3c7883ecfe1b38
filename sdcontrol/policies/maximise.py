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
_SOLVED = 256  # array elements that solving caps may touch: caps x lengths x requests
_SHARES = np.array([1.0, 0.5, 0.2])
_TOTALS = 8
_SAMPLE = 24
_ROUNDS = 4
_SCARCE = np.array([0.1, 0.25, 0.5, 0.75])
_NARROW = 48  # columns
_CLOSE = 0.1
_QUICK = 1
_ENOUGH = 0.002  # a rate that grew by less changes the plan's value by its square


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
        answer, _, _ = _respond(problem, rate, None)
        worth = answer.gain - best.gain - rate * (answer.seconds - best.seconds)
        return answer if worth > 0.0 else best
    rate = max(_uniform_rate(problem), best.rate)
    for _ in range(_QUICK):
        best = _better(best, _each_alone(problem, rate))
        rate = max(best.rate, rate)
    caps: IntArray | None = None
    for _ in range(_ROUNDS):
        answer, caps, is_settled = _respond(problem, rate, caps)
        best = _better(best, answer)
        grown = best.rate / rate - 1.0
        # what is left to gain is at most grown * (seconds / plain seconds - 1)
        left = grown * (best.seconds / float(problem.verify[0]) - 1.0)
        if is_settled and grown >= 0.0 and left < _ENOUGH:
            break
        if abs(grown) > _CLOSE:
            caps = None
        rate = best.rate
    return best


def _better(one: Answer, other: Answer) -> Answer:
    return other if other.rate > one.rate else one


def _each_alone(problem: Problem, rate: float) -> Answer:
    """Every request's own best, if it paid an equal share of every round and the average token."""
    batch, last = problem.batch, len(problem.verify) - 1
    share = problem.round[:, batch] * (rate / batch)
    token = float(problem.verify[last] - problem.verify[0]) * (rate / last)
    worth = _worth(problem, rate, share + token)
    families, lengths = len(worth), problem.lengths
    best = worth.reshape(families * lengths, batch).argmax(axis=0)
    arm, length = np.divmod(best, lengths)
    if last < batch * (lengths - 1) and int(_sum(length)) > last:
        length = np.minimum(length, last // batch)
    return evaluate(problem, arm, length)


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


def _respond(problem: Problem, rate: float, caps: IntArray | None) -> tuple[Answer, IntArray, bool]:
    """The best plan at a price of `rate` tokens per second, the caps to try next, if any differ."""
    batch = problem.batch
    each: FloatArray = problem.round[:, batch] - problem.round[:, 1]
    each = each * (rate / max(batch - 1, 1))
    base = rate * problem.round[:, 1] - each  # tokens per round, however many draft in it
    worth = _worth(problem, rate, each)
    by_family = _best_of_family(problem, worth)
    if caps is None:
        caps = _rank_caps(problem, by_family, base, rate)
    winner, length, token = _fill(problem, by_family, base, caps, rate)
    rows = _range(batch)
    capped = np.minimum(length, caps[winner, problem.family][:, None])  # [arms, requests]
    arm = worth[_column(len(capped)), capped, rows].argmax(axis=0)
    answer = evaluate(problem, arm, capped[arm, rows])
    moved = _move_caps(problem, by_family, base, caps[winner], token)
    if (caps == moved).all(axis=1).any():  # it was tried
        return answer, caps, True
    return answer, np.concatenate([caps, moved[None]]), False


def _move_caps(
    problem: Problem, by_family: FloatArray, base: FloatArray, cap: IntArray, token: float
) -> IntArray:
    """Each family's best cap given the others', at a price of `token` tokens per draft token."""
    families, lengths, batch = by_family.shape
    costly = [f for f, tokens in enumerate(base.tolist()) if tokens > 1e-12]
    if not costly or not token:
        return cap
    cap = cap.copy()
    reach = _running(np.maximum, by_family - token * _column(lengths))
    paid = _range(lengths)
    for f in costly:
        others = [reach[g, cap[g]] for g in range(families) if g != f]
        value = np.maximum(reach[f], _max(others, axis=0)) if others else reach[f]
        if problem.drafted is not None:
            paid = np.maximum(_range(lengths) - problem.drafted[f], 0)
        cap[f] = int((value @ np.ones(batch) - base[f] * paid).argmax())
    return cap


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


def _best_of_family(problem: Problem, worth: FloatArray) -> FloatArray:
    """`[families, lengths, requests]`: the best arm of each family at each length."""
    families = len(problem.first)
    if families == len(worth):
        return worth
    best = np.empty((families, *worth.shape[1:]))
    ends = [*problem.first[1:].tolist(), len(worth)]
    for f, (start, end) in enumerate(zip(problem.first.tolist(), ends, strict=True)):
        _max(worth[start:end], axis=0, out=best[f])
    return best


def _rank_caps(problem: Problem, by_family: FloatArray, base: FloatArray, rate: float) -> IntArray:
    """The most promising caps, `[candidates, families]`, judged by a sample of the requests."""
    families, lengths, batch = by_family.shape
    costly = [f for f, tokens in enumerate(base.tolist()) if tokens > 1e-12]
    if not costly:
        return np.full((1, families), lengths - 1)
    sample = by_family[:, :, :: -(-batch // _SAMPLE)]
    weight = batch / sample.shape[2]
    levels, grid = _grid(lengths, len(costly), _WORK // sample.shape[2])
    prices = _token_prices(problem, rate)
    value = _best_within(sample, prices, costly, levels)
    paid = grid if problem.drafted is None else np.maximum(grid - problem.drafted[costly], 0)
    bound = value @ np.full(sample.shape[2], weight) - paid @ base[costly]  # [prices, caps]
    totals = _totals(problem.verify, prices, rate)
    # for every total, what caps can be worth is the least over token prices
    worth = _min(bound[:, None] + (prices[:, None] * totals)[:, :, None], axis=0)
    score = _max(worth - rate * problem.verify[totals][:, None], axis=0)
    keep = max(1, min(_SOLVED // (lengths * batch), len(score)))
    chosen = [int(score.argmax())] if keep == 1 else (-score).argsort(kind="stable")[:keep]
    caps = np.empty((keep, families), dtype=np.int64)
    caps[:] = lengths - 1
    caps[:, costly] = grid[chosen]
    return caps


def _best_within(
    by_family: FloatArray, prices: FloatArray, costly: list[int], levels: IntArray
) -> FloatArray:
    """`[prices, caps, requests]`: every request's best under all combinations of caps."""
    families, lengths, batch = by_family.shape
    # [families, prices, lengths, requests], then the best of at most so many tokens
    reach = by_family[:, None] - (prices[:, None] * _range(lengths))[:, :, None]
    reach = _running(np.maximum, reach)
    free = [f for f in range(families) if f not in costly]
    if len(levels) < lengths:
        ends, reach = reach[:, :, -1], reach[:, :, levels]
    else:
        ends = reach[:, :, -1]
    value = reach[costly[0]]
    for f in free:
        value = np.maximum(value, ends[f][:, None])
    for f in costly[1:]:  # [prices, caps so far, requests]
        value = np.maximum(value[:, :, None], reach[f][:, None])
        value = value.reshape(len(prices), -1, batch)
    return value


def _token_prices(problem: Problem, rate: float) -> FloatArray:
    """Prices of a draft token, from the steepest part of verification downwards, at most 1 token."""
    verify, last = problem.verify, len(problem.verify) - 1
    starts, ends = _spans(last)
    slopes = (verify[ends] - verify[starts]) * (rate / (ends - starts))
    prices: FloatArray = min(float(_max(slopes)), 1.0) * _SHARES
    if last < problem.batch * (problem.lengths - 1):  # KV slots are scarce: they have a price too
        prices = np.concatenate([prices, _SCARCE])
    return prices


@cache
def _spans(last: int) -> tuple[IntArray, IntArray]:
    """Where chords of the verification cost start and end: the whole and its quarters."""
    starts = np.array([0, last // 4, last // 2, last * 3 // 4, 0])
    return starts, np.maximum(
        np.array([last // 4, last // 2, last * 3 // 4, last, last]), starts + 1
    )


@cache
def _evenly(last: int) -> IntArray:
    return np.linspace(last / _TOTALS, last, _TOTALS).astype(np.int64)


def _totals(verify: FloatArray, prices: FloatArray, rate: float) -> IntArray:
    """Totals of draft tokens where verification is about to become dearer."""
    totals = verify.searchsorted(verify[_evenly(len(verify) - 1)], "right") - 1
    corners = (rate * verify - prices[:, None] * _range(len(verify))).argmin(axis=1)
    return np.concatenate([np.maximum(totals, 0), corners])


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
) -> tuple[int, IntArray, float]:
    """The index of the best of the caps, every request's length, and what the last token was worth."""
    families, lengths, batch = by_family.shape
    capped = np.minimum(caps.T[:, None], _column(lengths))  # [families, lengths, candidates]
    value = _max(by_family[_range(families)[:, None, None], capped], axis=0)
    slope = _envelope_slopes(value.reshape(lengths, -1)).reshape(lengths - 1, -1, batch)
    falling = -slope.swapaxes(0, 1).reshape(len(caps), -1)
    falling.sort(axis=1)
    total = np.zeros((len(caps), len(problem.verify)))
    np.add.accumulate(falling[:, : total.shape[1] - 1], axis=1, out=total[:, 1:])
    total += rate * problem.verify
    paid = caps if problem.drafted is None else np.maximum(caps - problem.drafted, 0)
    total += (paid @ base)[:, None]
    winner, tokens = divmod(int(total.argmin()), total.shape[1])
    if not tokens:
        return winner, np.zeros(batch, dtype=np.int64), 0.0
    least = -float(falling[winner, tokens - 1])
    return winner, _take(slope[:, winner], least, tokens), least


def _envelope_slopes(value: FloatArray) -> FloatArray:
    """Slopes `[K, rows]` of the least concave majorant of `value[n, row]` over n.

    slope[n] = min over m <= n of max over k >= m of (value[k] - value[m - 1]) / (k - m + 1)
    """
    slope = value[1:] - value[:-1]
    convex = np.flatnonzero(np.logical_or.reduce(slope[1:] > slope[:-1], axis=0))
    if len(convex):
        start, end, inverse, first = _chords(len(value))
        rows = value[:, convex]
        chord = (rows.take(end, axis=0) - rows.take(start, axis=0)) * inverse
        if len(convex) < _NARROW:
            ahead = np.maximum.reduceat(chord, first, axis=0)
        else:
            ahead = np.empty((len(first), len(convex)))
            for m, (low, high) in enumerate(zip(first, [*first[1:], len(start)], strict=True)):
                _max(chord[low:high], axis=0, out=ahead[m])
        slope[:, convex] = _running(np.minimum, ahead[None])[0]
    return slope


@cache
def _chords(lengths: int) -> tuple[IntArray, IntArray, FloatArray, list[int]]:
    """All pairs start < end of lengths, sorted; 1 / distance `[pairs, 1]`; where starts begin."""
    start, end = np.triu_indices(lengths, 1)
    first = np.searchsorted(start, np.arange(lengths - 1)).tolist()
    return start, end, 1.0 / (end - start)[:, None], first


def _running(of: np.ufunc, values: FloatArray) -> FloatArray:
    """`of.accumulate` over the last axis but one, in place; numpy's is slow where rows are wide."""
    if values.shape[-1] < _NARROW:
        of.accumulate(values, axis=-2, out=values)
    else:
        for n in range(1, values.shape[-2]):
            of(values[..., n, :], values[..., n - 1, :], out=values[..., n, :])
    return values


def _take(slope: FloatArray, least: float, tokens: int) -> IntArray:
    """Lengths `[requests]` that take the `tokens` largest slopes, the last of which is `least`.

    Among equal slopes the first requests win, so that the answer does not depend on a sort.
    """
    length: IntArray = _sum(slope >= least, axis=0)
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
