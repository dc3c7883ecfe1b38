"""Paired ratios: what benchmarks and comparisons of a few blocks are made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.compare import paired_ratio

positive = st.floats(0.01, 100.0)


@given(st.lists(positive, min_size=1, max_size=20), st.floats(0.1, 10.0))
def test_a_constant_speedup_is_found_exactly(times: list[float], factor: float) -> None:
    ratio = paired_ratio([t * factor for t in times], times)
    assert ratio.median == pytest.approx(factor)
    assert ratio.low == pytest.approx(factor)
    assert ratio.high == pytest.approx(factor)


def test_drift_that_slows_both_arms_alike_does_not_show() -> None:
    drift = np.linspace(1.0, 5.0, 12)
    assert paired_ratio(1.2 * drift, drift).median == pytest.approx(1.2)


def test_the_interval_covers_the_true_median() -> None:
    """200 simulated runs of 15 blocks; 95 % intervals must cover in at least 85 % (false alarm
    below 1e-6 were the coverage really 95 %)."""
    rng = np.random.default_rng(7)
    covered = 0
    for seed in range(200):
        noise = np.exp(rng.normal(0.0, 0.1, 15))
        ratio = paired_ratio(1.1 * noise, np.ones(15), seed=seed)
        covered += ratio.low <= 1.1 <= ratio.high
    assert covered >= 170


@pytest.mark.parametrize("bad", [[0.0], [float("nan")], [-1.0], [], [1.0, 2.0]])
def test_measurements_that_cannot_be_paired_are_refused(bad: list[float]) -> None:
    with pytest.raises(ConfigError):
        paired_ratio(bad, [1.0])
