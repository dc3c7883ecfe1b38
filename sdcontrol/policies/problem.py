"""What a maximiser needs to know of one step, as arrays.

Knows nothing of views, and nothing of how the best plan is found. Requests are the last axis everywhere, so that every
operation over arms, families or lengths runs along contiguous memory.

    gain[a, n, r]    expected accepted tokens of request r with n draft tokens by arm a
    verify[t]        seconds of a step with t draft tokens in all, before any drafting
    round[f, m]      seconds of one drafting round of family f with m requests of average KV
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import FloatArray

__all__ = ["Answer", "IntArray", "Problem", "evaluate"]

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Problem:
    """What a maximiser needs to know of one step. Built by `read`, changed by nobody."""

    arms: tuple[str, ...]
    family: IntArray  # [arms], index of the arm's family; arms of a family are neighbours
    members: tuple[slice, ...]  # [families], its arms
    gain: FloatArray  # [arms, lengths, requests]; lengths are 0..K; flat beyond a request's limit
    limit: IntArray | None  # [arms, requests], the most tokens; None: K everywhere
    verify: FloatArray  # [tokens + 1], overhead included; its end is the limit of draft tokens
    round: FloatArray  # [families, requests + 1]
    excess: FloatArray | None  # [arms, requests], seconds per round for reading above-average KV
    catch_up: FloatArray | None = None  # [arms, requests], seconds charged to one that drafts
    drafted: IntArray | None = None  # [families], rounds that are already spent; None: none

    @property
    def batch(self) -> int:
        """Requests."""
        return int(self.gain.shape[2])

    @property
    def lengths(self) -> int:
        """Draft lengths to choose from, 0 included: K + 1."""
        return int(self.gain.shape[1])

    @property
    def has_kinked_rounds(self) -> bool:
        """Whether the price of a round is far from linear in the requests that draft in it."""
        seconds = self.round[:, 1:]
        steps = seconds[:, 1:] - seconds[:, :-1]
        if np.abs(steps[:, 1:] - steps[:, :-1]).max(initial=0.0) <= 1e-9 * float(self.verify[0]):
            return False
        slope = (seconds[:, -1:] - seconds[:, :1]) / max(self.batch - 1, 1)
        line = seconds[:, :1] + slope * np.arange(self.batch)
        return bool((np.abs(seconds - line) > 0.02 * seconds).any())


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


def evaluate(problem: Problem, arm: IntArray, length: IntArray) -> Answer:
    """What `length[r]` tokens by `arm[r]` for every request r are worth."""
    batch = problem.batch
    rows = _rows(batch)
    families, lengths = problem.round.shape[0], problem.lengths
    cell = arm * lengths
    cell += length
    cell *= batch
    cell += rows
    gain = batch + float(np.add.reduce(problem.gain.take(cell)))
    family = problem.family.take(arm)
    cells = np.bincount(family * lengths + length, minlength=families * lengths)
    ending = cells.reshape(families, lengths)[:, :0:-1]  # who drafts K, K - 1, ..., 1 tokens
    drafting = np.add.accumulate(ending, axis=1)
    if problem.drafted is not None:  # only rounds to come
        drafting *= np.arange(lengths - 1, 0, -1) > problem.drafted[:, None]
    drafting += _rows(families)[:, None] * (batch + 1)
    seconds = float(problem.verify[int(np.add.reduce(length))])
    seconds += float(np.add.reduce(problem.round.take(drafting), axis=None))
    if problem.excess is not None:
        rounds = length
        if problem.drafted is not None:
            rounds = np.maximum(length - problem.drafted[family], 0)
        seconds += float(problem.excess[arm, rows] @ rounds)
    if problem.catch_up is not None:
        seconds += float(problem.catch_up[arm, rows] @ (length > 0))
    return Answer(arm, length, gain, seconds)


@cache
def _rows(count: int) -> IntArray:
    return np.arange(count)
