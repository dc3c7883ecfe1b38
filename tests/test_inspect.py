"""Facts about looking into a trace: its numbers are those of the run, its words name them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from sdcontrol.cli.inspect import summary_record
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Choice, Observation, Plan, Timing
from sdcontrol.errors import UnknownName
from sdcontrol.traces.follow import follow
from sdcontrol.traces.inspect import summarise
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.schema import RecordedStep
from sdcontrol.traces.writer import TraceWriter
from tests.trace_support import decode, plain_step, view_of, write_trace


def chosen(
    number: int, drafter: str | None, tokens: int, batch: int, seconds: float
) -> RecordedStep:
    """A step in which all of `batch` requests draft `tokens`, and half of those are accepted."""
    view = view_of(number, batch)
    choice = Choice.of(drafter, tokens) if drafter else Choice.off()
    counts, kept = (choice.num_draft_tokens,) * batch, (choice.num_draft_tokens // 2,) * batch
    emitted = tuple(n + 1 for n in kept)
    plan, timing = Plan((choice,) * batch, "because"), Timing({}, seconds)
    return RecordedStep(
        Observation(view, plan, counts, counts, kept, emitted, timing), number * 1.0
    )


def test_counts_are_those_of_the_run(tmp_path: Path) -> None:
    with Recorder(Controller("goodput"), tmp_path / "t") as recorder:
        observations = decode(recorder, 80)
    summary = summarise(Trace(tmp_path / "t"))
    assert summary.num_steps == 80
    assert summary.emitted_tokens == sum(sum(o.emitted) for o in observations)
    assert sum(arm.accepted for arm in summary.arms.values()) == sum(
        sum(o.accepted) for o in observations
    )
    assert sum(summary.seconds.values()) == pytest.approx(
        sum(o.timing.total_seconds for o in observations)
    )
    assert sum(n for counts in summary.choices.values() for n in counts.values()) == sum(
        len(o.view.requests) for o in observations
    )


def test_acceptance_by_position_counts_only_what_was_tested(tmp_path: Path) -> None:
    """Of four draft tokens two are accepted: the third was rejected, the fourth never looked at."""
    write_trace(tmp_path / "t", [chosen(n, "ngram", 4, 2, 0.01) for n in range(10)])
    arm = summarise(Trace(tmp_path / "t")).arms["ngram"]
    assert arm.acceptance_rates == [1.0, 1.0, 0.0]
    assert arm.tested_at == [20, 20, 20, 0]


def test_regimes_begin_where_choice_load_or_price_change(tmp_path: Path) -> None:
    phases = [("ngram", 4, 2, 0.01), (None, 0, 2, 0.01), (None, 0, 6, 0.01), (None, 0, 6, 0.05)]
    steps = [chosen(40 * i + n, *phase) for i, phase in enumerate(phases) for n in range(40)]
    write_trace(tmp_path / "t", steps)
    regimes = summarise(Trace(tmp_path / "t")).regimes
    assert [(r.first, r.last, r.arm) for r in regimes] == [
        (0, 39, "ngram"),
        (40, 79, "off"),
        (80, 119, "off"),
        (120, 159, "off"),
    ]
    assert [r.step_seconds for r in regimes] == pytest.approx([0.01, 0.01, 0.01, 0.05])


def test_constant_costs_are_foreseen(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [plain_step(n) for n in range(120)])
    cost = summarise(Trace(tmp_path / "t")).cost
    assert cost is not None
    assert cost.median_error < 0.1


def test_summary_in_words_says_what_was_run_and_whether_it_is_whole(tmp_path: Path) -> None:
    with Recorder(Controller("static:ngram:2"), tmp_path / "t") as recorder:
        decode(recorder, 40)
    text = "\n".join(summarise(Trace(tmp_path / "t")).lines())
    assert "static drafter=ngram num_draft_tokens=2" in text
    assert "ngram: chosen" in text
    assert "CUT" not in text
    assert summarise(Trace(tmp_path / "t")).lines()[0].startswith("recorded")


def test_a_cut_trace_has_the_speed_of_its_steps(tmp_path: Path) -> None:
    """Of requests in flight when it was cut there is no record."""
    writer = TraceWriter(tmp_path / "t")
    writer._write_parts(
        [chosen(n, "ngram", 2, 3, 0.5) for n in range(20)], []
    )  # as the thread does
    summary = summarise(Trace(tmp_path / "t"))
    assert summary.cut
    assert (summary.num_requests, summary.output_tokens) == (0, 0)
    assert summary.tokens_per_second == pytest.approx(20 * 3 * 2 / 19.5)
    writer.discard()


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_times_that_nobody_measured_count_for_nothing(tmp_path: Path, seconds: float) -> None:
    """The rest is summed up as if they were not there, and can be written as JSON."""
    steps = [chosen(n, "ngram", 2, 2, seconds if n == 5 else 0.01) for n in range(40)]
    write_trace(tmp_path / "t", steps)
    summary = summarise(Trace(tmp_path / "t"))
    assert summary.seconds["verify"] == pytest.approx(0.39)
    assert summary.duration_seconds == pytest.approx(39.01)
    json.dumps(summary_record(summary), allow_nan=False)


def test_empty_trace_has_a_summary(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [])
    summary = summarise(Trace(tmp_path / "t"))
    assert summary.num_steps == 0
    assert summary.cost is None
    assert summary.lines()


def test_request_is_followed_step_by_step(tmp_path: Path) -> None:
    with Recorder(Controller("off"), tmp_path / "t") as recorder:
        recorder.request_arrived("r2", prompt=[1] * 7, max_new_tokens=9, temperature=0.0, seed=0)
        decode(recorder, 45, batch=2)
        recorder.tokens_emitted("r2", (1,) * 5, "eos")
    lines = list(follow(Trace(tmp_path / "t"), "r2"))
    assert "7 prompt tokens, at most 9 to come, greedy" in lines[0]
    assert lines[-1].startswith("ended")
    assert "(eos) with 5 tokens" in lines[-1]
    decoded = [line for line in lines if line.startswith("step")]
    assert all("no draft [ngram: match of" in line for line in decoded)
    assert len(decoded) >= 5


def test_steps_without_the_request_are_mentioned(tmp_path: Path) -> None:
    steps = [chosen(n, "ngram", 2, 2, 0.01) for n in range(10)]
    nobody = BatchView(0, (), 0)
    empty = Observation(nobody, Plan(()), (), (), (), (), Timing())
    steps[4:7] = [replace(step, observation=empty) for step in steps[4:7]]
    write_trace(tmp_path / "t", steps)
    lines = list(follow(Trace(tmp_path / "t"), "r1"))
    assert "not among those decoding for 3 steps" in lines
    assert "2 by ngram" in lines[-1]
    assert "(because); 2 drafted, 2 submitted, 1 accepted, 2 emitted" in lines[-1]


def test_unknown_request_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with Recorder(Controller("off"), tmp_path / "t") as recorder:
        decode(recorder, 3)
    with pytest.raises(UnknownName, match="did you mean 'r3'"):
        follow(Trace(tmp_path / "t"), "r33")
