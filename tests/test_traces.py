"""Facts about traces: they hold what happened bit for bit, and survive whoever writes them."""

import math
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Choice, Confidence, Observation, Plan, Timing
from sdcontrol.errors import ObservationError, TraceError
from sdcontrol.estimators.shapes import SHAPES
from sdcontrol.traces import header as header_module
from sdcontrol.traces import parts as parts_module
from sdcontrol.traces import writer as writer_module
from sdcontrol.traces.header import read_header, write_header
from sdcontrol.traces.parts import digest_of
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.schema import LATER_COLUMNS, RecordedStep, RequestRecord, TraceFacts
from sdcontrol.traces.writer import TraceWriter, add_file
from tests.trace_support import decode, plain_step, recorded_steps, view_of, write_trace


@settings(max_examples=30)
@given(st.lists(recorded_steps(), max_size=6), st.integers(1, 7))
def test_steps_come_back_as_they_were_written(
    steps: list[RecordedStep], steps_per_part: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_trace(Path(folder) / "t", steps, steps_per_part=steps_per_part)
        trace = Trace(Path(folder) / "t")
        assert list(trace.steps()) == steps
        assert trace.num_steps == len(steps)
        assert trace.is_complete


@given(st.floats(), st.floats(allow_subnormal=True))
@settings(max_examples=30)
def test_floats_come_back_to_the_last_bit(start: float, verify: float) -> None:
    step = plain_step(0)
    timing = Timing({}, verify, -0.0, math.inf)
    step = replace(step, start_seconds=start, observation=replace(step.observation, timing=timing))
    with tempfile.TemporaryDirectory() as folder:
        write_trace(Path(folder) / "t", [step])
        (back,) = Trace(Path(folder) / "t").steps()
    pairs = [(start, back.start_seconds), (verify, back.observation.timing.verify_seconds)]
    pairs.append((-0.0, back.observation.timing.controller_seconds))
    assert all(struct.pack("d", a) == struct.pack("d", b) for a, b in pairs)


def test_requests_come_back_in_order_of_arrival(tmp_path: Path) -> None:
    records = [
        RequestRecord("late", 2.0, 5, 7, 0.5, 9, -(2**63), "eos", 0.1, 3.0, (1, 2), ()),
        RequestRecord("early", 1.0, 5, 7),
    ]
    with TraceWriter(tmp_path / "t") as writer:
        for record in records:
            writer.add_request(record)
    assert Trace(tmp_path / "t").requests() == records[::-1]


def test_header_says_what_was_run(tmp_path: Path) -> None:
    facts = TraceFacts(models={"target": SHAPES["llama-3.1-8b"]}, drafters=("ngram",), note="x")
    with TraceWriter(tmp_path / "t", facts) as writer:
        writer.describe(facts.model_copy(update={"engine": {"block_size": 16}}))
    header = Trace(tmp_path / "t").header
    assert header.models == facts.models
    assert header.engine == {"block_size": 16}
    assert "numpy" in header.versions


def test_finished_trace_is_plain_parquet(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [plain_step(n) for n in range(10)])
    steps = pq.read_table(tmp_path / "t" / "steps.parquet")
    assert steps["step"].to_pylist() == list(range(10))
    assert pq.read_table(tmp_path / "t" / "requests.parquet").num_rows == 3
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        "requests.parquet",
        "steps.parquet",
        "trace.json",
    ]


def test_columns_can_be_read_alone(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [plain_step(n) for n in range(300)], steps_per_part=100)
    tables = list(Trace(tmp_path / "t").step_tables(["step"]))
    assert [value for table in tables for value in table["step"].to_pylist()] == list(range(300))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_traces_from_before_some_columns_are_readable(tmp_path: Path, count: int) -> None:
    written = [plain_step(n) for n in range(3)]
    write_trace(tmp_path / "t", written)
    path = tmp_path / "t" / "steps.parquet"
    pq.write_table(
        pq.read_table(path).drop_columns(list(LATER_COLUMNS[-count:])), path, store_schema=False
    )
    header = read_header(tmp_path / "t")
    files = {**header.files, path.name: digest_of(path).model_copy(update={"rows": 3})}
    write_header(tmp_path / "t", header.model_copy(update={"files": files}))
    steps = list(Trace(tmp_path / "t").steps())
    assert [step.observation for step in steps] == [step.observation for step in written]
    assert not any(step.observation.view.others_wait for step in steps)
    assert all(step.seen_steps is None for step in steps)


