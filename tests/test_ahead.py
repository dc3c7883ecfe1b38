"""Launching a step before the tokens of the last one are known: the same text, and nothing waits."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Choice, Observation, Plan, Planner, Timing
from sdcontrol.engine.clock import StepClock
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.verify import Asked, VerifyTask
from sdcontrol.errors import UnsupportedGeneration
from sdcontrol.outlook import Outlook
from sdcontrol.policies.tries import PRICE, PROBES
from tests.engine_support import (
    PROMPTS,
    ROOMY,
    RecordingPlanner,
    Seldom,
    run_checked,
    submit_all,
    text_tokenizer,
    tiny_model,
)
from tests.graph_support import use_fake_graphs

TIGHT = {**ROOMY, "kv_tokens": 96}
OPTIONS: tuple[dict[str, object], ...] = (
    {"do_sample": False},
    {"do_sample": True, "top_k": 12},
    {"do_sample": False, "eos_token_id": [3, 55]},
    {"do_sample": True, "temperature": 1.3},
    {"do_sample": False, "stop_strings": ["xyz", "kjw"]},
    {"do_sample": True, "eos_token_id": [7, 8, 9, 10, 11, 12, 13, 14]},
)


@cache
def target() -> PreTrainedModel:
    return tiny_model("Llama", seed=41)


def engine_of(
    planner: Planner | None,
    *,
    overlap: bool = True,
    drafters: Sequence[str] = ("ngram",),
    verification: str = "coupled",
    **settings: object,
) -> Engine:
    config = EngineConfig.model_validate({**ROOMY, **settings, "overlap": overlap})
    return Engine(
        target(),
        drafters=drafters,
        planner=planner,
        tokenizer=text_tokenizer(),
        verification=verification,
        config=config,
    )


def outputs_of(engine: Engine, options: Sequence[dict[str, object]] = OPTIONS) -> list[object]:
    with engine:
        names = [
            engine.submit(prompt, max_new_tokens=24, seed=seed, **own)  # type: ignore[arg-type]
            for seed, (prompt, own) in enumerate(zip(PROMPTS, options, strict=False))
        ]
        finished = run_checked(engine)
        return [(finished[name].output, finished[name].finish_reason) for name in names]


@pytest.fixture(params=["eager", "graphs"], autouse=True)
def forwards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "graphs":
        use_fake_graphs(monkeypatch)


# One text


@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize(
    "make", [lambda: None, lambda: Seldom(3, period=40), lambda: Seldom(3, period=13)]
)
def test_the_text_is_the_same(
    make: Callable[[], Planner | None], settings: dict[str, object]
) -> None:
    """Greedy and sampled; ends that nobody could foresee; blocks that run out."""
    expected = outputs_of(engine_of(None, overlap=False, **settings))
    engine = engine_of(make(), **settings)
    assert outputs_of(engine) == expected
    assert {reason for _, reason in expected} == {"eos", "length", "stop"}
    assert 3 < engine.stats.launched_ahead < engine.stats.steps
    assert engine.stats.faults == []


def test_processors_that_look_at_the_prefix_wait_for_the_tokens() -> None:
    options = [{"do_sample": True, "repetition_penalty": 1.4}, *OPTIONS[1:]]
    expected = outputs_of(engine_of(None, overlap=False), options)
    engine = engine_of(None)
    assert outputs_of(engine, options) == expected
    alone = engine_of(None)
    outputs_of(alone, options[:1])
    assert alone.stats.launched_ahead == 0 < engine.stats.launched_ahead


@pytest.mark.parametrize("verification", ["rejection"])
def test_verifiers_that_answer_at_once_are_waited_for(verification: str) -> None:
    options = [{"do_sample": False}] * 3
    engine = engine_of(None, verification=verification)
    assert outputs_of(engine, options) == outputs_of(engine_of(None, overlap=False), options)
    assert engine.stats.launched_ahead == 0


# What planners see


class Watching(RecordingPlanner):
    """Never drafts; keeps what it was shown."""

    allows_late_observations = True
    plans_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[BatchView] = []

    def plan(self, view: BatchView) -> Plan:
        self.shown.append(view)
        return super().plan(view)


def test_views_count_the_tokens_that_are_on_their_way() -> None:
    planner = Watching()
    engine = engine_of(planner)
    outputs_of(engine, OPTIONS[:1] * 4)
    assert engine.stats.launched_ahead > 10
    seen: dict[str, tuple[int, int, int]] = {}
    for observation in planner.observations:
        for row, emitted in zip(observation.view.requests, observation.emitted, strict=True):
            counts = row.context_tokens, row.generated_tokens, row.remaining_tokens
            assert seen.get(row.id, counts) == counts
            context, generated, remaining = counts
            seen[row.id] = context + emitted, generated + emitted, remaining - emitted
    steps = [view.step for view in planner.shown]
    assert steps == sorted(set(steps))


def test_nobody_hears_of_a_request_after_its_end() -> None:
    """Ends by a token are found when the next step is on its way; ends by length are foreseen."""
    planner = Watching()
    engine = engine_of(planner)
    outputs_of(engine)
    ended: set[str] = set()
    for observation in planner.observations:
        names = [row.id for row in observation.view.requests]
        assert not ended & set(names)
        assert all(emitted == 1 for emitted in observation.emitted)
        assert len(observation.plan.choices) == len(names)
        ended |= {
            n for n in names if n not in engine.requests and _last_of(planner, n) is observation
        }
    wider = {view.step: len(view.requests) for view in planner.shown}
    narrowed = [o for o in planner.observations if len(o.view.requests) < wider.get(o.view.step, 0)]
    assert narrowed, "no request ended while the next step was on its way"
    assert all(o.timing.verify_seconds == 0 for o in narrowed), "a row more was computed"


def _last_of(planner: RecordingPlanner, name: str) -> Observation:
    return [o for o in planner.observations if name in {row.id for row in o.view.requests}][-1]


class Twice(Seldom):
    """Notes in which steps it was asked."""

    def __init__(self, period: int) -> None:
        super().__init__(3, period=period)
        self.asked: list[tuple[int, bool]] = []

    def plan(self, view: BatchView) -> Plan:
        plan = super().plan(view)
        self.asked.append((view.step, plan.is_off))
        return plan


def test_drafts_are_planned_once_the_tokens_are_known() -> None:
    """A plan with drafts that was made ahead is made again, of the same counts."""
    planner = Twice(17)
    with engine_of(planner) as engine:
        submit_all(engine, PROMPTS[1:4], max_new_tokens=60)
        run_checked(engine)
    drafting = [step for step, is_off in planner.asked if not is_off]
    assert len(drafting) > len(set(drafting)), "no plan with drafts was made ahead"
    proposed = {o.view.step: sum(o.proposed) for o in planner.observations}
    assert all(proposed[step] for step in set(drafting))


@pytest.mark.parametrize("quiet", [True, False])
def test_a_controller_plans_ahead_and_is_told_in_order(quiet: bool) -> None:
    controller = Controller("off" if quiet else "goodput", clock=None)
    engine = engine_of(controller)
    expected = outputs_of(engine_of(None, overlap=False))
    assert outputs_of(engine) == expected
    assert controller.num_observed == engine.stats.steps
    if quiet:
        assert engine.stats.launched_ahead > 10


# Order


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`forward` when one is asked for, `read` when verdicts are waited for."""
    order: list[str] = []
    forward, verify = ModelRunner.forward, engine._verify_rows

    def forwarding(self: ModelRunner, *args: object) -> tuple[Tensor, list[int]]:
        order.append("forward")
        return forward(self, *args)  # type: ignore[arg-type]

    def asking(logits: Tensor, tasks: Sequence[VerifyTask]) -> Asked:
        asked = verify(logits, tasks)

        def read() -> list[object]:
            order.append("read")
            return asked.read()  # type: ignore[return-value]

        return asked._replace(read=read)

    monkeypatch.setattr(ModelRunner, "forward", forwarding)
    monkeypatch.setattr(engine, "_verify_rows", asking)
    return order


