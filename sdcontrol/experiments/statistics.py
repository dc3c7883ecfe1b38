"""Is there a difference, how large is it, and how sure is that?

Knows log ratios of paired blocks, nothing of arms or metrics. All of it is deterministic.

`signed_rank_p` is Wilcoxon's signed-rank test (1945), exact by counting: within a block the order
of arms is drawn by lot, so if two arms are alike each sign is a fair coin, whatever the noise is
like. It weighs signs by rank: against steady noise it needs about 5 % more blocks than a t-test,
and a stalled block cannot spoil it. `trimmed_ratio` is the mean of the log ratios without the top
and bottom fifth, with a percentile bootstrap widened for few blocks (Hesterberg 2015, "What teachers
should know about the bootstrap", section 5.3). `holm` is Holm's correction (1979). `spending` shares
the error rate out over planned looks like O'Brien and Fleming's boundary (Lan and DeMets 1983);
the shares are added up as Bonferroni does, which holds however the looks depend on each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.errors import ConfigError

__all__ = [
    "Estimate",
    "blocks_needed",
    "bootstrap_mean",
    "holm",
    "look_blocks",
    "noise_of",
    "signed_rank_p",
    "smallest_effect",
    "spending",
    "trimmed_ratio",
]

_NORMAL = NormalDist()
_RESAMPLES = 4000
_TRIM = 0.2
_FEWEST = 6  # values that a percentile of resamples can tell of: of 4, no two tails hold 5 %
_EXACT = 400  # blocks up to which signed ranks are counted
_COARSE = 60  # blocks up to which it matters that p-values come in steps
_EFFICIENCY = 3.0 / math.pi  # of the signed-rank test, against a t-test under normal noise


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and an interval around it."""

    value: float
    low: float
    high: float


def signed_rank_p(log_ratios: Sequence[float]) -> float:
    """Two-sided p-value of "no difference"; zeros are left out, ties share their mean rank."""
    values = np.asarray(log_ratios, dtype=float)
    values = values[values != 0.0]
    if not values.size:
        return 1.0
    doubled = _doubled_ranks(np.abs(values))
    positive = int(doubled[values > 0].sum())
    extreme = min(positive, int(doubled.sum()) - positive)
    if values.size > _EXACT:
        return _normal_p(doubled, extreme)
    at_most = _counts(tuple(int(rank) for rank in np.sort(doubled)))[: extreme + 1].sum()
    return min(1.0, 2.0 * float(at_most))


def _doubled_ranks(sizes: FloatArray) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Twice the ranks from 1, so that the mean rank of a tie is whole."""
    ordered = np.sort(sizes)
    first = np.searchsorted(ordered, sizes, side="left")
    last = np.searchsorted(ordered, sizes, side="right")
    return np.asarray(first + last + 1, dtype=np.int64)


@lru_cache(maxsize=256)
def _counts(doubled: tuple[int, ...]) -> FloatArray:
    """Probability of every sum of the ranks whose sign is positive, each sign a fair coin."""
    chances = np.zeros(sum(doubled) + 1)
    chances[0] = 1.0
    for rank in doubled:
        chances[rank:] = 0.5 * (chances[rank:] + chances[:-rank])
        chances[:rank] *= 0.5
    return chances


def _normal_p(doubled: "np.ndarray[tuple[int], np.dtype[np.int64]]", extreme: int) -> float:
    mean, spread = doubled.sum() / 2.0, math.sqrt(float((doubled**2).sum())) / 2.0
    return min(1.0, 2.0 * _NORMAL.cdf((extreme + 1.0 - float(mean)) / spread))


def trimmed_ratio(
    log_ratios: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """The ratio, its top and bottom fifth of blocks left out; one block gives no interval.

    Raises `ConfigError` for no blocks, and for values that are not finite.
    """
    values = _checked(log_ratios)
    found = _bootstrap(values, _trimmed_means, confidence, seed)
    return Estimate(*(math.exp(min(value, 700.0)) for value in found))


def bootstrap_mean(values: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """The mean, with the same kind of interval."""
    found = _bootstrap(_checked(values), _means, confidence, seed)
    return Estimate(*found)


def _checked(values: Sequence[float]) -> FloatArray:
    array = np.asarray(values, dtype=float)
    if not array.size or not np.isfinite(array).all():
        raise ConfigError(f"{array.size} values, all of which must be finite; give at least one")
    return array


def _means(rows: FloatArray) -> FloatArray:
    return np.asarray(rows.mean(axis=1))


def _trimmed_means(rows: FloatArray) -> FloatArray:
    cut = int(_TRIM * rows.shape[1])
    ordered = np.sort(rows, axis=1)
    return np.asarray(ordered[:, cut : rows.shape[1] - cut].mean(axis=1))


def _bootstrap(
    values: FloatArray,
    statistic: Callable[[FloatArray], FloatArray],
    confidence: float,
    seed: int,
) -> tuple[float, float, float]:
    value = float(statistic(values[None, :])[0])
    number = values.size
    if number < 2:
        return value, -math.inf, math.inf
    if not np.ptp(values):
        return value, value, value
    picks = np.random.default_rng(seed).integers(0, number, (_RESAMPLES, number))
    means = statistic(values[picks])
    wide = math.sqrt(number / (number - 1)) * _t_quantile((1 + confidence) / 2, number - 1)
    few = number < _FEWEST  # whose resamples end where the values do: they are stretched instead
    z = _NORMAL.inv_cdf((1 + confidence) / 2)
    tail = _NORMAL.cdf(-z if few else -wide)
    low, high = np.quantile(means, [tail, 1 - tail])
    if few:
        low, high = (value + (end - value) * wide / z for end in (low, high))
    return value, float(min(low, value)), float(max(high, value))


def _t_quantile(probability: float, freedom: int) -> float:
    """Of Student's t, by the expansion of Cornish and Fisher (Abramowitz and Stegun, 26.7.5)."""
    z = _NORMAL.inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


