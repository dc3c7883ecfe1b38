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
from sdcontrol.policies.fill import fill
from sdcontrol.policies.improve import improve
from sdcontrol.policies.pricing import Prices, Spending, price, price_shared, spending
from sdcontrol.policies.problem import Answer, IntArray, Problem, evaluate

__all__ = ["Start", "maximise"]

_ENOUGH = 0.004  # of the rate: what may be left to gain
_CERTAIN = 0.003  # the same, where a bound says so
_CLOSE = 0.15  # a rate that moved by less keeps the caps that were ranked at the old one
_FAMILIAR = 0.25  # a rate within this of an earlier one keeps the caps of then
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
    for _ in range(_MOST_RESPONSES):
        answer, caps, is_settled = _respond(price(spent, rate), caps)
        if answer.gain - rate * answer.seconds > best.gain - rate * best.seconds:
            best = answer
        if is_settled:
            break
    return best


def _best_ratio(spent: Spending, start: Start | None) -> Answer:
    """The plan of largest `gain / seconds`."""
    problem = spent.problem
    best = _nothing(problem)
    rate = max(_uniform_rate(problem), best.rate)
    shared, bound = _sharing(spent, rate)
    best = _better(best, shared)
    if bound < (1.0 + _CERTAIN) * best.rate:
        return best
    rate = max(best.rate, rate)
    caps: IntArray | None = None
    if start is not None and abs(rate / start.rate - 1.0) < _FAMILIAR:
        caps = _caps_to_try(problem, shared, start)
    for _ in range(_MOST_RESPONSES):
        answer, caps, is_settled = _respond(price(spent, rate), caps)
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


def _caps_to_try(problem: Problem, answer: Answer, start: Start) -> IntArray:
    """The caps of an earlier plan, those of `answer`, and none: `[candidates, families]`."""
    caps = np.zeros((3, len(problem.members)), dtype=np.int64)
    caps[0] = np.minimum(start.caps, problem.lengths - 1)
    np.maximum.at(caps[1], problem.family[answer.arm], answer.length)
    caps[2] = problem.lengths - 1
    return caps


def _respond(prices: Prices, caps: IntArray | None) -> tuple[Answer, IntArray, bool]:
    """The best plan at given prices under `caps`, or under ranked ones.

    Also the caps to try next, and whether they hold nothing new.
    """
    problem = prices.problem
    if caps is None:
        caps = rank_caps(prices)
    filled = fill(prices, caps)
    cap, rows = caps[filled.caps], counting(problem.batch)
    capped = np.minimum(filled.length, cap[problem.family][:, None])  # [arms, requests]
    arm = prices.worth[column(len(capped)), capped, rows].argmax(axis=0)
    answer = evaluate(problem, arm, capped[arm, rows])
    moved = move_caps(prices, cap, filled.token)
    if np.logical_and.reduce(caps == moved, axis=1).any():
        return answer, caps, True
    return answer, np.concatenate([caps, moved[None]]), False