def test_a_forward_is_asked_for_before_the_last_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_of(None) as engine:
        submit_all(engine, PROMPTS[:2], max_new_tokens=30)
        for _ in range(3):
            engine.step()
        order = watch(engine, monkeypatch)
        for _ in range(5):
            engine.step()
        assert order == ["forward", "read"] * 5


def test_whoever_comes_or_is_cancelled_meanwhile_takes_part_from_the_next_launch_on() -> None:
    alone = outputs_of(engine_of(None, overlap=False), OPTIONS[:2])
    with engine_of(None) as engine:
        first, second = submit_all(engine, PROMPTS[2:4], max_new_tokens=24)
        for _ in range(6):
            engine.step()
        assert engine.stats.launched_ahead
        names = [
            engine.submit(prompt, max_new_tokens=24, seed=seed, **own)  # type: ignore[arg-type]
            for seed, (prompt, own) in enumerate(zip(PROMPTS, OPTIONS[:2], strict=False))
        ]
        assert engine.cancel(second)
        cancelled = engine.requests[second]
        engine.step()
        assert cancelled.finish_reason is not None
        finished = run_checked_quietly(engine)
    assert [(finished[n].output, finished[n].finish_reason) for n in names] == alone
    assert len(finished[first].output) == 24


def run_checked_quietly(engine: Engine) -> dict[str, Request]:
    """As `run_checked`, of an engine whose earlier events nobody took."""
    live = dict(engine.requests)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    return live


