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

import numpy as np

from sdcontrol.policies.arrays import column, counting, greatest, total
from sdcontrol.policies.caps import move_caps, rank_caps
from sdcontrol.policies.fill import fill
from sdcontrol.policies.improve import improve
from sdcontrol.policies.pricing import price
from sdcontrol.policies.problem import Answer, IntArray, Problem, evaluate

__all__ = ["maximise"]

_ENOUGH = 0.004  # of the rate: what may be left to gain
_CLOSE = 0.15  # a rate that moved by less keeps the caps that were ranked at the old one
_MOST_RESPONSES = 4


def maximise(problem: Problem, rate: float | None = None) -> Answer:
    """The best plan found: of `gain / seconds`, or of `gain - rate * seconds` at a given rate."""
    if len(problem.verify) == 1:
        return _nothing(problem)
    best = _best_ratio(problem) if rate is None else _best_at(problem, rate)
    is_scarce = len(problem.verify) <= problem.batch  # fewer KV slots than requests
    if is_scarce or problem.has_kinked_rounds:
        best = improve(problem, best, rate)
    return best


def _best_at(problem: Problem, rate: float) -> Answer:
    """The plan of largest `gain - rate * seconds`."""
    best, caps = _nothing(problem), None
    for _ in range(_MOST_RESPONSES):
        answer, caps, is_settled = _respond(problem, rate, caps)
        if answer.gain - rate * answer.seconds > best.gain - rate * best.seconds:
            best = answer
        if is_settled:
            break
    return best


def _best_ratio(problem: Problem) -> Answer:
    """The plan of largest `gain / seconds`."""
    best = _nothing(problem)
    rate = max(_uniform_rate(problem), best.rate)
    best = _better(best, _each_alone(problem, rate))
    rate = max(best.rate, rate)
    caps: IntArray | None = None
    for _ in range(_MOST_RESPONSES):
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


def _each_alone(problem: Problem, rate: float) -> Answer:
    """Every request's own best, if it paid an equal share of every round and the average token."""
    batch, last = problem.batch, len(problem.verify) - 1
    token = float(problem.verify[last] - problem.verify[0]) / last
    worth = problem.worth(rate, problem.round[:, batch] / batch + token)
    arm, length = np.divmod(worth.reshape(-1, batch).argmax(axis=0), problem.lengths)
    if last < batch * (problem.lengths - 1) and int(total(length)) > last:
        length = np.minimum(length, last // batch)
    return evaluate(problem, arm, length)


def _respond(problem: Problem, rate: float, caps: IntArray | None) -> tuple[Answer, IntArray, bool]:
    """The best plan at a price of `rate` tokens per second under `caps`, or under ranked ones.

    Also the caps to try next, and whether they hold nothing new.
    """
    prices = price(problem, rate)
    if caps is None:
        caps = rank_caps(prices)
    winner, length, token = fill(prices, caps)
    rows = counting(problem.batch)
    capped = np.minimum(length, caps[winner, problem.family][:, None])  # [arms, requests]
    arm = prices.worth[column(len(capped)), capped, rows].argmax(axis=0)
    answer = evaluate(problem, arm, capped[arm, rows])
    moved = move_caps(prices, caps[winner], token)
    if np.logical_and.reduce(caps == moved, axis=1).any():
        return answer, caps, True
    return answer, np.concatenate([caps, moved[None]]), False