def noise_of(log_ratios: Sequence[float]) -> float:
    """Standard deviation of one block's log ratio, by the median deviation: a stalled block in
    ten does not count, as it does not for the test. Small samples are corrected for. Where most
    blocks are alike, as simulated ones may be, of which that knows nothing, by all of them."""
    values = np.asarray(log_ratios, dtype=float)
    if values.size < 2:
        return 0.0
    deviation = float(np.median(np.abs(values - np.median(values))))
    if not deviation:
        return float(np.std(values, ddof=1))
    return 1.4826 * deviation * values.size / (values.size - 0.8)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: claiming those up to `alpha` is wrong anywhere at most so often."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    most = 0.0
    for place, index in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = most
    return adjusted


def look_blocks(num_blocks: int, looks: int) -> tuple[int, ...]:
    """After how many counted blocks to look: evenly spaced, the last one at the end."""
    return tuple(sorted({-(-num_blocks * look // looks) for look in range(1, looks + 1)}))


def spending(num_blocks: int, looks: int, alpha: float) -> dict[int, float]:
    """For every look, in blocks, its share of `alpha`; the shares add up to `alpha`."""
    at = look_blocks(num_blocks, looks)
    bound = _NORMAL.inv_cdf(1 - alpha / 2)
    spent = [2 * (1 - _NORMAL.cdf(bound / math.sqrt(block / num_blocks))) for block in at]
    return {
        block: total - before
        for block, total, before in zip(at, spent, [0.0, *spent], strict=False)
    }


def blocks_needed(effect: float, noise: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Blocks after which a ratio of `1 + effect` is found with probability `power`.

    `noise` is the standard deviation of one block's log ratio, `alpha` what a single comparison
    has left after corrections. Raises `ConfigError` where no number would do.
    """
    _check_rates(alpha, power)
    if not (effect > -1 and effect != 0 and math.isfinite(effect) and noise >= 0):
        raise ConfigError(f"effect {effect}, noise {noise}: give an effect that is not 0")
    number = _fewest(alpha)
    while (wanted := _formula(effect, noise, _attained(number, alpha), power)) > number:
        number = min(wanted, number + 1 + number // 50)
    return number


def _formula(effect: float, noise: float, alpha: float, power: float) -> int:
    quantile = _NORMAL.inv_cdf(1 - alpha / 2)
    needed = ((quantile + _NORMAL.inv_cdf(power)) * noise / math.log1p(effect)) ** 2 / _EFFICIENCY
    return math.ceil(needed + quantile**2 / 2)  # Guenther 1981: the noise is estimated as well


@lru_cache(maxsize=256)
def _attained(num_blocks: int, alpha: float) -> float:
    """The largest p-value up to `alpha` that so many blocks can have."""
    if num_blocks > _COARSE:
        return alpha
    levels = 2 * np.cumsum(_counts(tuple(range(2, 2 * num_blocks + 1, 2))))
    return float(levels[levels <= alpha].max())


def smallest_effect(
    num_blocks: int, noise: float, *, alpha: float = 0.05, power: float = 0.8
) -> float | None:
    """The slowdown (a ratio below 1) that so many blocks show; None where they are too few."""
    _check_rates(alpha, power)
    if num_blocks < _fewest(alpha):
        return None
    quantile = _NORMAL.inv_cdf(1 - _attained(num_blocks, alpha) / 2)
    left = num_blocks - quantile**2 / 2
    if left <= 0:
        return None
    return math.exp(-(quantile + _NORMAL.inv_cdf(power)) * noise / math.sqrt(left * _EFFICIENCY))


def _fewest(alpha: float) -> int:
    """Blocks from which on a p-value can be as small as `alpha`: 2 / 2^n."""
    return max(1, math.ceil(1 - math.log2(alpha)))


def _check_rates(alpha: float, power: float) -> None:
    if not (0 < alpha < 1 and 0 < power < 1):
        raise ConfigError(f"alpha {alpha}, power {power}: each lies between 0 and 1")
