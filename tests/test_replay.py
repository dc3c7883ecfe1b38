"""Facts about exact replay: told the same, a controller decides the same, and else one is told."""

import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from sdcontrol import SpeculativeDecoder, policies
from sdcontrol.controller import Controller
from sdcontrol.core import (
    BatchView,
    Belief,
    Confidence,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
)
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.errors import ConfigError, TraceError, UnknownName
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.policies.base import Policy
from sdcontrol.policies.learned_model import save, train
from sdcontrol.policies.registry import parse
from sdcontrol.traces.bundled import bundled_trace, bundled_traces
from sdcontrol.traces.decisions import Decisions
from sdcontrol.traces.facts import facts_of
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.replay import replay_exactly
from sdcontrol.traces.writer import TraceWriter
from tests.engine_support import noised, random_prompt, tiny_model
from tests.trace_support import ARMS, decode

SPECS: dict[str, object] = {
    "static": "static:sparse_kv:512:3",
    "concurrency_schedule": {"kind": "concurrency_schedule", "drafter": "draft_model"},
    "smartspec": {"kind": "smartspec", "drafter": "draft_model"},
    "ema_steps": {"kind": "ema_steps", "drafter": "draft_model"},
    "throughput_aware": {"kind": "throughput_aware", "drafter": "draft_model"},
    "budget_argmax": {"kind": "budget_argmax", "drafter": "draft_model"},
    "heuristic": {"kind": "heuristic", "drafter": "draft_model"},
}
NAMES = [name for name in policies.names() if name not in ("oracle", "learned")]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learnt from steps of every arm."""
    folder = tmp_path_factory.mktemp("learned")
    observations: list[Observation] = []
    for arm in ARMS:
        with Recorder(Controller(f"static:{arm}:4"), folder / arm) as recorder:
            observations += decode(recorder, 40, batch=3)
    save(train(observations), folder / "policy.skops")
    return folder / "policy.skops"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**31), batch=st.integers(1, 6))
def test_replay_reproduces_every_plan(name: str, seed: int, batch: int) -> None:
    """A controller fed the recorded observations makes the recorded plans."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        controller = Controller(SPECS.get(name, name), seed=seed, max_draft_tokens=6)  # type: ignore[arg-type]
        with Recorder(controller, path) as recorder:
            decode(recorder, 50, batch=batch, seed=seed)
        report = replay_exactly(path)
    assert report.is_exact, str(report)
    assert report.num_plans == report.num_steps == 50


def test_replay_of_a_learned_policy_needs_its_trace_alone(tmp_path: Path, model_file: Path) -> None:
    """The model is kept with the trace: the file that it was loaded from may be gone."""
    own = tmp_path / "policy.skops"
    own.write_bytes(model_file.read_bytes())
    with Recorder(Controller(f"learned:{own}"), tmp_path / "t") as recorder:
        decode(recorder, 60, batch=3)
    own.unlink()
    report = replay_exactly(tmp_path / "t")
    assert report.is_exact, str(report)
    reasons = {step.planned.reason for step in Trace(tmp_path / "t").steps() if step.planned}
    assert any(reason.startswith("learned") for reason in reasons)
    assert str(tmp_path) not in (tmp_path / "t" / "trace.json").read_text()


