"""A problem at a price of time: what every draft length of every request is worth in tokens.

Knows nothing of verification, whose price depends on the tokens of the whole step.
"""

from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.policies.arrays import greatest
from sdcontrol.policies.problem import IntArray, Problem

__all__ = ["Prices", "price"]

_FREE = 1e-12  # tokens per round


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


def price(problem: Problem, rate: float) -> Prices:
    """`problem` at `rate` tokens per second; a round's price is linear in who drafts in it."""
    first, full = problem.round[:, 1], problem.round[:, problem.batch]
    each: FloatArray = (full - first) / max(problem.batch - 1, 1)
    base = rate * (first - each)
    worth = problem.worth(rate, each)
    return Prices(
        problem=problem,
        rate=rate,
        worth=worth,
        by_family=_best_of_family(problem, worth),
        base=base,
        costly=[f for f, tokens in enumerate(base.tolist()) if tokens > _FREE],
    )


def _best_of_family(problem: Problem, worth: FloatArray) -> FloatArray:
    if len(problem.members) == len(worth):
        return worth
    best = np.empty((len(problem.members), *worth.shape[1:]))
    for f, members in enumerate(problem.members):
        greatest(worth[members], axis=0, out=best[f])
    return best
