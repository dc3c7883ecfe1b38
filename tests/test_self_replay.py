"""A what-if replay of the recorded policy is the recording: its steps, its seconds, its confidences.

Recordings of live runs are in `test_acceptance_table`.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.record_bundled import record_with_all_drafters, unused_families
from sdcontrol.controller import Controller
from sdcontrol.core import Choice, Observation, Plan, Timing
from sdcontrol.errors import TraceError
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.traces.acceptance_table import TABLE_NAME, AcceptanceTableWriter, TableHeader
from sdcontrol.traces.bundled import bundled_trace
from sdcontrol.traces.fitted_times import FittedTimes, work_of
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorded_drafts import RecordedDrafts
from sdcontrol.traces.recorded_times import RecordedTimes
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.schema import RecordedStep, RequestRecord, TraceFacts
from sdcontrol.traces.simulated_drafts import RecordedArm
from sdcontrol.traces.what_if import what_if
from sdcontrol.traces.writer import TraceWriter, add_file
from tests.cli_support import HERE, command_of
from tests.trace_support import ARMS, plain_step, recorded_steps, view_of, write_trace

# ---- what drafters said


@settings(max_examples=30, deadline=None)
@given(st.lists(recorded_steps(), max_size=6))
def test_every_confidence_of_a_recorded_draft_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, steps: list[RecordedStep]
) -> None:
    """By request, position and arm; the last one counts where a position was drafted from twice."""
    folder = tmp_path_factory.mktemp("traces") / "t"
    write_trace(folder, steps)
    told: dict[tuple[str, str, int], tuple[float, ...]] = {}
    for step in steps:
        seen = step.observation
        rows = zip(seen.view.requests, seen.plan.choices, seen.confidence or (), strict=False)
        for request, choice, confidence in rows:
            if choice.drafter is not None and confidence:
                told[request.id, choice.drafter, request.generated_tokens] = confidence
    drafts = RecordedDrafts(Trace(folder))
    ids = {request.id for step in steps for request in step.observation.view.requests}
    found = {
        (name, arm, position): tokens
        for name in ids
        for arm, positions in drafts.of(name).items()
        for position, tokens in positions.items()
    }
    assert found == told
    assert drafts.of("nobody who was ever recorded") == {}


@given(
    st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=12),
    st.lists(st.floats(0.0, 1.0), max_size=8),
    st.integers(1, 8),
    st.data(),
)
def test_confidence_is_the_recorded_one_as_far_as_there_is_one(
    along_the_text: list[float], drafted: list[float], num_tokens: int, data: st.DataObject
) -> None:
    """Beyond it, and at other positions, it is the table's."""
    length = len(along_the_text)
    place = data.draw(st.integers(0, length - 1))
    table = ArmOutcomes(np.zeros(length, np.uint8), confidence=np.array(along_the_text, np.float32))
    plain = RecordedArm("draft_model", table)
    arm = RecordedArm("draft_model", table, {place: tuple(drafted)} if drafted else {})
    for position in range(length):
        known = tuple(drafted[:num_tokens]) if position == place else ()
        confidence = arm.confidence_of(position, num_tokens)
        assert confidence == known + plain.confidence_of(position, num_tokens)[len(known) :]
        assert len(confidence) == num_tokens


# ---- what steps took


def _timed(number: int, batch: int, seconds: float) -> RecordedStep:
    """A step without drafts; steps of a number and a batch do the same work."""
    step = plain_step(number, batch)
    return replace(step, observation=replace(step.observation, timing=Timing({}, seconds)))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=8, max_size=40))
def test_steps_that_are_the_same_take_the_recorded_times_in_order(
    kinds: list[tuple[int, int]],
) -> None:
    """Each once, also where several do the same work; asking twice of a step is asking once."""
    steps = [_timed(*kind, 0.01 * (1 + place)) for place, kind in enumerate(kinds)]
    times = RecordedTimes(steps)
    for step in steps:
        work = work_of(step.observation)
        assert times.timing(work) == times.timing(work) == step.observation.timing
    assert times.num_repeated == times.num_steps == len(steps)


def test_a_step_that_nobody_measured_takes_a_fitted_time() -> None:
    """A clock that was not a number would never come to the next arrival."""
    steps = [_timed(number, 1, math.nan if number == 5 else 0.01) for number in range(12)]
    times = RecordedTimes(steps)
    seconds = [times.timing(work_of(step.observation)).total_seconds for step in steps]
    assert seconds == pytest.approx([0.01] * 12, rel=0.05)


def test_steps_that_were_not_recorded_take_fitted_times() -> None:
    """Also those that were, when they come once more."""
    steps = [_timed(number % 4, 1 + number % 3, 0.01 + 1e-3 * number) for number in range(24)]
    times, fitted = RecordedTimes(steps), FittedTimes(step.observation for step in steps)
    other, first = (work_of(s.observation) for s in (plain_step(2, 4), steps[0]))
    assert times.timing(other) == fitted.timing(other)
    assert times.pause_seconds(other) == 0.0
    assert times.timing(first) == steps[0].observation.timing
    again = work_of(steps[12].observation)
    assert times.timing(again) == steps[12].observation.timing
    once_more = work_of(steps[12].observation)
    assert times.timing(once_more) == fitted.timing(once_more)
    assert times.num_repeated == 2


