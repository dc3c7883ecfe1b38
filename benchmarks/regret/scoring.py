"""From rates of arms in blocks to scores. Choices are made on odd blocks, scores on even ones.

Knows numbers only. Lists hold one entry per counted block, the first of which is block 1. Rates are
compared with those of "off" in the same block, so that a machine whose speed drifts does not choose.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

from sdcontrol.experiments.compare import Ratio, paired_ratio

__all__ = [
    "ADAPTIVE",
    "LEARNED",
    "OFF",
    "OURS",
    "CellScore",
    "Gap",
    "WorkloadScore",
    "best_on_odd",
    "closed_gap",
    "even",
    "learned_to_adaptive",
    "odd",
    "score_cell",
    "score_workload",
    "whole",
]

ADAPTIVE, LEARNED, OFF = "goodput", "learned", "off"
OURS = (ADAPTIVE, LEARNED)
_RESAMPLES = 4000
_LEAST_GAP = 1.02  # of the oracle over the best fixed, under which there is nothing to close
T = TypeVar("T")
Rates = Mapping[str, Sequence[float]]
PhaseRates = Mapping[str, Sequence[Sequence[float]]]
"""By arm and block, the rate in each phase."""


@dataclass(frozen=True, slots=True)
class CellScore:
    """How the adaptive arm did on even blocks."""

    best: str
    to_best: Ratio
    to_off: Ratio


@dataclass(frozen=True, slots=True)
class Gap:
    """The share of (per-phase oracle - best fixed) that an arm closes, with a bootstrap interval."""

    oracle: Ratio  # the oracle over the best fixed
    share: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether the oracle is no better than the best fixed, or hardly."""
        return self.oracle.low <= 1.0 or self.oracle.median < _LEAST_GAP

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "is_noise": self.is_noise}


@dataclass(frozen=True, slots=True)
class WorkloadScore:
    """How the adaptive arm did on even repetitions of a workload that changes."""

    best: str
    oracle: tuple[str, ...]  # per phase
    gap: Gap
    to_best: Ratio
    to_off: Ratio
    rival: str
    to_rival: Ratio
    learned_to_adaptive: Ratio


def odd(values: Sequence[T]) -> list[T]:
    """Those of blocks 1, 3, 5..."""
    return list(values[0::2])


def even(values: Sequence[T]) -> list[T]:
    """Those of blocks 2, 4, 6..."""
    return list(values[1::2])


def best_on_odd(rates: Rates, names: Sequence[str]) -> str:
    """The arm of the best median rate over "off" on odd blocks."""
    off = odd(rates[OFF])

    def relative(name: str) -> float:
        pairs = zip(odd(rates[name]), off, strict=True)
        return statistics.median(rate / plain for rate, plain in pairs)

    return max(names, key=relative)


def score_cell(rates: Rates) -> CellScore:
    """`rates` are of the arms measured in every block; "off" counts as a fixed setting too."""
    best = best_on_odd(rates, [name for name in rates if name not in OURS])
    adaptive = even(rates[ADAPTIVE])
    return CellScore(
        best,
        paired_ratio(adaptive, even(rates[best])),
        paired_ratio(adaptive, even(rates[OFF])),
    )


def learned_to_adaptive(rates: Rates) -> Ratio:
    """How the learned policy did beside the adaptive one, on even blocks."""
    return paired_ratio(even(rates[LEARNED]), even(rates[ADAPTIVE]))


def whole(phases: Sequence[float], work: Sequence[float]) -> float:
    """The rate over all phases, `work[p]` tokens in each."""
    return sum(work) / sum(tokens / rate for tokens, rate in zip(work, phases, strict=True))


def score_workload(
    rates: PhaseRates, fixed: Sequence[str], rivals: Sequence[str], work: Sequence[float]
) -> WorkloadScore:
    """`fixed` includes "off"; `work` is the tokens per phase."""
    total = {name: [whole(block, work) for block in blocks] for name, blocks in rates.items()}
    best, rival = best_on_odd(total, fixed), best_on_odd(total, rivals)
    oracle = tuple(
        best_on_odd({name: [block[p] for block in rates[name]] for name in fixed}, fixed)
        for p in range(len(work))
    )
    of_oracle = [
        whole([rates[name][block][p] for p, name in enumerate(oracle)], work)
        for block in range(len(total[OFF]))
    ]
    adaptive = even(total[ADAPTIVE])
    return WorkloadScore(
        best,
        oracle,
        closed_gap(adaptive, even(total[best]), even(of_oracle)),
        paired_ratio(adaptive, even(total[best])),
        paired_ratio(adaptive, even(total[OFF])),
        rival,
        paired_ratio(adaptive, even(total[rival])),
        paired_ratio(even(total[LEARNED]), adaptive),
    )


def closed_gap(
    adaptive: Sequence[float], fixed: Sequence[float], oracle: Sequence[float], *, seed: int = 0
) -> Gap:
    """(adaptive / fixed - 1) / (oracle / fixed - 1), each ratio a median over the given blocks.

    1: as good as the oracle; 0: as the best fixed; below 0: worse than that. Where the oracle is
    not better than the best fixed the share says nothing; see `Gap.is_noise`.
    """
    base = np.asarray(fixed, dtype=float)
    ours, theirs = np.asarray(adaptive) / base, np.asarray(oracle) / base
    picks = np.random.default_rng(seed).integers(0, base.size, (_RESAMPLES, base.size))
    shares = _share(np.median(ours[picks], axis=1), np.median(theirs[picks], axis=1))
    low, high = np.quantile(shares, [0.025, 0.975])
    share = float(_share(np.median(ours), np.median(theirs)))
    return Gap(paired_ratio(oracle, fixed, seed=seed), share, float(low), float(high))


def _share(ours: "np.ndarray | float", theirs: "np.ndarray | float") -> "np.ndarray | float":
    gap = np.asarray(theirs) - 1.0
    safe = np.where(np.abs(gap) < 1e-6, 1e-6, gap)
    return (np.asarray(ours) - 1.0) / safe
