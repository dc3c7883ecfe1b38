"""The statistics behind a claim: tests, intervals, corrections, looks, numbers of blocks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.judge import compare, decide
from sdcontrol.experiments.statistics import (
    blocks_needed,
    bootstrap_mean,
    holm,
    look_blocks,
    noise_of,
    signed_rank_p,
    smallest_effect,
    spending,
    trimmed_ratio,
)
from tests.ab_support import blocks_of, experiment

logs = st.lists(st.floats(-2, 2, allow_subnormal=False), min_size=1, max_size=30)


@given(
    st.lists(st.floats(0.001, 2).map(lambda x: round(x, 6)), min_size=1, max_size=20, unique=True),
    st.randoms(),
)
def test_without_ties_the_signed_rank_test_is_scipys_exact_one(sizes, random) -> None:
    values = [size * random.choice((-1, 1)) for size in sizes]
    expected = stats.wilcoxon(values, method="exact").pvalue
    assert signed_rank_p(values) == pytest.approx(expected, rel=1e-9)


@given(logs)
def test_swapping_the_arms_keeps_the_p_value(values: list[float]) -> None:
    assert signed_rank_p(values) == signed_rank_p([-value for value in values])
    assert 0 < signed_rank_p(values) <= 1


def test_many_blocks_are_approximated_well() -> None:
    values = np.random.default_rng(0).normal(0.1, 1.0, 450)
    expected = stats.wilcoxon(values, method="approx", correction=True).pvalue
    assert signed_rank_p(values) == pytest.approx(expected, rel=0.02)


def test_blocks_that_are_all_alike_show_no_difference() -> None:
    assert signed_rank_p([0.0] * 10) == 1.0


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=12))
def test_holm_never_lowers_a_p_value_nor_changes_the_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(a >= p for a, p in zip(adjusted, p_values, strict=True))
    assert min(adjusted) == pytest.approx(min(1.0, len(p_values) * min(p_values)))
    by_p = [adjusted[i] for i in sorted(range(len(p_values)), key=lambda i: p_values[i])]
    assert by_p == sorted(by_p)


@given(st.integers(1, 200), st.integers(1, 20), st.floats(0.001, 0.4))
def test_looks_share_out_alpha_and_no_more(blocks: int, looks: int, alpha: float) -> None:
    shares = spending(blocks, looks, alpha)
    assert tuple(shares) == look_blocks(blocks, looks)
    assert max(shares) == blocks
    assert all(share >= 0 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(alpha)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20), st.floats(-1, 1))
def test_intervals_move_with_the_data(values: list[float], shift: float) -> None:
    here, there = bootstrap_mean(values), bootstrap_mean([v + shift for v in values])
    assert here.low <= here.value <= here.high
    assert there.low == pytest.approx(here.low + shift, abs=1e-9)
    ratio = trimmed_ratio(values)
    assert 0 < ratio.low <= ratio.value <= ratio.high


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 12, 24])
def test_intervals_cover_the_true_ratio(number: int) -> None:
    """600 runs; coverage 95 % would fall below 92 % with probability 1e-3. Of two blocks 94 % are
    meant (the quantile of t is an expansion)."""
    rng = np.random.default_rng(number)
    covered = 0
    for _ in range(600):
        estimate = trimmed_ratio(np.log(1.1) + rng.normal(0, 0.05, number))
        covered += estimate.low <= 1.1 <= estimate.high
    assert covered >= (0.91 if number == 2 else 0.92) * 600


def test_one_stalled_block_moves_the_ratio_little() -> None:
    values = [0.1] * 11 + [3.0]
    assert trimmed_ratio(values).value == pytest.approx(math.exp(0.1))


def test_noise_is_the_standard_deviation_whatever_a_few_blocks_do() -> None:
    """Means over 400 samples: 0.05, to 5 %, at 8 and 40 blocks; a stalled one changes little."""
    rng = np.random.default_rng(0)
    for number in (8, 40):
        found = [noise_of(rng.normal(0, 0.05, number)) for _ in range(400)]
        assert np.mean(found) == pytest.approx(0.05, rel=0.05)
    values = rng.normal(0, 0.05, 39)
    assert noise_of([*values, 3.0]) == pytest.approx(noise_of(values), rel=0.1)


def test_blocks_most_of_which_are_alike_have_noise_too() -> None:
    """Else so many blocks, in which no difference was shown, would be said to be more than it takes."""
    ratios = [0.0] * 7 + [0.1] * 5
    assert noise_of(ratios) == pytest.approx(np.std(ratios, ddof=1))
    assert noise_of([0.1] * 9) == 0.0
    plan = experiment(blocks=12, stopping={"looks": 1})
    found = compare(plan, blocks_of(np.exp(ratios)))[0]
    assert found.verdict == "no difference shown"
    assert found.num_blocks_needed is not None
    assert found.num_blocks_needed > 12


@pytest.mark.parametrize("bad", [[], [math.nan], [math.inf, 1.0]])
def test_what_is_no_number_is_refused(bad: list[float]) -> None:
    with pytest.raises(ConfigError):
        trimmed_ratio(bad)


@pytest.mark.parametrize("noise", ["normal", "heavy", "skewed"])
def test_two_equal_arms_differ_at_most_at_the_stated_rate(noise: str) -> None:
    """2,000 simulated A/A runs with 4 looks and 2 metrics' worth of comparisons: claims in at most
    5 %, plus 3 standard errors (1.5 %)."""
    plan = experiment(blocks=12, stopping={"looks": 4})
    rng = np.random.default_rng(5)
    claims = 0
    for _ in range(2000):
        drawn = {
            "normal": rng.normal(0, 0.05, (2, 12)),
            "heavy": 0.02 * rng.standard_t(1.5, (2, 12)),
            "skewed": rng.exponential(0.05, (2, 12)),
        }[noise]
        values = drawn[0] - drawn[1]
        seen = [signed_rank_p(values[:look]) for look in look_blocks(12, 4)]
        shares = spending(12, 4, plan.stopping.alpha)
        claims += any(p <= share for p, share in zip(seen, shares.values(), strict=True))
    assert claims <= 0.065 * 2000


def test_a_whole_run_of_equal_arms_claims_at_most_at_the_stated_rate() -> None:
    """300 runs judged as they are at every look: 5 % and 3 standard errors are 8.8 %."""
    plan, rng = experiment(blocks=9), np.random.default_rng(1)
    claims = 0
    for _ in range(300):
        blocks = blocks_of(np.exp(rng.normal(0, 0.05, 9)))
        while len(blocks) > 3 and decide(plan, blocks[:-3]).is_done:
            blocks = blocks[:-3]
        claims += compare(plan, blocks)[0].verdict != "no difference shown"
    assert claims <= 0.088 * 300


def test_three_percent_is_found_and_half_a_percent_is_not_claimed_without_enough_blocks() -> None:
    """At 2 % noise, 100 runs of the needed number: power 0.8 would fall below 0.68 with
    probability 3e-3. Half a percent is claimed in fewer than 1 in 5 of such runs."""
    noise, rng = 0.02, np.random.default_rng(3)
    number = blocks_needed(-0.03, noise)
    assert number < 20
    assert blocks_needed(-0.005, noise) > 100
    plan = experiment(blocks=number, stopping={"looks": 1})

    def claims(effect: float) -> int:
        found = 0
        for _ in range(100):
            values = np.exp(math.log1p(effect) + rng.normal(0, noise, number))
            found += compare(plan, blocks_of(values))[0].verdict == "slower"
        return found

    assert claims(-0.03) >= 68
    assert claims(-0.005) <= 20


@given(st.floats(0.002, 0.3), st.floats(0.002, 0.2))
def test_the_smallest_effect_that_n_blocks_show_needs_about_n_blocks(effect, noise) -> None:
    number = blocks_needed(-effect, noise)
    smallest = smallest_effect(number, noise)
    assert smallest is not None
    assert smallest >= (1 - effect) * (1 - 1e-9)


def test_too_few_blocks_show_nothing_however_large() -> None:
    assert smallest_effect(5, 1e-6) is None
    assert signed_rank_p([5.0] * 5) > 0.05
    with pytest.raises(ConfigError, match="effect"):
        blocks_needed(0.0, 0.1)


@settings(max_examples=30)
@given(st.integers(6, 30), st.floats(0.7, 1.4))
def test_a_claim_needs_both_the_test_and_the_interval(number: int, ratio: float) -> None:
    rng = np.random.default_rng(number)
    plan = experiment(blocks=number)
    found = compare(plan, blocks_of(ratio * np.exp(rng.normal(0, 0.1, number))))[0]
    if found.verdict != "no difference shown":
        assert found.p_adjusted <= 0.05
        assert not found.ratio.low <= 1 <= found.ratio.high
        assert (found.verdict == "faster") == (found.ratio.value > 1)
        assert found.verdict in found.sentence
    else:
        assert "No difference shown" in found.sentence
