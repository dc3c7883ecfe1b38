"""Launching a step before learning from the last one: the same text, in a known order."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Confidence, Observation, Plan, Planner, Timing
from sdcontrol.engine.clock import StepClock
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import ModelRunner
from tests.engine_support import (
    PROMPTS,
    ROOMY,
    RandomPlanner,
    RecordingPlanner,
    live_requests,
    noised,
    run_checked,
    submit_all,
    text_tokenizer,
    tiny_model,
)

TIGHT = {**ROOMY, "kv_tokens": 88}
ARMS = ("ngram", "sparse_kv:32", "sparse_kv:40:scored")
OPTIONS: tuple[dict[str, object], ...] = (
    {"do_sample": False},
    {"do_sample": True, "top_k": 12},
    {"do_sample": False, "eos_token_id": [3, 55]},
    {"do_sample": True, "temperature": 1.3},
    {"do_sample": False, "stop_strings": ["xyz", "kjw"]},
    {"do_sample": True, "repetition_penalty": 1.4},
)


@cache
def target() -> PreTrainedModel:
    return tiny_model("Llama", seed=41)


@cache
def draft_model() -> PreTrainedModel:
    return noised(target())


def engine_of(
    planner: Planner | None,
    *,
    overlap: bool,
    settings: dict[str, int] = ROOMY,
    drafters: Sequence[object] = ARMS,
) -> Engine:
    config = EngineConfig.model_validate({**settings, "overlap": overlap})
    return Engine(
        target(),
        drafters=drafters,  # type: ignore[arg-type]
        planner=planner,
        tokenizer=text_tokenizer(),
        config=config,
    )


class Late(RandomPlanner):
    """Learns whenever it is told."""

    allows_late_observations = True


Ends = list[tuple[list[int], str | None]]


def texts(engine: Engine) -> tuple[Ends, int]:
    """Every output with the reason of its end; and how often a request was preempted."""
    with engine:
        names = [
            engine.submit(prompt, max_new_tokens=16, seed=seed, **OPTIONS[seed])  # type: ignore[arg-type]
            for seed, prompt in enumerate(PROMPTS)
        ]
        finished = run_checked(engine)
        ends = [finished[name] for name in names]
        preemptions = sum(request.stats.preemptions for request in ends)
        return [(request.output, request.finish_reason) for request in ends], preemptions


@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("make", [RandomPlanner, Late])
def test_both_loops_give_the_same_text(
    make: Callable[[int], RandomPlanner], settings: dict[str, int]
) -> None:
    """Greedy and sampled, all drafters, every kind of stop rule, and preemptions where it is tight."""
    drafters = (*ARMS, draft_model())
    plain, lost = texts(
        engine_of(RandomPlanner(3), overlap=False, settings=settings, drafters=drafters)
    )
    planner = make(3)
    ours, lost_too = texts(engine_of(planner, overlap=True, settings=settings, drafters=drafters))
    assert ours == plain
    assert {reason for _, reason in ours} == {"eos", "length", "stop"}
    assert planner.totals()[1] > 0
    assert planner.faults() == []
    assert (min(lost, lost_too) > 0) == (settings is TIGHT)


class Ordered(RecordingPlanner):
    """Notes what happens in which order; drafts with one arm."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.allows_late_observations = late
        self.order: list[tuple[str, int]] = []

    def plan(self, view: BatchView) -> Plan:
        self.order.append(("plan", view.step))
        return Plan.uniform(view, "ngram", 3)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        if observation.view.requests:
            self.order.append(("observe", observation.view.step))


def watch_forwards(patch: pytest.MonkeyPatch, order: list[tuple[str, int]]) -> None:
    forward = ModelRunner.forward

    def watching(self: ModelRunner, *args: object) -> tuple[Tensor, list[int]]:
        order.append(("forward", 0))
        return forward(self, *args)  # type: ignore[arg-type]

    patch.setattr(ModelRunner, "forward", watching)


def decode(planner: RecordingPlanner, *, overlap: bool) -> list[Observation]:
    """What `step` returned."""
    with engine_of(planner, overlap=overlap, drafters=("ngram",)) as engine:
        submit_all(engine, PROMPTS[:3], max_new_tokens=12)
        returned = []
        while engine.has_work:
            returned.append(engine.step())
            assert engine.stats.steps == len(returned)
        return returned