def test_a_controller_without_a_limit_is_recorded(tmp_path: Path) -> None:
    """`math.inf` is none, as its own refusal says; the header is JSON all the same."""
    controller = Controller("goodput", plan_budget_seconds=math.inf)
    with Recorder(controller, tmp_path / "t") as recorder:
        decode(recorder, 20)
    header = (tmp_path / "t" / "trace.json").read_text("utf-8")
    json.loads(header, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    facts = Trace(tmp_path / "t").header.controller
    assert facts is not None
    assert facts.plan_budget_seconds == math.inf
    assert replay_exactly(tmp_path / "t").is_exact


def test_graph_buckets_are_part_of_the_recording(tmp_path: Path) -> None:
    """Tokens up to the next edge are free: forgotten edges would give other plans."""
    edges = (8, 24, 64)
    with Recorder(Controller("goodput", token_edges=edges), tmp_path / "trace") as recorder:
        decode(recorder, 40)
    trace = Trace(tmp_path / "trace")
    assert replay_exactly(trace).is_exact
    assert not replay_exactly(trace, controller=Controller("goodput", clock=None)).is_exact


def test_what_was_put_off_in_short_steps_is_put_off_again(tmp_path: Path) -> None:
    """Learning that waits and plans that are repeated follow the recorded times."""
    with Recorder(Controller("goodput"), tmp_path / "t") as recorder:
        for step in range(160):
            hints = {"ngram": Hint(max_draft_tokens=8, match_tokens=5 if step % 7 else 1)}
            request = RequestView("r", 2000 + step, step, 1000, 0.0, ("ngram",), hints)
            view = BatchView(step, (request,), 1000)
            plan = recorder.plan(view)
            drafted = plan.choices[0].num_draft_tokens
            kept, timing = drafted // 2, Timing({}, 5e-3, 1e-3, 1e-4)
            recorder.observe(
                Observation(view, plan, (drafted,), (drafted,), (kept,), (kept + 1,), timing)
            )
    trace = Trace(tmp_path / "t")
    reasons = [step.observation.plan.reason for step in trace.steps()]
    assert len(set(reasons[:8])) == 8  # each of the first steps is learnt from
    assert len(set(reasons[32:])) < 90  # some were repeated
    assert replay_exactly(trace).is_exact


def test_refinements_are_replayed(tmp_path: Path) -> None:
    with Recorder(Controller("goodput"), tmp_path / "t") as recorder:
        decode(recorder, 80)
    report = replay_exactly(tmp_path / "t")
    assert report.is_exact, str(report)
    assert report.num_refinements > 50
    steps = list(Trace(tmp_path / "t").steps())
    assert any(call.kept_tokens != call.given_tokens for s in steps for call in s.refinements)


def test_what_the_clock_decided_is_replayed_and_not_measured(tmp_path: Path) -> None:
    """Plans that took too long were off, until the policy was quarantined."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0 if 30_000 > now[0] % 100_000 > 20_000 else 1e-3
        now[0] += 300.0
        return now[0]

    controller = Controller("static:ngram:2", plan_budget_seconds=300.5, clock=clock)
    with Recorder(controller, tmp_path / "t") as recorder:
        observations = decode(recorder, 300)
    report = replay_exactly(tmp_path / "t")
    assert report.is_exact, str(report)
    assert any(fault.startswith("plan_stalled") for o in observations for fault in o.faults)
    assert controller.is_quarantined
    assert observations[0].plan.is_off != observations[-1].plan.is_off


class _Erring(Policy):
    """Raises now and then, wherever it can."""

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        if view.step % 300 == 100:
            raise RuntimeError("no plan today")
        return Plan.uniform(view, "draft_model", 3)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief) -> Plan:
        if view.step % 300 == 50 and len(confidence[0]) == 1:
            raise RuntimeError("no refinement today")
        return Plan.uniform(view, "draft_model", 2)

    def update(self, observation: Observation) -> None:
        if observation.view.step == 250:
            raise RuntimeError("nothing learnt today")


def test_faults_of_a_policy_are_replayed(tmp_path: Path) -> None:
    controller = Controller(_Erring(), clock=None)
    with Recorder(controller, tmp_path / "t") as recorder:
        observations = decode(recorder, 450)
    report = replay_exactly(tmp_path / "t", Controller(_Erring(), clock=None))
    assert report.is_exact, str(report)
    kinds = {fault.partition(":")[0] for o in observations for fault in o.faults}
    assert kinds == {"plan_raised", "refine_raised", "update_raised"}
    assert controller.is_quarantined


def test_loop_that_refines_what_was_refined_is_replayed(tmp_path: Path) -> None:
    """And whose observations hold the plan that was left, and no confidence."""
    rng = np.random.default_rng(0)
    with Recorder(Controller("goodput"), tmp_path / "t") as recorder:
        for observation in decode(recorder, 30):  # until something was learnt
            view = replace(observation.view, step=observation.view.step + 30)
            plan = recorder.plan(view)
            for depth in range(1, 4):
                seen = tuple(tuple(rng.uniform(0.0, 0.4, depth)) for _ in view.requests)
                plan = recorder.refine(view, plan, seen)
            lengths = tuple(choice.num_draft_tokens for choice in plan.choices)
            recorder.observe(
                replace(
                    observation,
                    view=view,
                    plan=plan,
                    drafted=lengths,
                    proposed=lengths,
                    accepted=(0,) * len(lengths),
                    confidence=None,
                )
            )
    report = replay_exactly(tmp_path / "t")
    assert report.is_exact, str(report)
    steps = list(Trace(tmp_path / "t").steps())[30:]
    assert any(step.planned != step.observation.plan for step in steps)
    assert any(call.given_tokens != call.kept_tokens for s in steps for call in s.refinements)


def test_difference_is_told_with_its_step_and_both_plans(tmp_path: Path) -> None:
    with Recorder(Controller("static:ngram:2"), tmp_path / "t") as recorder:
        decode(recorder, 10, batch=2)
    report = replay_exactly(tmp_path / "t", Controller("static:ngram:3", clock=None))
    assert not report.is_exact
    assert report.differences[0].step == 0
    assert report.num_differences >= 10
    assert "recorded [2 x ngram:2]" in str(report.differences[0])
    assert "replayed [2 x ngram:3]" in str(report)


def test_forgotten_observation_shows(tmp_path: Path) -> None:
    """The comparison can fail: a controller that learns nothing plans otherwise."""

    class Forgetful(Controller):
        def observe(self, observation: Observation) -> None:
            pass

    with Recorder(Controller("goodput"), tmp_path / "t") as recorder:
        decode(recorder, 60)
    assert not replay_exactly(tmp_path / "t", Forgetful("goodput", clock=None)).is_exact


def test_planner_that_raises_in_the_replay_is_a_difference(tmp_path: Path) -> None:
    class Raising(Controller):
        def plan(self, view: BatchView, *, faults: tuple[str, ...] = ()) -> Plan:
            raise RuntimeError("broken")

    with Recorder(Controller("off"), tmp_path / "t") as recorder:
        decode(recorder, 3)
    report = replay_exactly(tmp_path / "t", Raising("off", clock=None))
    assert report.num_differences == 3
    assert "raised RuntimeError('broken')" in str(report)


def test_cut_trace_replays_as_far_as_it_goes(tmp_path: Path) -> None:
    recorder = Recorder(Controller("goodput"), tmp_path / "t")
    decode(recorder, 600, batch=2)
    while not list((tmp_path / "t" / "parts").glob("steps-*.parquet")):
        pass
    report = replay_exactly(tmp_path / "t")
    assert report.is_exact, str(report)
    assert 0 < report.num_steps < 600
    assert "cut" in str(report)
    recorder.close()


def test_trace_that_cannot_be_replayed_says_why(tmp_path: Path) -> None:
    used = Controller("goodput")
    with Recorder(used, tmp_path / "first") as recorder:
        decode(recorder, 3)

    class Foresight:
        def accepted_tokens(self, request_id: str, generated_tokens: int, drafter: str) -> int:
            return 1

    cases = {
        "before the recording": used,
        "estimates of its own": Controller("goodput", cost=OnlineCost()),
        "given as an object": Controller(_Erring()),
        "foresight": Controller(parse({"kind": "oracle", "foresight": Foresight()})),
        "another planner": recorder,
    }
    for reason, planner in cases.items():
        Recorder(planner, tmp_path / reason).close()
        with pytest.raises(TraceError, match=reason):
            replay_exactly(tmp_path / reason)


@pytest.mark.parametrize("name", bundled_traces())
def test_controller_decides_as_it_did_when_the_bundled_traces_were_recorded(name: str) -> None:
    """The controller's regression test. After a change on purpose the traces are recorded anew:
    `python -m benchmarks.record_bundled`.
    """
    report = replay_exactly(bundled_trace(name))
    assert report.is_exact, str(report)
    assert report.num_plans > 20


def test_bundled_traces_cover_every_policy_and_stay_small() -> None:
    headers = [Trace(bundled_trace(name)).header for name in bundled_traces()]
    kinds = {str(header.policy["kind"]) for header in headers if header.policy}
    assert kinds == set(policies.names()) - {"oracle"}
    folder = bundled_trace("mixed").parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 500_000
    with pytest.raises(UnknownName, match="choose from"):
        bundled_trace("unheard of")


# ---- real engines


@pytest.mark.parametrize("policy", ["goodput", "off", SPECS["budget_argmax"], SPECS["ema_steps"]])
def test_run_of_an_engine_replays_exactly(tmp_path: Path, policy: object) -> None:
    """Prefills beside decoding, preemption, refinement between rounds, shadows: all is in it."""
    target = tiny_model()
    with SpeculativeDecoder(
        target,
        drafters=["ngram", "sparse_kv:48", noised(target)],
        policy=policy,  # type: ignore[arg-type]
        record=tmp_path / "t",
        max_batch_size=3,
        max_prefill_tokens=24,
        kv_tokens=160,
    ) as decoder:
        prompts = [random_prompt(length, length) for length in (40, 9, 30, 50, 24)]
        for _ in decoder.stream(prompts, max_new_tokens=24, do_sample=False, pad_token_id=0):
            pass
    trace = Trace(tmp_path / "t")
    report = replay_exactly(trace)
    assert report.is_exact, str(report)
    assert report.num_plans > 10
    assert [request.prompt_tokens for request in trace.requests()] == [40, 9, 30, 50, 24]
    assert {request.output_tokens for request in trace.requests()} == {24}
    for request in trace.requests():
        assert request.finish_reason == "length"
        assert request.ttft_seconds is not None
        assert request.end_seconds is not None
        assert 0 < request.ttft_seconds < request.end_seconds - request.arrival_seconds
    assert trace.header.models["target"].num_layers == 2
    assert trace.header.drafters == ("ngram", "sparse_kv:48", "draft_model")
    assert trace.header.engine["kv_tokens"] == 160


@pytest.mark.parametrize("total", [0.010, 0.013])
def test_steps_start_in_order_although_clocks_are_read_one_after_another(total: float) -> None:
    decisions, starts = Decisions(), []
    for step, (seconds, took) in enumerate([(0.02, 0.01), (0.022, total), (0.04, 0.015)]):
        view = BatchView(step, (), 100)
        observation = Observation(view, Plan(()), (), (), (), (), Timing({}, took))
        starts.append(decisions.close(observation, seconds, 0.0).start_seconds)
    assert starts == pytest.approx([0.01, max(0.022 - total, 0.01), 0.025])


class Seldom(Policy):
    """Drafts in every 13th step alone."""

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        return Plan.off(view) if view.step % 13 else Plan.uniform(view, "ngram", 3)


@pytest.mark.parametrize("policy", ["goodput", "off", "static:ngram:3", Seldom])
def test_run_whose_steps_overlap_replays_exactly(tmp_path: Path, policy: object) -> None:
    """Ends that nobody foresaw among them: their rows are gone when the step is observed."""

    def controller(clock: Callable[[], float] | None) -> Controller:
        return Controller(policy() if isinstance(policy, type) else policy, clock=clock)  # type: ignore[arg-type]

    recorder = Recorder(controller(time.perf_counter), tmp_path / "t")
    config = EngineConfig(overlap=True, max_prefill_tokens=24)
    target, ends = tiny_model(), list(range(40, 48))
    with recorder, Engine(target, drafters=["ngram"], planner=recorder, config=config) as engine:
        for length in (40, 9, 30, 50, 24):
            engine.submit(
                random_prompt(length, length),
                max_new_tokens=40,
                do_sample=True,
                seed=length,
                eos_token_id=ends if length > 20 else None,
            )
        finished = engine.run().values()
        ahead = engine.stats.launched_ahead
    trace = Trace(tmp_path / "t")
    steps = list(trace.steps())
    late = [step.seen_steps for step in steps if step.seen_steps is not None]
    assert late == [n - 1 for n, step in enumerate(steps) if step.seen_steps is not None]
    assert len(late) > 10
    assert ahead > 3 or policy in ("goodput", "static:ngram:3")
    assert {request.finish_reason for request in finished} == {"eos", "length"}
    report = replay_exactly(trace, controller(None) if isinstance(policy, type) else None)
    assert report.is_exact, str(report)
    assert report.num_plans >= len(late)
    starts = [step.start_seconds for step in steps]
    assert starts == sorted(starts)


def test_order_of_plans_and_observations_is_part_of_the_recording(tmp_path: Path) -> None:
    controller = Controller(SPECS["heuristic"])  # type: ignore[arg-type]  # a mapping
    facts, _ = facts_of(controller)
    with Recorder(controller, tmp_path / "t") as recorder:
        decode(recorder, 40)
    steps = list(Trace(tmp_path / "t").steps())
    assert replay_exactly(tmp_path / "t").is_exact
    with TraceWriter(tmp_path / "late", facts) as writer:
        for place, step in enumerate(steps):
            writer.append(replace(step, seen_steps=max(place - 1, 0)))
    report = replay_exactly(tmp_path / "late")
    assert report.num_steps == report.num_plans == 40
    assert not report.is_exact


def test_refinement_of_a_plan_that_nobody_asked_for_comes_after_what_was_observed(
    tmp_path: Path,
) -> None:
    with Recorder(Controller("goodput"), tmp_path / "t") as recorder:
        observation = decode(recorder, 6)[-1]
        recorder.refine(observation.view, observation.plan, observation.confidence or ())
        recorder.observe(observation)
    *_, last = Trace(tmp_path / "t").steps()
    assert (last.planned, last.seen_steps, len(last.refinements)) == (None, None, 1)
    assert replay_exactly(tmp_path / "t").is_exact


def test_recording_changes_no_token(tmp_path: Path) -> None:
    target, prompt = tiny_model(), random_prompt(30, 1)
    texts = []
    for record in (None, tmp_path / "t"):
        with SpeculativeDecoder(target, policy="static:ngram:3", record=record) as decoder:
            events = decoder.stream([prompt], max_new_tokens=20, do_sample=False)
            texts.append([token for event in events for token in event.tokens])
    assert texts[0] == texts[1]


def test_recording_of_an_engine_that_cannot_be_made_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        SpeculativeDecoder(tiny_model(), record=tmp_path / "t", kv_tokens=4)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("named", [True, False])
def test_recording_says_beforehand_that_exact_replay_will_need_help(
    tmp_path: Path, named: bool
) -> None:
    """Where the policy is an object, nobody can make it again."""
    policy = "goodput" if named else Seldom()
    with capture_logs() as logs:
        SpeculativeDecoder(tiny_model(), policy=policy, record=tmp_path / "t").close()
    told = [log["reason"] for log in logs if log["event"] == "recorded_without_policy"]
    assert len(told) == (not named)
    assert all("'Seldom' does not say" in reason for reason in told)


def test_watcher_that_fails_costs_no_token(tmp_path: Path) -> None:
    class Failing(Recorder):
        def tokens_emitted(self, *arguments: object) -> None:
            raise RuntimeError("broken")

    with Failing(Controller("off"), tmp_path / "t") as recorder:
        engine = Engine(tiny_model(), planner=recorder)
        name = engine.submit([1, 2, 3], max_new_tokens=5, do_sample=False)
        assert len(engine.run()[name].output) == 5
        engine.close()
