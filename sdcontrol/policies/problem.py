"""One step's planning problem, as arrays, and what a plan for it is worth.

Knows nothing of views, names' meaning or how the best plan is found.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import FloatArray

__all__ = ["TABLES", "Answer", "IntArray", "Problem", "Tables"]

IntArray = NDArray[np.int64]
Tables = tuple[
    FloatArray, IntArray, IntArray, FloatArray, FloatArray, FloatArray, FloatArray, IntArray
]
TABLES = (
    "Tuple((float64[:,:,::1], int64[:,::1], int64[::1], float64[::1], "
    "float64[:,::1], float64[:,::1], float64[:,::1], int64[::1]))"
)


class Problem(NamedTuple):
    """What a maximiser needs to know of one step. Arms of a family are neighbours. Do not write.

    The last row of rounds is what a token more of the longest draft adds to verification, whoever drafts it.
    """

    arms: tuple[str, ...]
    gain: FloatArray  # [arms, requests, lengths]: expected tokens of 0..K drafts, flat at the limit
    limit: IntArray  # [arms, requests], the most tokens
    family: IntArray  # [arms]
    verify: FloatArray  # [draft tokens + 1], overhead included; its end is what KV slots allow
    rounds: FloatArray  # [families + 1, requests + 2]: seconds by requests in the round; 0 for none
    reading: FloatArray  # [arms, requests], seconds per round for reading more KV than the average
    catch_up: FloatArray  # [arms, requests], seconds charged to one that drafts
    drafted: IntArray  # [families + 1], rounds that are already spent

    @property
    def tables(self) -> Tables:
        """The arrays, in the order that compiled loops take them."""
        return self[1:]

    @property
    def batch(self) -> int:
        """Requests."""
        return int(self.gain.shape[1])

    @property
    def lengths(self) -> int:
        """Draft lengths to choose from, 0 included: K + 1."""
        return int(self.gain.shape[2])


class Answer(NamedTuple):
    """An arm and a length per request, and what they are worth."""

    arm: IntArray  # [requests]
    length: IntArray  # [requests]
    gain: float  # expected tokens
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.gain / self.seconds
