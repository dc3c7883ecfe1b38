"""Step times fitted to recordings: they predict what they were not fitted to, or say that they cannot."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from sdcontrol.controller import Controller
from sdcontrol.core import Observation, Timing
from sdcontrol.engine.clock import unmeasured
from sdcontrol.errors import TraceError
from sdcontrol.traces.bundled import bundled_trace
from sdcontrol.traces.fitted_times import FittedTimes, work_of
from sdcontrol.traces.lines import Line
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorded_times import RecordedTimes
from sdcontrol.traces.simulate import Simulation
from sdcontrol.traces.step_times import CostTimes, DraftWork, NoisyTimes, StepWork
from sdcontrol.traces.what_if import simulate
from tests.simulate_support import SMALL, DicePlanner, drawn_workload, finished


class _Machine:
    """A machine of straight lines that nobody told the fit."""

    def timing(self, work: StepWork) -> Timing:
        draft = {family: self._draft(found) for family, found in work.drafts.items()}
        verify = (
            3e-3 + 2e-5 * work.draft_tokens + 1e-8 * work.kv_tokens + 4e-5 * work.prefill_tokens
        )
        beside = 1e-4 + 1e-5 * work.offered_arms + 2e-5 * work.shadow_drafts
        return Timing(draft, verify, 1e-4 + 1e-6 * work.num_requests, beside)

    def _draft(self, work: DraftWork) -> float:
        rounds, tokens = len(work.requests_by_round), sum(work.requests_by_round)
        return 7e-4 * rounds + 3e-6 * tokens + 1e-6 * work.catch_up_tokens


class _Padding(_Machine):
    """The same, whose forwards are padded where no prompt is computed."""

    token_edges = (16, 32, 48, 64)

    def timing(self, work: StepWork) -> Timing:
        tokens = work.num_requests + work.draft_tokens
        padding = 0 if work.prefill_tokens else -tokens % 16
        more = 4e-4 * (work.draft_tokens + padding)
        timing = super().timing(work)
        return replace(timing, verify_seconds=timing.verify_seconds + more)


class _Rectangle(_Machine):
    """The same, whose attention computes as many queries for every request as for the longest draft."""

    def timing(self, work: StepWork) -> Timing:
        more = 1e-6 * work.longest_draft * work.kv_tokens
        timing = super().timing(work)
        return replace(timing, verify_seconds=timing.verify_seconds + more)


@cache
def recorded_steps(seed: int, *, noise: float = 0.05) -> list[Observation]:
    """Steps of every kind, as dice plan them."""
    planner = DicePlanner(seed)
    times = NoisyTimes(_Machine(), relative_noise=noise, seed=seed)
    finished(drawn_workload(20 + seed, 60), planner, times=times)
    return planner.observations


def told_by_measured(times: FittedTimes, observations: Sequence[Observation]) -> float:
    """Predicted seconds of these steps, of the measured; those with a drafter not seen left out."""
    steps = [(work_of(seen), seen.timing.total_seconds) for seen in observations]
    steps = [(work, taken) for work, taken in steps if work.drafts.keys() <= times.drafts.keys()]
    told = sum(times.timing(work).total_seconds for work, _ in steps)
    return told / sum(taken for _, taken in steps)


def test_times_fitted_to_a_run_predict_runs_of_other_policies() -> None:
    """Dice show every kind of step; predictions of fixed policies are then within 2 %."""
    fitted = FittedTimes(recorded_steps(1))
    for policy in ("off", "static:draft_model:2", "static:sparse_kv:64:5"):
        told, true = (
            simulate(drawn_workload(22, 30), policy, times, SMALL).busy_seconds
            for times in (fitted, _Machine())
        )
        assert told == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize("num_steps", [12, 20, 40])
@pytest.mark.parametrize("seed", range(8))
def test_a_short_run_predicts_the_rest_of_it(num_steps: int, seed: int) -> None:
    """Simulated, with 5 % of noise a step; all steps after the first few, within 5 %."""
    seen = recorded_steps(seed)
    assert told_by_measured(FittedTimes(seen[:num_steps]), seen[num_steps:]) == pytest.approx(
        1.0, abs=0.05
    )


@pytest.mark.parametrize("num_steps", [30, 60])
def test_part_of_a_recording_predicts_the_rest_of_it(num_steps: int) -> None:
    """Of steps that a machine took: within 15 % on average, and 20 % where nothing was warned of: larger steps, prompts or rounds of which none or few were seen."""
    seen = list(Trace(bundled_trace()).observations())
    firsts = range(0, len(seen) - num_steps + 1, 15)
    off, known = [], []
    for first in firsts:
        part, rest = seen[first : first + num_steps], seen[:first] + seen[first + num_steps :]
        with capture_logs() as logs:
            off.append(abs(told_by_measured(FittedTimes(part), rest) - 1.0))
        known += [] if logs else off[-1:]
    assert sum(off) / len(off) < 0.15
    assert max(known) < 0.2
    assert len(known) >= 2


@given(
    st.lists(
        st.tuples(st.integers(0, 600), st.integers(0, 64), st.floats(0.0, 10.0)),
        min_size=1,
        max_size=60,
    )
)
@settings(max_examples=200)
def test_more_work_never_takes_less_time_and_a_run_takes_what_it_took(
    rows: list[tuple[int, int, float]],
) -> None:
    """However few steps there are and whatever they took: interruptions are time spent, too."""
    features = [(1.0, one, other, one * other) for one, other, _ in rows]
    seconds = [taken for *_, taken in rows]
    line = Line(features, seconds, simple=((0,), (1, 2), (2,)))
    assert min(line.coefficients) >= 0.0
    told = sum(line.seconds(row) for row in features)
    assert told == pytest.approx(sum(seconds), rel=1e-6, abs=1e-9)


def test_what_was_never_seen_is_taken_from_the_simple_model() -> None:
    """Nobody drafted: a draft token takes what a token of a prompt took."""
    features = [(1.0, prompt, 0.0) for prompt in (0, 0, 100, 200, 400)]
    seconds = [3.0 + 0.02 * prompt for _, prompt, _ in features]
    line = Line(features, seconds, simple=((0,), (1, 2)))
    assert line.coefficients == pytest.approx([3.0, 0.02, 0.02], rel=1e-3)


def test_a_fit_without_steps_or_without_the_drafter_is_refused() -> None:
    """A guess would be a wrong number."""
    with pytest.raises(TraceError, match="0 steps to fit"):
        FittedTimes([])
    with pytest.raises(TraceError, match="none of 2 step times is a time"):
        Line([(1.0,), (1.0,)], [float("nan"), -1.0])
    planner = DicePlanner(1)
    finished(drawn_workload(2, 6), planner, SMALL.model_copy(update={"drafters": ("ngram",)}))
    fitted = FittedTimes(planner.observations)
    with pytest.raises(TraceError, match="no step with drafts of 'draft_model'"):
        simulate(drawn_workload(2, 6), "static:draft_model:2", fitted, SMALL)


def test_steps_in_which_an_engine_captured_or_compiled_are_left_out() -> None:
    """It does not tell what their phases took, and later ones take none of that."""
    seen = recorded_steps(1)
    slow = [replace(step, timing=unmeasured(Timing({}, 1.0, 1e-4))) for step in seen[:20]]
    fitted = FittedTimes([*slow, *seen[20:]])
    assert told_by_measured(fitted, seen[20:]) == pytest.approx(1.0, abs=0.05)
    with pytest.raises(TraceError, match="0 steps to fit"):
        FittedTimes(slow)


@pytest.mark.parametrize("machine", [_Machine(), _Padding()])
def test_the_cost_of_fitted_times_prices_steps_as_they_are_timed(machine: _Machine) -> None:
    """Drafts of one length, by one family, in as many rounds as usual; what it takes to ask drafters left out."""
    planner = DicePlanner(1)
    finished(drawn_workload(21, 60), planner, times=machine)
    fitted = FittedTimes(planner.observations, getattr(machine, "token_edges", ()))
    prices = CostTimes(fitted.cost)
    for requests, length in ((1, 5), (3, 5), (4, 4)):
        kv = 60 * requests
        draft = DraftWork((requests,) * length, (kv,) * length, 2)
        work = StepWork(
            requests,
            requests * length,
            kv,
            0,
            requests,
            {"draft_model": draft},
            verified_kv_tokens=length * kv,
            longest_draft=length,
            offered_arms=1,
            shadow_drafts=1,
        )
        told, timed = prices.timing(work).total_seconds, fitted.timing(work).total_seconds
        assert told == pytest.approx(timed, rel=0.03)
    many = fitted.cost.verify_seconds(np.array([4.0, 8.0, 20.0]), 240.0, 4)
    assert many.tolist() == [float(fitted.cost.verify_seconds(n, 240.0, 4)) for n in (4, 8, 20)]


def test_an_oracle_goes_by_fitted_prices_and_leaves_out_what_has_none() -> None:
    """It is no worse than any fixed setting, and asks for no drafter that was never timed."""
    workload, planner = drawn_workload(22, 30), DicePlanner(1)
    fitted = FittedTimes(recorded_steps(1))
    best = max(
        simulate(workload, policy, fitted, SMALL).tokens_per_busy_second
        for policy in ("off", "static:ngram:6", "static:draft_model:4", "static:sparse_kv:64:5")
    )
    assert simulate(workload, "oracle", fitted, SMALL).tokens_per_busy_second > best
    finished(drawn_workload(2, 6), planner, SMALL.model_copy(update={"drafters": ("ngram",)}))
    result = simulate(workload, "oracle", FittedTimes(planner.observations), SMALL)
    assert [*result.arms] == ["ngram"]


def test_prompts_are_warned_of_once_where_none_was_recorded() -> None:
    seen = [one for one in recorded_steps(1) if not one.view.prefill_tokens]
    usual = StepWork(4, 0, 100, 0, 4)
    with capture_logs() as logs:
        fitted = FittedTimes(seen)
        fitted.timing(usual)
        assert not logs
        for prompt in (64, 128):
            fitted.timing(replace(usual, prefill_tokens=prompt))
    assert [log["event"] for log in logs] == ["step_times_extrapolated"]
    assert "a step of 64 prompt tokens, while no recorded step has any" in logs[0]["reason"]


def test_rounds_that_were_hardly_recorded_but_with_catch_up_are_warned_of_once() -> None:
    """Few steps do not tell rounds from catch-up: a model's were taken for four times too long."""
    seen = recorded_steps(1)
    lagged = [one for one in seen if _catch_up(one)]
    current = [one for one in seen if _catch_up(one) == 0]
    others = [one for one in seen if _catch_up(one) is None]
    step = StepWork(4, 4, 100, 0, 8, {"draft_model": DraftWork((4,), (100,), 0)})
    for drafted, warned in ((lagged[:3], 1), (lagged[:4], 0), ([lagged[0], current[0]], 0)):
        with capture_logs() as logs:
            fitted = FittedTimes([*others, *drafted])
            fitted.timing(replace(step, drafts={}))
            assert not logs
            fitted.timing(step)
            fitted.timing(step)
        assert len(logs) == warned
        assert all("rounds of 'draft_model' without the catch-up" in log["reason"] for log in logs)