def test_what_ends_with_its_last_request_leaves_nothing_behind() -> None:
    """The flight of a request that has ended is forgotten; the next request starts afresh."""
    eos = outputs_of(engine_of(None, overlap=False), [{"do_sample": False}])
    token = eos[0][0][5]  # type: ignore[index]
    with engine_of(None) as engine:
        for _ in range(2):
            name = engine.submit(PROMPTS[0], max_new_tokens=24, do_sample=False, eos_token_id=token)
            (finished,) = run_checked(engine).values()
            assert (finished.id, finished.finish_reason) == (name, "eos")
            assert finished.output == eos[0][0][: len(finished.output)]  # type: ignore[index]
            assert not engine.has_work
            assert engine.scheduler.running == ()


# Faults


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While its one entry is set, nothing can be sampled."""
    is_broken = [False]
    compute = ModelRunner.compute

    def computing(self: ModelRunner, *args: object) -> Tensor:
        logits = compute(self, *args)  # type: ignore[arg-type]
        return torch.full_like(logits, torch.nan) if is_broken[0] else logits

    monkeypatch.setattr(ModelRunner, "compute", computing)
    return is_broken


def test_a_step_that_fails_behind_the_next_one_can_be_done_again(broken: list[bool]) -> None:
    """What was counted ahead is taken back, and token -1 never reaches an embedding."""
    expected = outputs_of(engine_of(None, overlap=False), OPTIONS[1:2])
    with engine_of(None) as engine:
        name = engine.submit(PROMPTS[0], max_new_tokens=24, seed=0, **OPTIONS[1])  # type: ignore[arg-type]
        for _ in range(6):
            engine.step()
        request = engine.requests[name]
        broken[0] = True
        engine.step()  # whose logits are those of before
        with pytest.raises(UnsupportedGeneration):
            engine.step()
        broken[0] = False
        assert request.scheduled.num_tokens == len(request.tokens)
        assert request.scheduled.cached_tokens == len(request.tokens) - 1
        engine.scheduler.check_integrity()
        engine.run()
        assert [(request.output, request.finish_reason)] == expected


def test_a_launch_that_fails_takes_back_what_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outputs_of(engine_of(None, overlap=False), OPTIONS[:1])
    with engine_of(None) as engine:
        name = engine.submit(PROMPTS[0], max_new_tokens=24, do_sample=False)
        for _ in range(6):
            engine.step()
        request = engine.requests[name]
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "forward", _out_of_memory)
            with pytest.raises(MemoryError):
                engine.step()
        assert request.scheduled.num_tokens == len(request.tokens)
        engine.run()
        assert [(request.output, request.finish_reason)] == expected


def _out_of_memory(*_: object) -> None:
    raise MemoryError


# When


OFF, DRAFTS = Plan((Choice.off(),)), Plan((Choice.of("ngram", 2),), "8 tokens more")


def outlook_of(*plans: Plan) -> Outlook:
    outlook = Outlook()
    for plan in plans:
        outlook.note(plan)
    return outlook


def test_an_outlook_is_quiet_while_no_drafts_follow_steps_without() -> None:
    assert not outlook_of().is_quiet(0.5), "nothing was planned"
    assert not outlook_of(DRAFTS).is_quiet(0.5)
    assert outlook_of(DRAFTS, OFF).is_quiet(0.0)
    surprised = outlook_of(OFF, DRAFTS)
    quiet = []
    for _ in range(12):
        surprised.note(OFF)
        quiet.append(surprised.is_quiet(0.0))
    assert quiet == sorted(quiet)
    assert not quiet[3]
    assert quiet[-1]


def test_the_more_is_gained_the_more_may_be_missed() -> None:
    plans = [OFF, DRAFTS, OFF, OFF] * 10
    assert not outlook_of(*plans).is_quiet(0.1)
    assert outlook_of(*plans).is_quiet(1.0)


def test_what_is_only_tried_can_wait() -> None:
    probe = Plan(DRAFTS.choices, "off" + PROBES + "ngram" + PRICE + "0.001 s")
    assert not outlook_of(OFF, probe).is_quiet(0.0), "nobody knows how many tokens come of it"
    assert outlook_of(*[OFF, probe, OFF] * 3).is_quiet(0.0)


# Time


class Device:
    """A device with a queue, and a host that asks it; seconds of either pass as they are told to."""

    def __init__(self) -> None:
        self.host = self.free = 0.0  # the host's clock; when the device has done what it was asked

    def ask(self, seconds: float) -> None:
        self.free = max(self.free, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.free)


class Marks:
    """Of one step, in the queue of a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.reached: list[float] = []

    def add(self) -> None:
        self.reached.append(max(self._device.free, self._device.host))

    def seconds(self) -> float:
        pairs = zip(self.reached[::2], self.reached[1::2], strict=True)
        return sum(end - start for start, end in pairs)

    def seconds_idle(self) -> float:
        pairs = zip(self.reached[1:-1:2], self.reached[2::2], strict=True)
        return sum(start - end for end, start in pairs)

    def seconds_after(self, other: "Marks") -> float:
        return self.reached[0] - other.reached[-1]


