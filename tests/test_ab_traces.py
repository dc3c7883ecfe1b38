"""Comparisons on a recording: simulated time, sweeps over cores."""

import sys
from pathlib import Path

import numpy as np
import pytest

from sdcontrol.controller import Controller
from sdcontrol.errors import ConfigError, SdcontrolError, UnknownName
from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.replayed import TraceRunner, _Continued
from sdcontrol.experiments.run import run_experiment
from sdcontrol.experiments.store import RunFolder
from sdcontrol.experiments.sweep import run_apart
from sdcontrol.experiments.workload import block_items
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.traces.acceptance_table import TABLE_NAME, AcceptanceTableWriter, TableHeader
from sdcontrol.traces.schema import RecordedStep, RequestRecord, TraceFacts
from sdcontrol.traces.writer import TraceWriter, add_file
from tests.ab_support import experiment
from tests.trace_support import decode

NUM_REQUESTS, OUTPUT = 30, 40


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 requests of 40 tokens, of which n-gram drafts get 3 right each time."""
    folder = tmp_path_factory.mktemp("traces") / "trace"
    facts = TraceFacts(verification="coupled", drafters=("ngram",))
    with TraceWriter(folder, facts) as writer:
        for observation in decode(Controller("static:ngram:3", clock=None), 60):  # type: ignore[arg-type]
            writer.append(RecordedStep(observation))
        for number in range(NUM_REQUESTS):
            prompt = tuple(range(number, number + 20))
            writer.add_request(
                RequestRecord(f"r{number}", 0.05 * number, 20, OUTPUT, prompt_ids=prompt)
            )
    header = TableHeader(arms=("ngram",), verification="coupled")
    with AcceptanceTableWriter(folder / TABLE_NAME, header) as table:
        for number in range(NUM_REQUESTS):
            right = np.full(OUTPUT, 3, dtype=np.uint8)
            table.add(f"r{number}", {"ngram": ArmOutcomes(right)})
    add_file(folder, TABLE_NAME)
    return folder


def plan_on(trace: Path, arrivals: object, **settings: object) -> Experiment:
    workload = {"trace": str(trace), "requests_per_block": 4, "arrivals": arrivals}
    return experiment(
        backend="trace", workload=workload, blocks=6, stopping={"looks": 1}, **settings
    )


CLOSED = {"kind": "closed", "concurrency": 2}


@pytest.mark.parametrize(
    "arrivals", [CLOSED, {"kind": "open", "requests_per_second": 20.0}, {"kind": "recorded"}]
)
def test_a_comparison_on_a_recording_finds_what_drafts_bring(
    trace: Path, tmp_path: Path, arrivals: object
) -> None:
    plan = plan_on(trace, arrivals)
    results = run_experiment(plan, TraceRunner(plan), RunFolder(tmp_path / "run", plan))
    assert results.is_simulated
    assert results.is_complete
    on = next(arm for arm in results.arms if arm.name == "on")
    assert on.acceptance["ngram"].acceptance_length == pytest.approx(4.0, rel=0.1)
    assert sum(block.tokens for block in on.blocks) == 6 * 4 * OUTPUT
    assert set(on.latencies) == {"ttft_seconds", "tpot_seconds", "e2e_seconds"}
    if arrivals == CLOSED:
        assert results.comparisons[0].verdict == "faster"
        assert results.comparisons[0].ratio.value > 2


def test_a_request_of_a_closed_loop_waits_for_no_other(trace: Path) -> None:
    """As live: it comes when there is room for it."""
    plan = plan_on(trace, CLOSED)
    record, _ = TraceRunner(plan).run_block("off", 0, start_seconds=0.0)
    assert record.num_requests == 4
    assert max(record.latencies["ttft_seconds"]) < 0.2 * min(record.latencies["e2e_seconds"])


def test_an_engines_most_draft_tokens_hold_in_a_simulation(trace: Path) -> None:
    arms = [
        {"name": "some", "policy": "goodput", "engine": {"max_draft_tokens": 2}},
        {"name": "all", "policy": "goodput"},
    ]
    plan = plan_on(trace, CLOSED, arms=arms)
    runner = TraceRunner(plan)
    longest = []
    for arm in ("some", "all"):
        for block in range(3):
            record, _ = runner.run_block(arm, block, start_seconds=0.0)
        longest.append(max(map(int, record.lengths["ngram"])))
    assert longest[0] == 2 < longest[1]


def test_a_request_that_can_never_fit_is_said_and_not_left_out(trace: Path, tmp_path: Path) -> None:
    plan = plan_on(trace, CLOSED, engine={"kv_tokens": 32})
    results = run_experiment(plan, TraceRunner(plan), RunFolder(tmp_path / "run", plan))
    assert all("the KV cache holds 32" in arm.failed for arm in results.arms)


def test_what_a_recording_cannot_follow_is_said(trace: Path, tmp_path: Path) -> None:
    plan = plan_on(trace, CLOSED)
    cut = plan.workload.model_copy(update={"num_tokens": 4})
    for name, workload, is_said in (("as-is", plan.workload, False), ("cut", cut, True)):
        one = plan.model_copy(update={"workload": workload})
        results = run_experiment(one, TraceRunner(one), RunFolder(tmp_path / name, one))
        assert any("num_tokens" in note for note in results.notes) == is_said


def test_simulated_blocks_are_the_same_at_every_try(trace: Path, tmp_path: Path) -> None:
    plan = plan_on(trace, CLOSED, repeat_every=1)
    first = run_experiment(plan, TraceRunner(plan), RunFolder(tmp_path / "1", plan))
    again = run_experiment(plan, TraceRunner(plan), RunFolder(tmp_path / "2", plan))
    assert first.arms == again.arms
    assert first.drift is not None
    assert first.drift.ratio.value == 1.0


def test_one_key_takes_the_same_requests_to_the_engine(trace: Path) -> None:
    plan = plan_on(trace, CLOSED).model_copy(update={"backend": "live"})
    items = [item for block in range(8) for item in block_items(plan, block, list)]
    assert all(len(item.prompt) == 20 for item in items)
    names = [item.name.split()[1] for item in items]
    assert len(set(names[:NUM_REQUESTS])) == NUM_REQUESTS  # every request once in a round


def test_a_bundled_trace_is_known_by_its_name() -> None:
    plan = plan_on(Path("bundled:mixed"), CLOSED)
    assert TraceRunner(plan).run_block("off", 0, start_seconds=0.0)[0].num_requests == 4
    assert len(block_items(plan.model_copy(update={"backend": "live"}), 0, list)) == 4
    with pytest.raises(UnknownName, match="choose from"):
        TraceRunner(plan_on(Path("bundled:mixd"), CLOSED))


def test_an_arm_that_nobody_recorded_fails_alone(trace: Path, tmp_path: Path) -> None:
    arms = [
        {"name": "off", "policy": "off"},
        {"name": "on", "policy": "static:ngram:3"},
        {"name": "x", "policy": "static:draft_model:3", "drafters": ["draft_model"]},
    ]
    plan = plan_on(trace, CLOSED, arms=arms)
    results = run_experiment(plan, TraceRunner(plan), RunFolder(tmp_path / "run", plan))
    assert [bool(arm.failed) for arm in results.arms] == [False, False, True]
    assert "draft_model" in results.arms[2].failed


def test_a_recording_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SdcontrolError):
        TraceRunner(plan_on(tmp_path / "nothing", CLOSED))
    with pytest.raises(ValueError, match=r"workload\.trace"):
        experiment(backend="trace")


def test_a_sweep_over_two_processes_gives_each_run_its_folder(trace: Path, tmp_path: Path) -> None:
    plans = [
        plan_on(trace, CLOSED).model_copy(update={"name": f"seed-{seed}", "seed": seed})
        for seed in (0, 1)
    ]
    results = run_apart(plans, tmp_path, workers=2, on_ray=False, resume=False, overwrite=False)
    assert [result.name for result in results] == ["seed-0", "seed-1"]
    assert (tmp_path / "seed-1" / "results.json").exists()


def test_runs_apart_are_those_that_are_run_here(tmp_path: Path) -> None:
    """What the file does not say of the engine is the recording's, there as here."""
    arrivals = {"kind": "open", "requests_per_second": 100.0}
    plan = plan_on(Path("bundled:mixed"), arrivals, repeat_every=0)
    here = run_experiment(plan, TraceRunner(plan), RunFolder(tmp_path / "here", plan))
    (apart,) = run_apart(
        [plan], tmp_path / "apart", workers=1, on_ray=False, resume=False, overwrite=False
    )
    assert apart.arms == here.arms


