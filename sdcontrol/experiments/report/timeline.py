"""An arm's steps on its own clock: how fast it went, and what it had chosen.

Arms take turns, so on the run's clock each has gaps. Here an arm's counted blocks stand end to end;
warm-up and repeated (A/A) blocks are left out. Knows nothing of plots.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sdcontrol.experiments.results import ArmResult, BlockFacts

__all__ = ["Bin", "Choice", "bin_seconds", "bins_of", "choice_of", "own_seconds"]

_MOST_BINS = 80
_STEPS_PER_BIN = 8


class Choice(NamedTuple):
    """A drafter and a number of draft tokens; `off` and 0 where nothing was drafted."""

    drafter: str
    num_draft_tokens: int

    def __str__(self) -> str:
        return f"{self.drafter} {self.num_draft_tokens}" if self.num_draft_tokens else self.drafter


@dataclass(frozen=True, slots=True)
class Bin:
    """A stretch of an arm's time."""

    start_seconds: float
    tokens_per_second: float  # of the time in steps: waiting for requests is left out
    shares: dict[Choice, float]  # of requests times steps


def choice_of(text: str) -> Choice:
    """`ngram 4` as drafter and length; a text without a number is a drafter that drafts nothing."""
    drafter, _, length = text.rpartition(" ")
    return Choice(drafter, int(length)) if drafter and length.isdecimal() else Choice(text, 0)


def own_seconds(arm: ArmResult) -> npt.NDArray[np.float64]:
    """When each sampled step began on the arm's own clock; NaN for steps of uncounted blocks."""
    times = np.asarray(arm.steps.time_seconds, dtype=np.float64)
    if not arm.blocks:
        return times - (times[0] if times.size else 0.0)
    blocks = sorted(arm.blocks, key=lambda block: block.start_seconds)
    starts = np.array([block.start_seconds for block in blocks])
    lengths = np.array([block.seconds if _is_counted(block) else 0.0 for block in blocks])
    ends = np.cumsum(lengths)
    at = np.clip(np.searchsorted(starts, times, side="right") - 1, 0, None)
    within = np.clip(times - starts[at], 0.0, lengths[at])
    counted = np.array([_is_counted(block) for block in blocks])
    return np.where(counted[at], ends[at] - lengths[at] + within, np.nan)


def _is_counted(block: BlockFacts) -> bool:
    return not (block.is_warmup or block.is_repeat)


def bin_seconds(arms: Sequence[ArmResult]) -> float:
    """One width for all arms: at most 80 bins, some steps in each."""
    clocks = [own[np.isfinite(own)] for own in map(own_seconds, arms)]
    clocks = [own for own in clocks if own.size]
    if not clocks:
        return 1.0
    longest = max(float(own.max()) for own in clocks)
    num_bins = min(_MOST_BINS, max(1, max(own.size for own in clocks) // _STEPS_PER_BIN))
    return max(longest * (1 + 1e-9) / num_bins, 1e-9)


def bins_of(arm: ArmResult, width_seconds: float) -> list[Bin]:
    """The arm's time in bins of one width; bins without a step are left out."""
    own = own_seconds(arm)
    places = np.full(own.size, -1)
    places[np.isfinite(own)] = (own[np.isfinite(own)] / width_seconds).astype(int)
    return [
        _bin(arm, np.flatnonzero(places == place), float(place * width_seconds))
        for place in np.unique(places[places >= 0])
    ]


def _bin(arm: ArmResult, steps: npt.NDArray[np.intp], start_seconds: float) -> Bin:
    spent = sum(arm.steps.measured_seconds[step] for step in steps)
    emitted = sum(arm.steps.emitted[step] for step in steps)
    counts: Counter[Choice] = Counter()
    for step in steps:
        for text, requests in arm.steps.choices[step].items():
            counts[choice_of(text)] += requests
    total = counts.total() or 1
    shares = {choice: count / total for choice, count in sorted(counts.items())}
    return Bin(start_seconds, emitted / spent if spent else 0.0, shares)
