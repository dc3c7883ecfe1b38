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

import numpy as np

from sdcontrol.policies.arrays import column, counting, greatest, total
from sdcontrol.policies.caps import move_caps, rank_caps
from sdcontrol.policies.fill import Filled, fill
from sdcontrol.policies.improve import improve
from sdcontrol.policies.pricing import (
    Prices,
    Spending,
    price,
    price_shared,
    spending,
)
from sdcontrol.policies.problem import Answer, IntArray, Problem, evaluate

__all__ = ["Start", "maximise"]

_ENOUGH = 0.004  # of the rate: what may be left to gain
_CERTAIN = 0.003  # the same, where a bound says so
_CLOSE = 0.15  # a rate that moved by less keeps the caps that were ranked at the old one
_NEAR = 0.02  # of the rate: what an answer near that of the last step may have moved by
_FEW = 2  # requests for which a search from nothing is the quicker one
_MANY = 32  # requests beyond which a bound seldom decides, and is dearer than a guess
_MOST_ABOVE = 1.5  # times the best rate of one choice for all, that a start may assume
_MOST_RESPONSES = 4


@dataclass(frozen=True, slots=True)
class Start:
    """Where the best plan of a like problem lay."""

    rate: float
    caps: IntArray  # [families], the most tokens that anyone drafted


def maximise(problem: Problem, rate: float | None = None, start: Start | None = None) -> Answer:
    """The best plan found: of `gain / seconds`, or of `gain - rate * seconds` at a given rate.

    From a `start`, caps are only moved, not ranked, unless the rate turns out to be another.
    """
    if len(problem.verify) == 1:
        return _nothing(problem)
    spent = spending(problem)
    best = _best_ratio(spent, start) if rate is None else _best_at(spent, rate)
    is_scarce = len(problem.verify) <= problem.batch  # fewer KV slots than requests
    if is_scarce or problem.has_kinked_rounds:
        best = improve(problem, best, rate)
    return best


def _best_at(spent: Spending, rate: float) -> Answer:
    """The plan of largest `gain - rate * seconds`."""
    best, caps = _nothing(spent.problem), None
    prices = price(spent, rate)
    for _ in range(_MOST_RESPONSES):
        tried = _respond(prices, caps)
        answer = tried.answer
        if answer.gain - rate * answer.seconds > best.gain - rate * best.seconds:
            best = answer
        caps, is_settled = _moved(tried)
        if is_settled:
            break
    return best


def _best_ratio(spent: Spending, start: Start | None) -> Answer:
    """The plan of largest `gain / seconds`."""
    problem = spent.problem
    best = _nothing(problem)
    rate = max(_uniform_rate(problem), best.rate)
    if start is not None and problem.batch > _FEW:
        likely = min(max(start.rate, rate), _MOST_ABOVE * rate)
        best, is_settled = _climb(spent, best, likely, _caps_to_try(problem, start))
        if is_settled:
            return best
    if problem.batch > _MANY:
        best = _better(best, _each_alone(spent, rate))
    else:
        shared, bound = _sharing(spent, rate)
        best = _better(best, shared)
        if bound < (1.0 + _CERTAIN) * best.rate:
            return best
    return _climb(spent, best, max(best.rate, rate), None)[0]


def _climb(
    spent: Spending, best: Answer, rate: float, caps: IntArray | None
) -> tuple[Answer, bool]:
    """`best`, or better ones found from `rate` on, until the ratio and the caps stay.

    Without `caps` they are ranked; and again where the ratio turns out to be quite another.
    """
    is_ranked = caps is None
    fall, rise = (0.0, _ENOUGH) if is_ranked else (-_NEAR, _NEAR)
    for _ in range(_MOST_RESPONSES):
        tried = _respond(price(spent, rate), caps)
        best = _better(best, tried.answer)
        grown = best.rate / rate - 1.0
        # what is left to gain is at most grown * (seconds / plain seconds - 1)
        longer = best.seconds / float(spent.problem.verify[0]) - 1.0
        is_close = grown >= fall and grown * longer < rise
        caps = tried.caps
        if is_close or is_ranked:
            caps, is_settled = _moved(tried)
            if is_close and is_settled:
                return best, True
        if is_ranked and abs(grown) > _CLOSE:
            caps = None
        rate = best.rate
    return best, False