def test_trace_is_never_written_over_another(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [])
    with pytest.raises(TraceError, match="not empty"):
        TraceWriter(tmp_path / "t")
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="no trace can be written"):
        TraceWriter(tmp_path / "file")


def test_observation_that_does_not_fit_its_view_is_refused(tmp_path: Path) -> None:
    step = plain_step(0)
    wrong = replace(step, observation=replace(step.observation, emitted=(1,)))
    with TraceWriter(tmp_path / "t") as writer, pytest.raises(TraceError, match="one per request"):
        writer.append(wrong)


def test_closed_trace_takes_no_more(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t")
    writer.close()
    writer.close()
    with pytest.raises(TraceError, match="closed"):
        writer.append(plain_step(0))


def test_kept_file_is_part_of_the_trace(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"weights")
    TraceWriter(tmp_path / "t", keep={"models/m": tmp_path / "model"}).close()
    (tmp_path / "t" / "table.bin").write_bytes(b"table")
    add_file(tmp_path / "t", "table.bin", rows=1)
    assert set(Trace(tmp_path / "t").header.files) == {
        "models/m",
        "table.bin",
        "steps.parquet",
        "requests.parquet",
    }
    for name in ("models/m", "table.bin"):
        content = (tmp_path / "t" / name).read_bytes()
        (tmp_path / "t" / name).write_bytes(b"other")
        with pytest.raises(TraceError, match="damaged"):
            Trace(tmp_path / "t")
        (tmp_path / "t" / name).write_bytes(content)


# ---- while it is written


def test_steps_are_readable_soon_after_they_were_given(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", steps_per_part=1000, seconds_per_part=0.05)
    writer.append(plain_step(0))
    given_up = time.monotonic() + 60.0  # another thread writes, when it is let
    while not list((tmp_path / "t" / "parts").glob("*.parquet")) and time.monotonic() < given_up:
        threading.Event().wait(0.02)
    trace = Trace(tmp_path / "t")
    assert [step.observation.view.step for step in trace.steps()] == [0]
    assert not trace.is_complete
    assert "not closed" in trace.cut
    writer.close()


def test_writer_never_holds_more_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a disk that is slower than the steps come."""
    whole = writer_module.write_part
    slow = threading.Event()

    def write(*arguments: object) -> object:
        slow.wait(0.02)
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "write_part", write)
    with TraceWriter(tmp_path / "t", steps_per_part=2) as writer:
        for number in range(100):
            writer.append(plain_step(number))
            assert len(writer._steps) <= 4 * 2 + 1
    assert Trace(tmp_path / "t").num_steps == 100


def test_full_disk_ends_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(Controller("static:ngram:2", clock=None), tmp_path / "t")
    decode(recorder, 300)
    monkeypatch.setattr(writer_module, "write_part", _no_space)
    given_up = time.monotonic() + 60.0
    with capture_logs() as logs:
        while not logs and time.monotonic() < given_up:  # another thread writes, when it is let
            assert len(decode(recorder, 100)) == 100
    assert [log["event"] for log in logs] == ["recording_stopped"]
    assert len(decode(recorder, 100)) == 100
    with pytest.raises(TraceError, match="no space"):
        recorder.close()
    assert Trace(tmp_path / "t").cut


def _no_space(*arguments: object) -> None:
    raise OSError(28, "no space left on device")


_ENDLESS = """
import itertools
from sdcontrol.core import BatchView, Observation, Plan, Timing
from sdcontrol.traces.schema import RecordedStep, RequestRecord
from sdcontrol.traces.writer import TraceWriter

writer = TraceWriter({path!r}, steps_per_part=5)
for number in itertools.count():
    view = BatchView(number, (), 0)
    writer.append(RecordedStep(Observation(view, Plan(()), (), (), (), (), Timing())))
    writer.add_request(RequestRecord(f"r{{number}}", float(number), 1, 1))
    if number == 100:
        print("running", flush=True)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.031, 0.117])