FORWARD, VERDICTS = 8.0, 1.0
LAUNCHING = {"overhead": 1.0, "controller": 3.0}


class Host:
    """What an engine's loop does of steps without drafts, call by call, on a device of its own."""

    def __init__(self, *, pace: float = 1.0, away: float = 0.0) -> None:
        self.device = Device()
        self.pace, self.away = pace, away
        self.flight: StepClock | None = None
        self.timings: list[Timing] = []
        self.ends: list[float] = []  # when the device had answered each

    def launch(self, before: StepClock | None = None) -> StepClock:
        device = self.device
        clock = StepClock(Marks(device), lambda: device.host, before=before)
        for phase, seconds in LAUNCHING.items():
            self._work(seconds)
            clock.lap(phase)
        clock.lap("draft")
        device.ask(FORWARD)
        clock.lap("verify")
        return clock

    def step(self, *, goes_ahead: bool) -> None:
        """Land a step, and launch the next: before, or after."""
        device, flight = self.device, self.flight or self.launch()
        flight.resume()
        device.ask(VERDICTS)
        flight.lap("verify")
        self.ends.append(device.free)
        ahead = None
        if goes_ahead:
            ahead = self.launch(flight)
            flight.follow()
        device.host = max(device.host, self.ends[-1])
        flight.lap("wait")
        self._work(1.5)
        flight.lap("commit")
        self.timings.append(flight.timing({}, 0.0))
        if ahead is not None:
            ahead.catch_up()
        self.flight = ahead or self.launch()
        self._work(0.5)
        self.flight.lap("learning")
        device.host += self.away

    def _work(self, seconds: float) -> None:
        self.device.host += self.pace * seconds


def totals(host: Host) -> list[float]:
    return [timing.total_seconds for timing in host.timings]


def test_a_step_launched_ahead_takes_what_the_device_takes() -> None:
    host = Host()
    for _ in range(6):
        host.step(goes_ahead=True)
    assert host.timings[1:] == [Timing({}, FORWARD + VERDICTS, 0.0, 0.0)] * 5


@pytest.mark.parametrize("pace", [1.0, 1.6, 2.0, 5.0])
@pytest.mark.parametrize("period", [1, 3, 100])
def test_times_of_steps_add_up_to_the_time_that_passes(pace: float, period: int) -> None:
    """However slow the host is, and however often nothing can be launched ahead."""
    host = Host(pace=pace)
    for number in range(1, 31):
        host.step(goes_ahead=number % period != 0 or period == 1)
    passed = host.ends[-1] - host.ends[0]
    assert sum(totals(host)[1:]) == pytest.approx(passed, rel=0.03)
    assert host.device.host > 5.0


def test_somebody_elses_time_is_not_a_steps() -> None:
    away, here = Host(away=100.0), Host()
    for host in (away, here):
        for _ in range(10):
            host.step(goes_ahead=True)
    assert totals(away)[2:] == pytest.approx(totals(here)[2:], abs=LAUNCHING["overhead"] + 3.0)
    assert max(totals(away)) < 20.0


def test_what_a_device_waited_for_is_shared_out_as_the_host_spent_it() -> None:
    host = Host(pace=5.0)
    for _ in range(6):
        host.step(goes_ahead=True)
    idle = 5.0 * sum(LAUNCHING.values()) - VERDICTS  # before the forward
    then = 5.0 * (1.5 + 0.5) - FORWARD  # after it: the step before was kept and learnt from so long
    expected = Timing({}, FORWARD + VERDICTS, 0.75 * idle, 0.25 * idle + then)
    assert host.timings[-1] == expected