def _catch_up(seen: Observation) -> int | None:
    draft = work_of(seen).drafts.get("draft_model")
    return None if draft is None else draft.catch_up_tokens


def test_steps_far_beyond_the_recorded_are_warned_of_once_and_then_refused() -> None:
    """A line drawn to four times what was seen is a guess."""
    fitted = FittedTimes(recorded_steps(1))  # of at most 4 requests
    usual = StepWork(4, 0, 100, 0, 4)
    with capture_logs() as logs:
        fitted.timing(usual)
        fitted.timing(replace(usual, num_requests=8))
        assert not logs
        for num_requests in (9, 10, 16):
            fitted.timing(replace(usual, num_requests=num_requests))
    assert [log["event"] for log in logs] == ["step_times_extrapolated"]
    assert "a step of 9 requests, while no recorded step has more than 4" in logs[0]["reason"]
    with pytest.raises(TraceError, match="17 requests, while no recorded step has more than 4"):
        fitted.timing(replace(usual, num_requests=17))
    with pytest.raises(TraceError, match="tokens of context"):
        fitted.timing(replace(usual, kv_tokens=100_000))


def test_forwards_that_are_padded_take_the_time_of_what_they_are_padded_to() -> None:
    """Told of the edges, the fit has the stairs; not told, it is off by up to a stair."""
    planner = DicePlanner(3)
    finished(drawn_workload(23, 60), planner, times=_Padding())
    edges = _Padding.token_edges
    told, untold = FittedTimes(planner.observations, edges), FittedTimes(planner.observations)
    off = [
        max(
            abs(times.timing(work).verify_seconds / _Padding().timing(work).verify_seconds - 1.0)
            for work in (StepWork(4, drafts, 200, 0, 4) for drafts in range(45))
        )
        for times in (told, untold)
    ]
    assert off[0] < 0.05 < 0.1 < off[1]
    assert (told.token_edges, untold.token_edges) == (edges, ())


