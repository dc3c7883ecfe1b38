"""A problem at a price of time: what every draft length of every request is worth in tokens.

Knows nothing of verification, whose price depends on the tokens of the whole step.
"""

from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.policies.arrays import column, counting, greatest, least
from sdcontrol.policies.problem import IntArray, Problem

__all__ = ["Prices", "Spending", "price", "price_shared", "spending"]

_FREE = 1e-12  # tokens per round


@dataclass(slots=True)
class Spending:
    """Seconds that drafting takes, divided into what a request causes and what a round costs."""

    problem: Problem
    rounds: FloatArray  # [arms or 1, lengths, 1], rounds to come
    each: FloatArray  # [families], seconds of a round per request that drafts in it
    base: FloatArray  # [families], seconds of a round however few draft in it
    own: FloatArray  # [arms, lengths, requests or 1], what a request causes


@dataclass(slots=True)
class Prices:
    """`problem` at `rate` tokens per second."""

    problem: Problem
    rate: float
    worth: FloatArray  # [arms, lengths, requests], gain less drafting, before bases
    by_family: FloatArray  # [families, lengths, requests], the best arm of each family
    base: FloatArray  # [families], tokens per round, however many draft in it
    costly: list[int]  # families whose rounds have a base

    def paid(self, rounds: IntArray) -> IntArray:
        """Of `rounds[..., family]`, those that are not spent yet."""
        drafted = self.problem.drafted
        return rounds if drafted is None else np.maximum(rounds - drafted, 0)


def spending(problem: Problem) -> Spending:
    """The seconds of drafting, whatever a second is worth; the price of a round is linear."""
    first, full = problem.round[:, 1], problem.round[:, problem.batch]
    each: FloatArray = (full - first) / max(problem.batch - 1, 1)
    rounds = column(problem.lengths)[None]
    if problem.drafted is not None:
        rounds = np.maximum(rounds - problem.drafted[problem.family][:, None, None], 0)
    per_round = each[problem.family][:, None, None]
    if problem.excess is not None:
        per_round = per_round + problem.excess[:, None]
    own: FloatArray = per_round * rounds
    if problem.catch_up is not None:
        own = own + problem.catch_up[:, None] * (column(problem.lengths) > 0)
    return Spending(problem, rounds.astype(float), each, first - each, own)


def price(spent: Spending, rate: float) -> Prices:
    """The problem at `rate` tokens per second, bases of rounds left out."""
    problem, base = spent.problem, rate * spent.base
    worth = problem.gain - rate * spent.own
    return Prices(
        problem=problem,
        rate=rate,
        worth=worth,
        by_family=_best_of_family(problem, worth),
        base=base,
        costly=[f for f, tokens in enumerate(base.tolist()) if tokens > _FREE],
    )


def price_shared(spent: Spending, rate: float) -> Prices:
    """The problem at `rate`, with every request paying the least share of a round that it can.

    No plan costs less than so: what is best here bounds what any plan is worth.
    """
    worth = spent.problem.gain - rate * (spent.own + _shares(spent))
    best = greatest(worth, axis=0, keepdims=True)
    return Prices(spent.problem, rate, worth, by_family=best, base=_NO_BASE, costly=[])


def _shares(spent: Spending) -> FloatArray:
    """`[arms, lengths, 1]`: seconds beyond its own that a request pays at least for its rounds."""
    problem = spent.problem
    share = least(problem.round[:, 1:] / (counting(problem.batch) + 1), axis=1) - spent.each
    seconds: FloatArray = share[problem.family][:, None, None] * spent.rounds
    return seconds


_NO_BASE: FloatArray = np.zeros(1)


def _best_of_family(problem: Problem, worth: FloatArray) -> FloatArray:
    if len(problem.members) == len(worth):
        return worth
    best = np.empty((len(problem.members), *worth.shape[1:]))
    for f, members in enumerate(problem.members):
        greatest(worth[members], axis=0, out=best[f])
    return best