def test_live_runs_are_not_run_beside_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="spoil"):
        run_apart([experiment()], tmp_path, workers=2, on_ray=False, resume=False, overwrite=False)


def test_without_ray_the_way_to_get_it_is_named(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"sdcontrol\[ray\]"):
        run_apart(
            [plan_on(trace, CLOSED)],
            tmp_path,
            workers=1,
            on_ray=True,
            resume=False,
            overwrite=False,
        )


def test_blocks_of_a_replay_ask_a_policy_as_often_as_an_engine_does() -> None:
    for policy, hinted, between in (("goodput", False, True), ("budget_argmax", True, False)):
        continued = _Continued(Controller(policy, clock=None))
        assert (continued.refines_hinted, continued.refines_between_rounds) == (hinted, between)


def test_arms_begin_blocks_as_they_say(trace: Path, tmp_path: Path) -> None:
    begins = ("kept", "cold", "warm")
    arms = [{"name": name, "policy": "goodput", "controller": name} for name in begins]
    plan = plan_on(trace, CLOSED, arms=arms)
    runner = TraceRunner(plan)
    seconds = {
        name: [runner.run_block(name, 0, start_seconds=0.0)[0].seconds for _ in range(3)]
        for name in begins
    }
    first = seconds["cold"][0]
    assert (
        seconds["cold"] == seconds["warm"] == [first, first, first]
    )  # told of earlier blocks alone
    assert seconds["kept"][0] == first
    assert seconds["kept"][1] < first  # the block again, by who has seen it
    assert seconds["kept"][2] < first
    later = {name: runner.run_block(name, 1, start_seconds=0.0)[0].seconds for name in begins}
    assert later["warm"] < later["cold"]
    results = run_experiment(plan, TraceRunner(plan), RunFolder(tmp_path / "run", plan))
    said = dict(zip(begins, ("learns on", "knows nothing", "earlier blocks"), strict=True))
    for name in begins:
        assert any(note.startswith(f"{name}: ") and said[name] in note for note in results.notes)
    assert not any(
        "interruption" in note for note in results.notes
    )  # after which all is simulated again


def test_sampled_steps_emit_all_that_a_block_does(trace: Path) -> None:
    """Also the token of the step that completes a prompt, as live."""
    plan = plan_on(trace, CLOSED)
    for arm in ("off", "on"):
        record, _ = TraceRunner(plan).run_block(arm, 0, start_seconds=0.0)
        assert sum(record.steps.emitted) == record.tokens == 4 * OUTPUT