def test_a_late_observation_comes_after_the_next_forward_and_before_its_verdicts() -> None:
    planner = Ordered(late=True)
    with pytest.MonkeyPatch.context() as patch:
        watch_forwards(patch, planner.order)
        returned = decode(planner, overlap=True)
    assert planner.observations == returned
    first, last = planner.order[1][1], returned[-1].view.step
    expected = [("plan", first), ("forward", 0)]
    for step in range(first + 1, last + 1):
        expected += [("plan", step), ("forward", 0), ("observe", step - 1)]
    assert planner.order[planner.order.index(("plan", first)) :] == [*expected, ("observe", last)]


@pytest.mark.parametrize(("late", "overlap"), [(False, True), (True, False)])
def test_otherwise_a_planner_is_told_before_it_plans_again(late: bool, overlap: bool) -> None:
    planner = Ordered(late=late)
    assert decode(planner, overlap=overlap) == planner.observations
    steps = [o.view.step for o in planner.observations if o.view.requests]
    assert planner.order == [(verb, step) for step in steps for verb in ("plan", "observe")]


def test_steps_are_counted_and_returned_in_order() -> None:
    returned = decode(Ordered(late=True), overlap=True)
    assert [o.view.step for o in returned] == list(range(len(returned)))
    assert sum(sum(o.emitted) for o in returned) == 3 * 11


class Failing(Ordered):
    """Fails at every third step, and has faults of its own to tell at every fourth."""

    def __init__(self) -> None:
        super().__init__(late=True)
        self._own: list[str] = []

    def plan(self, view: BatchView) -> Plan:
        if view.step % 4 == 3:
            self._own.append(f"own {view.step}")
        if view.step % 3 == 2:
            raise KeyError(view.step)
        return super().plan(view)

    def take_faults(self) -> tuple[str, ...]:
        faults, self._own = tuple(self._own), []
        return faults

    def observe(self, observation: Observation) -> None:
        assert self.take_faults() == (), "faults of the next plan were there to be taken"
        super().observe(observation)


def test_faults_stand_with_their_own_step() -> None:
    planner = Failing()
    decode(planner, overlap=True)
    for observation in planner.observations:
        step, faults = observation.view.step, observation.faults
        if observation.view.requests:
            assert [f for f in faults if f.startswith("own")] == (
                [f"own {step}"] if step % 4 == 3 else []
            )
            assert any(f"KeyError({step})" in fault for fault in faults) == (step % 3 == 2)
            assert observation.plan.is_off or step % 3 != 2
    assert sum(bool(o.faults) for o in planner.observations) > 3


class Tape:
    """A controller's calls in the order in which they were made."""

    allows_late_observations = True

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.calls: list[tuple[str, tuple[object, ...], Plan | None]] = []

    def plan(self, view: BatchView) -> Plan:
        return self._note("plan", self._controller.plan(view), view)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        return self._note(
            "refine", self._controller.refine(view, plan, confidence), view, plan, confidence
        )

    def observe(self, observation: Observation) -> None:
        self._controller.observe(observation)
        self.calls.append(("observe", (observation,), None))

    def _note(self, verb: str, plan: Plan, *given: object) -> Plan:
        self.calls.append((verb, given, plan))
        return plan


def test_a_controller_told_late_decides_again_as_it_did() -> None:
    """Its state is a fold over calls in their order: that order is all that a replay needs."""
    tape = Tape(Controller("goodput", clock=None))
    ours, _ = texts(engine_of(tape, overlap=True, drafters=(*ARMS, draft_model())))
    assert ours == texts(engine_of(None, overlap=False))[0]
    fresh = Controller("goodput", clock=None)
    for verb, given, plan in tape.calls:
        assert getattr(fresh, verb)(*given) == plan
    verbs = [verb for verb, _, _ in tape.calls]
    assert verbs.count("plan") > 10
    assert verbs[:2] != ["plan", "observe"]


# Time


class Marks:
    """A device whose clock stands at these times when its marks are reached."""

    def __init__(self, reached: Sequence[float]) -> None:
        self._reached = reached
        self.added = 0

    def add(self) -> None:
        self.added += 1

    def seconds(self) -> float:
        assert self.added == len(self._reached)
        ends = self._reached
        return sum(b - a for a, b in zip(ends[::2], ends[1::2], strict=True))


PHASES = ("overhead", "controller", "draft", "verify", "meanwhile", "learning")