def test_killed_process_leaves_a_trace_that_is_readable_and_says_so(
    tmp_path: Path, seconds: float
) -> None:
    script = _ENDLESS.format(path=str(tmp_path / "t"))
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        threading.Event().wait(seconds)
        process.send_signal(signal.SIGKILL)
    trace = Trace(tmp_path / "t")
    numbers = [step.observation.view.step for step in trace.steps()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 100 - 2 * (4 * 5 + 1)  # what may be waiting, and what is being written
    assert trace.cut
    ids = [request.id for request in trace.requests()]
    assert ids == [f"r{number}" for number in range(len(ids))]


_FORKED = """
import os, signal, sys, threading
from sdcontrol.errors import TraceError
from sdcontrol.traces.writer import TraceWriter
from tests.trace_support import plain_step

def write_slowly():
    with writer._condition:
        begun.set()
        ended.wait()

writer = TraceWriter({path!r})
writer.append(plain_step(0))
begun, ended = threading.Event(), threading.Event()
threading.Thread(target=write_slowly).start()
begun.wait()
if not os.fork():
    signal.alarm(30)
    try:
        writer.append(plain_step(1))
    except TraceError as error:
        sys.exit(7 if "forked" in str(error) else 1)
_, status = os.wait()
ended.set()
writer.append(plain_step(1))
writer.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_process_leaves_the_trace_to_its_parent(tmp_path: Path) -> None:
    """It closes nothing at its end, and is told that nothing of it is recorded, though another thread was writing."""
    script = _FORKED.format(path=str(tmp_path / "t"))
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], check=False, cwd=root)
    assert done.returncode == 7
    trace = Trace(tmp_path / "t")
    assert not trace.cut
    assert [step.observation.view.step for step in trace.steps()] == [0, 1]


_FORGOTTEN = """
from sdcontrol.controller import Controller
from sdcontrol.traces.recorder import Recorder
from tests.trace_support import decode

recorder = Recorder(Controller("off"), {path!r})
decode(recorder, 3, batch=2)
"""


def test_requests_of_a_recorder_that_was_not_closed_are_in_its_trace(tmp_path: Path) -> None:
    """The trace is finished at the end of the process, with requests that had not ended."""
    script = _FORGOTTEN.format(path=str(tmp_path / "t"))
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent.parent)
    trace = Trace(tmp_path / "t")
    assert not trace.cut
    assert {request.id for request in trace.requests()} == {"r0", "r1"}


# ---- the recorder


def test_recorder_answers_as_its_planner_does(tmp_path: Path) -> None:
    with Recorder(Controller("goodput", clock=None), tmp_path / "a") as one:
        recorded = decode(one, 60)
    with Recorder(Controller("goodput", clock=None), tmp_path / "b") as other:
        assert decode(other, 60) == recorded
    assert list(Trace(tmp_path / "a").observations()) == recorded


def test_recorder_passes_on_whether_drafts_and_learning_are_wanted(tmp_path: Path) -> None:
    with Recorder(Controller("off"), tmp_path / "t") as recorder:
        assert not recorder.drafts
        assert not recorder.learns


def test_requests_are_known_from_views_where_nobody_told(tmp_path: Path) -> None:
    with Recorder(Controller("off"), tmp_path / "t") as recorder:
        decode(recorder, 30, batch=2)
    first = Trace(tmp_path / "t").requests()[0]
    assert (first.id, first.prompt_tokens) == ("r0", 2000)
    assert first.finish_reason is None


def test_requests_are_timed_from_arrival_to_end(tmp_path: Path) -> None:
    now = [0.0]
    with Recorder(Controller("off"), tmp_path / "t", clock=lambda: now[0]) as recorder:
        now[0] = 1.0
        recorder.request_arrived("a", prompt=[1, 2, 3], max_new_tokens=9, temperature=0.7, seed=-5)
        now[0] = 3.5
        recorder.tokens_emitted("a", (4,), None)
        now[0] = 5.0
        recorder.tokens_emitted("a", (5, 6), "eos")
        recorder.tokens_emitted("unheard of", (5, 6), None)
    assert Trace(tmp_path / "t").requests() == [
        RequestRecord("a", 1.0, 3, 3, 0.7, 9, -5, "eos", 2.5, 5.0)
    ]


@pytest.mark.parametrize(("seed", "kept"), [(2**64 - 5, -5), (2**63, -(2**63)), (7, 7)])
def test_a_seed_of_64_bits_ends_no_recording(tmp_path: Path, seed: int, kept: int) -> None:
    with Recorder(Controller("off"), tmp_path / "t") as recorder:
        recorder.request_arrived("a", prompt=[1], max_new_tokens=9, temperature=1.0, seed=seed)
    assert [request.seed for request in Trace(tmp_path / "t").requests()] == [kept]


def test_token_ids_are_kept_only_where_asked_for(tmp_path: Path) -> None:
    for keep in (False, True):
        path = tmp_path / str(keep)
        with Recorder(Controller("off"), path, keep_token_ids=keep) as recorder:
            recorder.request_arrived("a", prompt=[1, 2], max_new_tokens=9, temperature=0.0, seed=0)
            recorder.tokens_emitted("a", (4, 5), "length")
        (record,) = Trace(path).requests()
        assert record.prompt_ids == ((1, 2) if keep else None)
        assert record.output_ids == ((4, 5) if keep else None)


def test_a_step_that_cannot_have_come_about_is_refused_and_can_be_told_again(
    tmp_path: Path,
) -> None:
    with Recorder(Controller("goodput", clock=None), tmp_path / "t") as recorder:
        view = view_of(0)
        plan = recorder.plan(view)
        zeros = (0,) * len(view.requests)
        right = Observation(view, plan, zeros, zeros, zeros, zeros, Timing())
        for wrong in ({"accepted": (9,) * len(zeros)}, {"emitted": ()}, {"timing": None}):
            with pytest.raises(ObservationError):
                recorder.observe(replace(right, **wrong))
        recorder.observe(right)
    (step,) = Trace(tmp_path / "t").steps()
    assert (step.observation, step.planned) == (right, plan)


def test_faults_that_nobody_collected_are_recorded(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    controller = Controller("off", plan_budget_seconds=0.5, clock=lambda: float(next(ticks)))
    with Recorder(controller, tmp_path / "t") as recorder:
        view = view_of(0)
        plan = recorder.plan(view)
        zeros = (0,) * len(view.requests)
        recorder.observe(Observation(view, plan, zeros, zeros, zeros, zeros, Timing()))
    (step,) = Trace(tmp_path / "t").steps()
    assert step.observation.faults == step.plan_faults
    assert step.plan_faults[0].startswith("plan_stalled")


def test_step_is_recorded_though_its_planner_raised(tmp_path: Path) -> None:
    class Broken:
        def plan(self, view: BatchView) -> Plan:
            raise RuntimeError("broken")

        def observe(self, observation: Observation) -> None:
            raise RuntimeError("broken")

    step = plain_step(0)
    with Recorder(Broken(), tmp_path / "t") as recorder:  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            recorder.plan(step.observation.view)
        with pytest.raises(RuntimeError):
            recorder.observe(step.observation)
    (back,) = Trace(tmp_path / "t").steps()
    assert back.observation == step.observation
    assert back.planned is None


class _Wrong:
    """A planner of someone's own: plans for two requests, whoever decodes, and shortens them."""

    def plan(self, view: BatchView) -> Plan:
        return Plan((Choice.of("ngram", 2),) * 2)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        return Plan((Choice.of("ngram", 1),) * 2)

    def observe(self, observation: Observation) -> None:
        """Learns nothing."""


@pytest.mark.parametrize("is_refined", [False, True])
def test_a_plan_for_other_requests_than_decode_ends_no_recording(
    tmp_path: Path, is_refined: bool
) -> None:
    """Some were cancelled meanwhile, or the planner was wrong and the loop went on without its plan."""
    written = [plain_step(number, 2 if number == 3 else 3) for number in range(6)]
    with Recorder(_Wrong(), tmp_path / "t") as recorder:
        for step in written:
            view = step.observation.view
            plan = recorder.plan(view)
            if is_refined:
                recorder.refine(view, plan, ((), ()))
            recorder.observe(step.observation)
    steps = list(Trace(tmp_path / "t").steps())
    assert [step.observation for step in steps] == [step.observation for step in written]
    assert [step.planned is not None for step in steps] == [number == 3 for number in range(6)]
    assert [len(step.refinements) for step in steps] == [is_refined * (n == 3) for n in range(6)]


def test_a_header_that_cannot_be_written_ends_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine says later than the recording begins to what it pads forwards."""
    recorder = Recorder(Controller("goodput", clock=None), tmp_path / "t")
    decode(recorder, 10)
    monkeypatch.setattr(header_module, "replace_file", _no_space)
    with capture_logs() as logs:
        recorder.pad_to((8, 16))
        recorder.describe(TraceFacts(note="x"))
    assert {log["event"] for log in logs} == {"recording_stopped"}
    assert len(decode(recorder, 10)) == 10
    with pytest.raises(TraceError, match="no space"):
        recorder.close()
    assert Trace(tmp_path / "t").cut
    with pytest.raises(TraceError, match="no space"):
        TraceWriter(tmp_path / "other")


def test_a_closed_trace_that_is_described_keeps_what_was_added_to_it(tmp_path: Path) -> None:
    recorder = Recorder(Controller("off"), tmp_path / "t")
    recorder.close()
    (tmp_path / "t" / "table.bin").write_bytes(b"table")
    add_file(tmp_path / "t", "table.bin")
    recorder.describe(TraceFacts(verification="coupled"))
    header = Trace(tmp_path / "t").header
    assert header.verification == "coupled"
    assert "table.bin" in header.files
    assert header.is_complete


def test_whatever_is_recorded_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of 4096 requests would be larger than any that is read where their prompts are long."""
    monkeypatch.setattr(parts_module, "_MOST_VALUES_PER_COLUMN", 1500)
    monkeypatch.setattr(writer_module, "_BYTES_PER_GROUP", 1000)
    prompt = tuple(range(1000))
    with TraceWriter(tmp_path / "t", steps_per_part=1) as writer:
        for number in range(3):
            record = RequestRecord(f"r{number}", float(number), 1000, 0, prompt_ids=prompt)
            writer._write_parts([], [record])  # as the thread does, part by part
    assert [request.prompt_ids for request in Trace(tmp_path / "t").requests()] == [prompt] * 3


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_steps_that_nobody_measured_have_their_place_in_time(
    tmp_path: Path, seconds: float
) -> None:
    now = [1.0]
    with Recorder(Controller("off"), tmp_path / "t", clock=lambda: now[0]) as recorder:
        for number in range(3):
            now[0] += 1.0
            timing = Timing({}, seconds if number == 1 else 0.25)
            recorder.observe(replace(plain_step(number).observation, timing=timing))
    starts = [step.start_seconds for step in Trace(tmp_path / "t").steps()]
    assert starts == [0.75, 2.0, 2.75]


def test_discarded_trace_leaves_nothing(tmp_path: Path) -> None:
    Recorder(Controller("off"), tmp_path / "t").discard()
    assert not (tmp_path / "t").exists()
