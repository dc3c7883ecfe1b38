"""Is one arm faster than another, and how sure is that?

Knows paired measurements only. Arms are measured in turn within a block, so that a machine whose
speed drifts slows all of them alike; what is compared is the ratio inside each block.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from sdcontrol.errors import ConfigError

__all__ = ["Ratio", "paired_ratio"]

_RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of ratios over blocks, with a bootstrap interval."""

    median: float
    low: float
    high: float
    num_blocks: int

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def paired_ratio(
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Ratio:
    """Median of `numerator[i] / denominator[i]`, and a percentile bootstrap interval over blocks.

    Raises `ConfigError` for unequal lengths, no blocks, or values that are not positive.
    """
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    if top.shape != bottom.shape or not top.size:
        raise ConfigError(f"{top.size} and {bottom.size} measurements; pair at least one block")
    if not (np.isfinite(top) & np.isfinite(bottom) & (top > 0) & (bottom > 0)).all():
        raise ConfigError("a measurement is not a positive number; drop that block in both arms")
    ratios = top / bottom
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, ratios.size, (_RESAMPLES, ratios.size))
    medians = np.median(ratios[picks], axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Ratio(float(np.median(ratios)), float(low), float(high), int(ratios.size))