def _better(one: Answer, other: Answer) -> Answer:
    return other if other.rate > one.rate else one


def _nothing(problem: Problem) -> Answer:
    zeros = np.zeros(problem.batch, dtype=np.int64)
    return Answer(zeros, zeros, float(problem.batch), float(problem.verify[0]))


def _uniform_rate(problem: Problem) -> float:
    """The best rate of one arm and one length for all."""
    batch = problem.batch
    verify = problem.verify[: problem.lengths * batch : batch]  # lengths that the KV slots allow
    lengths = len(verify)
    gain = batch + total(problem.gain[:, :lengths], axis=2)  # [arms, lengths]
    rounds = problem.round[problem.family, batch]
    return float(greatest(gain / (verify + rounds[:, None] * counting(lengths)), axis=None))


def _each_alone(spent: Spending, rate: float) -> Answer:
    """Every request's own best, if it paid its share of every round and the average token."""
    problem = spent.problem
    batch, last = problem.batch, len(problem.verify) - 1
    token = float(problem.verify[last] - problem.verify[0]) / last
    worth = price_shared(spent, rate).worth - (rate * token) * column(problem.lengths)
    arm, length = np.divmod(worth.reshape(-1, batch).argmax(axis=0), problem.lengths)
    if last < batch * (problem.lengths - 1) and int(total(length)) > last:
        length = np.minimum(length, last // batch)
    return evaluate(problem, arm, length)


def _sharing(spent: Spending, rate: float) -> tuple[Answer, float]:
    """The best plan if every request paid for its share of a round, and a bound of the best rate.

    With U the value of that plan at `rate`, no plan has gain - rate * seconds > U, hence none has
    a rate beyond rate + U / (seconds without drafts), or beyond `rate` where U is negative.
    """
    problem = spent.problem
    prices = price_shared(spent, rate)
    filled = fill(prices, None)
    arm = prices.worth[:, filled.length, counting(problem.batch)].argmax(axis=0)
    value = max(filled.value + problem.batch, 0.0)
    return evaluate(problem, arm, filled.length), rate + value / float(problem.verify[0])


def _caps_to_try(problem: Problem, start: Start) -> IntArray:
    """The caps of an earlier plan, and none: `[candidates, families]`."""
    caps = np.full((2, len(problem.members)), problem.lengths - 1)
    np.minimum(start.caps, caps[0], out=caps[0])
    return caps


@dataclass(frozen=True, slots=True)
class _Tried:
    """The best plan at given prices under the best of some caps."""

    prices: Prices
    caps: IntArray  # [candidates, families]
    filled: Filled
    answer: Answer


def _respond(prices: Prices, caps: IntArray | None) -> _Tried:
    """The best plan at given prices under `caps`, or under ranked ones."""
    problem = prices.problem
    if caps is None:
        caps = rank_caps(prices)
    filled = fill(prices, caps)
    cap, rows = caps[filled.caps], counting(problem.batch)
    capped = np.minimum(filled.length, cap[problem.family][:, None])  # [arms, requests]
    arm = prices.worth[column(len(capped)), capped, rows].argmax(axis=0)
    return _Tried(prices, caps, filled, evaluate(problem, arm, capped[arm, rows]))


def _moved(tried: _Tried) -> tuple[IntArray, bool]:
    """The caps to try next, and whether they hold nothing new."""
    caps, filled = tried.caps, tried.filled
    moved = move_caps(tried.prices, caps[filled.caps], filled.token)
    if np.logical_and.reduce(caps == moved, axis=1).any():
        return caps, True
    return np.concatenate([caps, moved[None]]), False