def test_a_step_pays_for_its_longest_draft_where_attention_does() -> None:
    """Sixteen draft tokens of one request cost more than four of each, where all are attended as the longest; elsewhere as much."""
    shared = StepWork(4, 16, 200, 0, 4, verified_kv_tokens=800, longest_draft=4)
    alone = replace(shared, longest_draft=16)
    for machine in (_Rectangle(), _Machine()):
        planner = DicePlanner(4)
        times = NoisyTimes(machine, relative_noise=0.05, seed=4)
        finished(drawn_workload(24, 60), planner, times=times)
        fitted = FittedTimes(planner.observations)
        for work in (shared, alone):
            true = machine.timing(work).verify_seconds
            assert fitted.timing(work).verify_seconds == pytest.approx(true, rel=0.05)


def test_a_simulation_tells_its_planner_to_what_forwards_are_padded() -> None:
    """As an engine does; also where times are noisy, or recorded. Times without padding say nothing."""
    noisy = NoisyTimes(_Padding(), relative_noise=0.1)
    recorded = RecordedTimes(Trace(bundled_trace()).steps(), _Padding.token_edges)
    for times in (_Padding(), noisy, recorded):
        controller = Controller("goodput", clock=None)
        Simulation(drawn_workload(2, 6), controller, times, SMALL)
        assert controller.token_edges == _Padding.token_edges
    controller = Controller("goodput", clock=None, token_edges=(8,))
    Simulation(drawn_workload(2, 6), controller, _Machine(), SMALL)
    assert controller.token_edges == (8,)


def test_what_surrounds_a_forward_is_priced_by_what_is_done_there() -> None:
    """Offers and shadows that a controller asks for cost; one that never drafts is spared them."""
    fitted = FittedTimes(recorded_steps(2, noise=0.0))
    idle = StepWork(4, 0, 100, 0, 4)
    busy = replace(idle, offered_arms=8, shadow_drafts=4)
    told, true = (
        times.timing(busy).overhead_seconds - times.timing(idle).overhead_seconds
        for times in (fitted, _Machine())
    )
    assert told == pytest.approx(true, rel=0.3)