def clocked(marks: Marks | None, laps: Sequence[float], *, others: float, wait: float) -> Timing:
    """A step whose phases took so long, on the host's clock."""
    now = 0.0
    clock = StepClock(marks, lambda: now)
    for phase, seconds in zip(PHASES, laps, strict=True):
        now += seconds
        clock.lap(phase)
    now += others
    clock.resume()
    now += wait
    clock.lap("verify")
    now += 1.0
    clock.lap("overhead")
    return clock.timing({"ngram": 2.0}, 0.25)


def test_what_is_done_while_the_device_computes_costs_no_time() -> None:
    """Forward 10 and verdicts 2 on the device; the host: launch 1, meanwhile 3 and 4, wait 4."""
    marks = Marks([8.0, 18.0, 18.5, 20.5])
    timing = clocked(marks, [1.0, 0.5, 3.0, 1.0, 3.0, 4.0], others=100.0, wait=4.0)
    assert timing.verify_seconds == pytest.approx(12.0)
    assert timing.controller_seconds == pytest.approx(0.75)
    assert timing.overhead_seconds == pytest.approx(1.0 + 1.0 + 1.0)


def test_what_outlasts_the_device_is_overhead() -> None:
    marks = Marks([8.0, 9.0, 18.5, 20.5])
    timing = clocked(marks, [1.0, 0.5, 3.0, 1.0, 3.0, 4.0], others=100.0, wait=2.5)
    assert timing.verify_seconds == pytest.approx(3.0)
    assert timing.overhead_seconds == pytest.approx(1.0 + 1.0 + 1.0 + (10.5 - 3.0))


def test_without_a_device_nothing_is_hidden_but_what_others_did() -> None:
    laps = [1.0, 0.5, 3.0, 10.0, 3.0, 4.0]
    timing = clocked(None, laps, others=100.0, wait=2.0)
    assert timing.verify_seconds == pytest.approx(12.0)
    assert timing.controller_seconds == pytest.approx(4.75)
    assert timing.total_seconds == pytest.approx(sum(laps) + 2.0 + 1.0 + 0.25)


# Between two steps


def test_requests_may_come_and_go_while_a_step_is_in_flight() -> None:
    expected = [text for text, _ in texts(engine_of(None, overlap=False))[0]]
    with engine_of(Late(5), overlap=True) as engine:
        first = engine.submit(PROMPTS[0], max_new_tokens=16, request_id="first", **OPTIONS[0])  # type: ignore[arg-type]
        lost = engine.submit(PROMPTS[1], max_new_tokens=16, request_id="lost", **OPTIONS[0])  # type: ignore[arg-type]
        for _ in range(3):
            engine.step()
        live = live_requests(engine)
        assert engine.cancel(lost)
        late = engine.submit(PROMPTS[2], max_new_tokens=16, request_id="late", seed=2, **OPTIONS[2])  # type: ignore[arg-type]
        finished = engine.run() | {name: live[name] for name in (first, lost)}
        engine.scheduler.check_integrity()
    assert finished[first].output == expected[0]
    assert finished[late].output == expected[2]
    assert finished[lost].finish_reason == "cancelled"
    assert 0 < len(finished[lost].output) < 16


def test_an_engine_whose_requests_were_all_cancelled_has_nothing_in_flight() -> None:
    planner = Ordered(late=True)
    with engine_of(planner, overlap=True, drafters=("ngram",)) as engine:
        for name in submit_all(engine, PROMPTS[:2], max_new_tokens=12):
            engine.step()
            assert engine.cancel(name)
        while engine.has_work:
            engine.step()
        assert len(planner.observations) == engine.stats.steps
        seen = engine.stats.steps
        submit_all(engine, PROMPTS[3:4], max_new_tokens=1)
        assert engine.step().view.prefill_tokens > 0
        assert engine.stats.steps == seen + 1
        engine.run()


def test_an_engine_may_be_closed_with_a_step_in_flight() -> None:
    engine = engine_of(Late(1), overlap=True)
    submit_all(engine, PROMPTS, max_new_tokens=12)
    engine.step()
    engine.close()
    assert not engine.has_work


def test_overlapped_steps_are_for_devices_unless_asked_for() -> None:
    assert EngineConfig().overlap is None
    planner = Ordered(late=True)
    with Engine(target(), planner=planner, config=EngineConfig(kv_tokens=256)) as engine:
        submit_all(engine, PROMPTS[:1], max_new_tokens=3)
        engine.run()
    assert [verb for verb, _ in planner.order] == ["plan", "observe"] * 2
