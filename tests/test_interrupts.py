"""Ctrl-C is nobody's fault: not the policy's, not the planner's, not a drafter's, whatever it became on its way.

An interrupt within compiled code arrives as a `SystemError` that was caused by it.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Never

import pytest

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Belief, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.ngram import NgramDrafter
from sdcontrol.engine.guard import PlannerGuard
from sdcontrol.engine.loop import Engine
from sdcontrol.interrupts import raise_interrupt
from sdcontrol.policies.off import Off
from tests.engine_support import RandomPlanner, RecordingPlanner, random_prompt, tiny_model

SMALL = EngineConfig(block_size=8, max_batch_size=4, max_prefill_tokens=64, kv_tokens=2048)
_ALARMS = 200

VIEW = BatchView(
    0,
    tuple(
        RequestView(str(r), 500, 5, 100, 0.0, ("ngram", "draft_model"), {"ngram": Hint(8, 3)})
        for r in range(8)
    ),
    1000,
)


def compiled_error() -> SystemError:
    """What numba makes of an interrupt."""
    inner = SystemError("<function _numba_unpickle> returned a result with an exception set")
    inner.__cause__ = KeyboardInterrupt()
    outer = SystemError("CPUDispatcher(<function search>) returned a result with an exception set")
    outer.__cause__ = inner
    return outer


def interrupted(*_: object) -> Never:
    raise compiled_error()


class Interrupted(Off):
    """A policy in whose compiled code somebody presses Ctrl-C."""

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        interrupted()

    def update(self, observation: Observation) -> None:
        interrupted()


class InterruptedPlanner(RecordingPlanner):
    """The same of a whole planner."""

    def plan(self, view: BatchView) -> Plan:
        interrupted()

    def observe(self, observation: Observation) -> None:
        interrupted()


def plain_step(view: BatchView) -> Observation:
    nothing, one = (0,) * len(view.requests), (1,) * len(view.requests)
    timing = Timing(verify_seconds=0.01)
    return Observation(view, Plan.off(view), nothing, nothing, nothing, one, timing)


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Interrupts the block after so long, wherever it is then."""

    def interrupt(_: int, __: FrameType | None) -> Never:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_is_told_from_an_error() -> None:
    raise_interrupt(ZeroDivisionError("a bug"))
    raise_interrupt(SystemError("a bug of the interpreter's"))
    with pytest.raises(KeyboardInterrupt):
        raise_interrupt(compiled_error())


def test_an_interrupt_is_no_fault_of_the_policy() -> None:
    controller = Controller(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        controller.plan(VIEW)
    with pytest.raises(KeyboardInterrupt):
        controller.observe(plain_step(VIEW))
    assert controller.take_faults() == ()


def test_an_interrupt_is_no_fault_of_the_planner() -> None:
    guard = PlannerGuard(InterruptedPlanner())
    with pytest.raises(KeyboardInterrupt):
        guard.plan(VIEW)
    with pytest.raises(KeyboardInterrupt):
        guard.observe(plain_step(VIEW))
    assert guard.take_faults() == ()


@pytest.mark.parametrize("method", ["start", "hint", "propose", "commit"])
def test_an_interrupt_is_no_fault_of_a_drafter(method: str) -> None:
    """What came in its way ended with it: the drafter drafts for those who come next."""
    drafter = NgramDrafter()
    planner = RandomPlanner(seed=1, off=0.0)
    prompt = random_prompt(30, seed=3)
    with Engine(tiny_model(), drafters=[drafter], planner=planner, config=SMALL) as engine:
        engine.submit(prompt, max_new_tokens=12)
        setattr(drafter, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.run()
        delattr(drafter, method)
        assert engine.drafting.quarantined == {}
        assert engine.stats.faults == []


def plan_for_ever(controller: Controller) -> Never:
    while True:
        controller.plan(VIEW)


def test_every_interrupt_of_a_planning_loop_arrives() -> None:
    """Half of them fall into compiled code, where one has been the end of the process."""
    controller = Controller("goodput")
    controller.plan(VIEW)
    for turn in range(_ALARMS):
        with pytest.raises(KeyboardInterrupt), alarm(1e-4 + 5e-6 * turn):
            plan_for_ever(controller)
    assert controller.take_faults() == ()
