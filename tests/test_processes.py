"""Drawn arrivals and drawn acceptance are what their settings say, on average.

Statistical tests have fixed seeds; their bounds are at least five standard errors wide, so a correct
implementation would fail one for fewer than one seed in a million.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from sdcontrol.outcomes import DEPTH
from sdcontrol.traces.acceptance_process import AcceptanceProcess, HardStretches
from sdcontrol.traces.arrivals import Arrivals, Gamma, OnOff, Poisson, Ramp

rates = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=DEPTH).map(tuple)
stretches = st.builds(
    HardStretches, share=st.floats(0.05, 0.7), factor=st.floats(0.0, 1.0), tokens=st.floats(3, 50)
)
processes = st.builds(
    AcceptanceProcess,
    rates=rates,
    concentration=st.none() | st.floats(0.5, 50.0),
    hard=st.none() | stretches,
    tells_confidence=st.booleans(),
)


def first(process: Poisson | Gamma | OnOff | Ramp, number: int, seed: int = 0) -> np.ndarray:
    return np.array(
        list(itertools.islice(process.times(np.random.default_rng(seed)), number)), dtype=float
    )


# ---- arrivals


@given(st.integers(0, 2**32), st.sampled_from(["poisson", "gamma", "on_off", "ramp"]))
def test_time_never_goes_back(seed: int, kind: str) -> None:
    given_settings: dict[str, dict[str, object]] = {
        "poisson": {"rate_per_second": 3.0},
        "gamma": {"rate_per_second": 3.0, "cv": 4.0},
        "on_off": {"on_rate_per_second": 20.0, "on_seconds": 1.0, "off_seconds": 3.0},
        "ramp": {"from_rate_per_second": 1.0, "to_rate_per_second": 9.0, "seconds": 10.0},
    }
    process = TypeAdapter(Arrivals).validate_python({"kind": kind, **given_settings[kind]})
    times = first(process, 50, seed)
    assert times[0] >= 0.0
    assert (np.diff(times) >= 0.0).all()


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma_gaps_have_their_mean_and_variation(cv: float) -> None:
    gaps = np.diff(first(Gamma(rate_per_second=5.0, cv=cv), 20_000))
    assert gaps.mean() == pytest.approx(0.2, rel=5 * cv / math.sqrt(20_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_poisson_gaps_have_their_mean() -> None:
    gaps = np.diff(first(Poisson(rate_per_second=5.0), 20_000))
    assert gaps.mean() == pytest.approx(0.2, rel=5 / math.sqrt(20_000))


def test_bursts_are_denser_than_the_time_between_them() -> None:
    process = OnOff(
        on_rate_per_second=50.0, off_rate_per_second=1.0, on_seconds=2.0, off_seconds=6.0
    )
    times = first(process, 40_000)
    mean_rate = (50.0 * 2.0 + 1.0 * 6.0) / 8.0
    assert len(times) / times[-1] == pytest.approx(mean_rate, rel=0.15)  # some 400 cycles
    counts = np.histogram(times, bins=np.arange(0.0, times[-1], 1.0))[0]
    assert counts.var() > 5 * counts.mean()


@pytest.mark.parametrize(("start", "end"), [(2.0, 20.0), (20.0, 2.0), (5.0, 5.0)])
def test_a_ramp_is_expected_to_bring_what_its_line_says(start: float, end: float) -> None:
    ramp = Ramp(from_rate_per_second=start, to_rate_per_second=end, seconds=400.0)
    times = first(ramp, 9000)
    half = start * 200.0 + (end - start) / 400.0 * 200.0**2 / 2
    whole = (start + end) / 2 * 400.0
    for until, expected in ((200.0, half), (400.0, whole)):
        assert abs((times < until).sum() - expected) < 5 * math.sqrt(expected)
    after = ((times >= 400.0) & (times < 500.0)).sum()
    assert abs(after - 100 * end) < 5 * math.sqrt(100 * end)


# ---- acceptance


@given(processes, st.integers(1, 200), st.integers(0, 2**32))
def test_outcomes_are_counts_that_fit_the_output(
    process: AcceptanceProcess, output_tokens: int, seed: int
) -> None:
    found = process.outcomes(np.random.default_rng(seed), output_tokens)
    again = process.outcomes(np.random.default_rng(seed), output_tokens)
    assert found.output_tokens == output_tokens
    assert found.accepted.tolist() == again.accepted.tolist()
    assert (found.confidence is not None) == process.tells_confidence
    if found.confidence is not None:
        assert ((found.confidence >= 0.0) & (found.confidence <= 1.0)).all()


@given(rates, st.integers(0, 2**32))
def test_a_chain_goes_on_where_the_one_before_it_did(
    given_rates: tuple[float, ...], seed: int
) -> None:
    """With falling rates, as drafts have: who got n from here gets at least n - 1 from the next."""
    falling = tuple(sorted(given_rates, reverse=True))
    found = AcceptanceProcess(rates=falling).outcomes(np.random.default_rng(seed), 80)
    accepted = found.accepted.astype(int)
    assert (accepted[1:] >= accepted[:-1] - 1).all()


def test_rates_are_met_position_by_position() -> None:
    found = AcceptanceProcess(rates=(0.9, 0.6, 0.3)).outcomes(np.random.default_rng(0), 20_000)
    for place, rate in enumerate((0.9, 0.6, 0.3, 0.3)):
        tested = (found.accepted >= place).sum()
        met = (found.accepted > place).sum() / tested
        # Neighbours share their luck: at most 16 positions move together.
        assert abs(met - rate) < 5 * 4 * math.sqrt(rate * (1 - rate) / tested)


def test_requests_differ_as_their_beta_says() -> None:
    process = AcceptanceProcess(rates=(0.7,), concentration=6.0)
    generator = np.random.default_rng(0)
    shares = [(process.outcomes(generator, 2000).accepted > 0).mean() for _ in range(400)]
    variance = 0.7 * 0.3 / (6.0 + 1.0)
    assert np.mean(shares) == pytest.approx(0.7, abs=5 * math.sqrt(variance / 400))
    assert np.var(shares) == pytest.approx(variance, rel=0.4)


def test_hard_stretches_keep_the_mean_and_come_in_runs() -> None:
    hard = HardStretches(share=0.25, factor=0.4, tokens=30.0)
    factors = hard.factors(np.random.default_rng(0), 60_000)
    assert factors.mean() == pytest.approx(1.0, abs=0.05)
    assert (factors < 1.0).mean() == pytest.approx(0.25, abs=0.04)
    is_hard = factors < 1.0
    runs = is_hard.sum() / (np.diff(is_hard.astype(int)) == 1).sum()
    assert runs == pytest.approx(30.0, rel=0.2)


def test_a_confidence_is_the_chance_itself() -> None:
    process = AcceptanceProcess(
        rates=(0.7,),
        concentration=4.0,
        hard=HardStretches(share=0.4, factor=0.3, tokens=10.0),
        tells_confidence=True,
    )
    generator = np.random.default_rng(0)
    found = [process.outcomes(generator, 200) for _ in range(200)]
    told = np.concatenate(
        [outcome.confidence for outcome in found if outcome.confidence is not None]
    )
    met = np.concatenate([outcome.accepted > 0 for outcome in found])
    for low, high in itertools.pairwise(np.linspace(0.0, 1.0, 6)):
        inside = (told >= low) & (told <= high)
        error = abs(met[inside].mean() - told[inside].mean())
        assert error < 5 * math.sqrt(0.25 / max(inside.sum(), 1))


def test_stretches_that_cannot_have_their_share_are_refused() -> None:
    with pytest.raises(ValidationError, match="raise tokens or lower share"):
        HardStretches(share=0.9, tokens=2.0)