def test_the_clock_stands_at_every_step_where_it_stood(tmp_path: Path) -> None:
    """Whatever was done between steps: requests that came by the clock come to the same step."""
    steps = [_timed(number, 2, 0.01) for number in range(10)]
    times, clock = RecordedTimes(steps), steps[0].start_seconds
    for step in steps:
        assert clock == pytest.approx(step.start_seconds)
        work = work_of(step.observation)
        clock += times.timing(work).total_seconds + times.pause_seconds(work)
    assert times.pause_seconds(work) == 0.0


class _Clock:
    """A clock that somebody sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _SlowToLearn(Controller):
    """A planner that takes half a second to observe."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__("off", clock=None)
        self._time = clock

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self._time.now += 0.5


def test_a_request_that_came_between_two_steps_came_before_the_second(tmp_path: Path) -> None:
    """Although the second is charged with what observing the first took, as engines do."""
    clock = _Clock()
    with Recorder(_SlowToLearn(clock), tmp_path / "t", clock=clock) as recorder:
        for number in range(4):
            name = f"r{number}"
            recorder.request_arrived(name, prompt=[1], max_new_tokens=9, temperature=0.0, seed=0)
            step = _timed(number, 1, 0.25 + (0.5 if number else 0.0)).observation
            recorder.plan(step.view)
            clock.now += 0.25
            recorder.observe(step)
    trace = Trace(tmp_path / "t")
    starts = [step.start_seconds for step in trace.steps()]
    assert starts == pytest.approx([0.0, 0.75, 1.5, 2.25])
    arrivals = {record.id: record.arrival_seconds for record in trace.requests()}
    assert [arrivals[f"r{number}"] for number in range(4)] == pytest.approx(starts)


# ---- the bundled trace


def test_the_bundled_recording_is_replayed_with_its_tokens_and_throughput() -> None:
    """`goodput` with three drafters, requests that come while others decode, half of them sampled:
    the same tokens for each, and as many a second, within 3 %.
    """
    trace = Trace(bundled_trace("mixed"))
    result = what_if(trace, trace.header.policy or "", times=RecordedTimes.of(trace))
    records = trace.requests()
    told = dict(zip(result.times.ids, result.times["output_tokens"], strict=True))
    assert told == {record.id: record.output_tokens for record in records}
    seconds = sum(seen.timing.total_seconds for seen in trace.observations())
    tokens = sum(record.output_tokens for record in records)
    assert result.output_tokens == tokens
    assert result.tokens_per_busy_second == pytest.approx(tokens / seconds, rel=0.03)


@pytest.mark.parametrize("keeps_ids", [True, False])
def test_a_replay_says_that_shared_beginnings_are_not_known_without_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keeps_ids: bool
) -> None:
    """Only then."""
    folder = tmp_path / "t"
    with TraceWriter(folder, TraceFacts(verification="coupled")) as writer:
        for number in range(16):
            writer.append(plain_step(number))
        ids = (1, 2, 3) if keeps_ids else None
        writer.add_request(RequestRecord("r0", 0.0, 3, 4, prompt_ids=ids))
    with AcceptanceTableWriter(
        folder / TABLE_NAME, TableHeader(arms=(), verification="coupled")
    ) as table:
        table.add("r0", {})
    add_file(folder, TABLE_NAME)
    code, out, _ = command_of(capsys)("replay", folder, "--policy", "off", *HERE)
    assert code == 0
    assert ("keeps no token ids" in out) is not keeps_ids


def test_the_bundled_recording_uses_every_drafter() -> None:
    """Else step times fitted to it could not price one of them."""
    assert unused_families(bundled_trace("mixed")) == []


# ---- recording it


def _write_drafts(path: Path, arms: tuple[str, ...]) -> None:
    """A step of each arm, in a trace that offers all of `ARMS`."""
    with TraceWriter(path, TraceFacts(drafters=ARMS)) as writer:
        for number, arm in enumerate(arms):
            view, plan, twos = view_of(number, 1), Plan((Choice.of(arm, 2),), ""), (2,)
            seen = Observation(view, plan, twos, twos, twos, (3,), Timing({}, 0.01))
            writer.append(RecordedStep(seen))


def test_a_recording_that_leaves_out_a_drafter_is_made_again(tmp_path: Path) -> None:
    """Until none is left out; what was recorded in between is gone."""
    tries = iter([("ngram",), ("ngram", "draft_model"), ("draft_model", "ngram", "sparse_kv:512")])

    def record() -> list[str]:
        _write_drafts(tmp_path / "t", next(tries))
        return ["done"]

    assert record_with_all_drafters(record, tmp_path / "t") == ["done"]
    assert unused_families(tmp_path / "t") == []
    assert next(tries, None) is None


def test_a_recording_that_never_uses_a_drafter_is_refused(tmp_path: Path) -> None:
    """After a few tries, by an error that names it, and with no trace left."""
    num_tries = 0

    def record() -> list[str]:
        nonlocal num_tries
        num_tries += 1
        _write_drafts(tmp_path / "t", ("ngram", "draft_model"))
        return []

    with pytest.raises(TraceError, match=r"no draft of \['sparse_kv'\]"):
        record_with_all_drafters(record, tmp_path / "t")
    assert 1 < num_tries < 10
    assert not (tmp_path / "t").exists()
