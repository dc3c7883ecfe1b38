"""The engine as a state machine: whatever is submitted, planned and cancelled, nothing is lost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from transformers import PreTrainedModel

from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from tests.engine_support import (
    COMPARISON,
    RandomPlanner,
    Reference,
    Seldom,
    generate_alone,
    live_requests,
    noised,
    random_prompt,
    tiny_model,
)

MOST_NEW_TOKENS = 24
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 33, 40, 55, 70)
ENDS = (3, 17, 29, 44)
CONFIG = EngineConfig(block_size=8, max_batch_size=4, max_prefill_tokens=24, kv_tokens=128)


@cache
def target() -> PreTrainedModel:
    return tiny_model("Llama", seed=61)


@cache
def draft_model() -> PreTrainedModel:
    return noised(target())


@cache
def prompt(index: int) -> tuple[int, ...]:
    """Half of them begin alike, so that blocks are shared."""
    length = LENGTHS[index]
    return tuple(random_prompt(70, seed=0)[:length] if index % 2 else random_prompt(length, index))


@cache
def reference(index: int) -> Reference:
    return generate_alone(target(), prompt(index), max_new_tokens=MOST_NEW_TOKENS, do_sample=False)


@dataclass
class Job:
    """A request, and what the event stream has said of it."""

    request: Request
    index: int
    max_new_tokens: int
    ends: tuple[int, ...]  # tokens at which it ends
    said: list[int] = field(default_factory=list)
    end: str | None = None
    cancelled: bool = False

    @property
    def progress(self) -> int:
        return len(self.request.tokens) + self.request.scheduled.cached_tokens


class EngineMachine(RuleBasedStateMachine):
    """Submit, step with random plans, cancel; the cache is too small for all, so some preempt."""

    planner_of: ClassVar[Callable[[int], RandomPlanner]] = RandomPlanner
    config = CONFIG
    is_late = False  # a step may have been launched before what was said last

    @initialize(seed=st.integers(0, 99))
    def open(self, seed: int) -> None:
        self.planner = self.planner_of(seed)
        self.engine = Engine(
            target(),
            drafters=["ngram", "sparse_kv:32", "sparse_kv:40:scored", draft_model()],
            planner=self.planner,
            config=self.config,
        )
        self.jobs: dict[str, Job] = {}
        self.has_news = False

    @rule(
        index=st.integers(0, len(LENGTHS) - 1),
        new=st.integers(1, MOST_NEW_TOKENS),
        may_draft=st.sampled_from([True, True, True, False]),
        may_end=st.booleans(),
    )
    def submit(self, index: int, new: int, may_draft: bool, may_end: bool) -> None:
        name = self.engine.submit(
            prompt(index),
            max_new_tokens=new,
            do_sample=False,
            speculation=may_draft,
            eos_token_id=[*ENDS] if may_end else None,
        )
        self.has_news = True
        self.jobs[name] = Job(live_requests(self.engine)[name], index, new, ENDS if may_end else ())

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(number=st.integers(0, 30))
    def cancel(self, number: int) -> None:
        names = list(self.jobs)
        if names:
            name = names[number % len(names)]
            was_live = self.jobs[name].end is None
            self.has_news = True
            assert self.engine.cancel(name) == was_live
            self.jobs[name].cancelled |= was_live

    @invariant()
    def books_balance(self) -> None:
        self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        """Everybody comes to an end, and has said what `generate` says."""
        if not hasattr(self, "engine"):
            return
        left = sum(len(prompt(job.index)) + job.max_new_tokens for job in self.jobs.values())
        for _ in range(left + 2):  # each step brings the oldest at least one token further
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work
        self.engine.scheduler.check_integrity()
        assert self.planner.faults() == []
        for name, job in self.jobs.items():
            self._check_text(name, job)
        assert self.engine.pool.free_blocks == self.engine.pool.num_blocks - 1
        self.engine.close()

    def _step(self) -> None:
        waiting = [job for job in self.jobs.values() if job.end is None and not job.cancelled]
        before = waiting[0].progress if waiting else 0
        self.engine.step()
        for event in self.engine.take_events():
            job = self.jobs[event.request_id]
            assert job.end is None, "something was said after the end"
            job.said.extend(event.tokens)
            job.end = event.finish_reason
        has_news, self.has_news = self.has_news, False
        if waiting and not (has_news and self.is_late):
            oldest = waiting[0]
            assert oldest.end is not None or oldest.progress > before, "the oldest one starves"

    def _check_text(self, name: str, job: Job) -> None:
        assert job.said == job.request.output
        expected = reference(job.index)
        count = len(job.said) if job.end == "cancelled" else job.max_new_tokens
        ends = [place for place, token in enumerate(job.said) if token in job.ends]
        if job.end == "eos":
            assert ends == [len(job.said) - 1]
            count = min(len(job.said), job.max_new_tokens)
        assert job.cancelled or job.end == ("eos" if ends else "length")
        cut = Reference(expected.tokens[:count], expected.margins[:count])
        COMPARISON.check(cut, job.said, f"{name}, prompt {job.index}")


class AheadMachine(EngineMachine):
    """The same where steps overlap, and most are launched before the last one's tokens are known."""

    planner_of = Seldom
    config = CONFIG.model_copy(update={"overlap": True})
    is_late = True


EngineMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=24)
AheadMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=24)
TestEngine = EngineMachine.TestCase
TestAheadEngine = AheadMachine.TestCase


@pytest.mark.parametrize("kind", [EngineMachine, AheadMachine])
def test_the_machine_meets_preemption_sharing_and_every_drafter(kind: type[EngineMachine]) -> None:
    """A fixed history of the same kind: what the machine walks through does happen."""
    machine = kind()
    machine.open(seed=3)
    num_shared = 0
    for turn in range(20):
        machine.submit(
            index=turn % len(LENGTHS), new=MOST_NEW_TOKENS, may_draft=True, may_end=turn % 3 == 0
        )
        machine.step(count=2)
        machine.books_balance()
        blocks = [b for r in machine.engine.scheduler.running for b in r.table.blocks]
        num_shared += len(blocks) - len(set(blocks))
    machine.cancel(number=17)
    engine, planner = machine.engine, machine.planner
    machine.teardown()
    assert engine.scheduler.num_preemptions > 0
    assert {job.end for job in machine.jobs.values()} == {"length", "eos", "cancelled"}
    assert (engine.stats.launched_ahead > 10) == (kind is AheadMachine)
    assert num_shared > 0
    drafted = {c.drafter for o in planner.observations for c in o.plan.choices if c.drafter}
    assert drafted == {"ngram", "sparse_kv:32", "sparse_kv:40:scored", "draft_model"}
    proposed, accepted = planner.totals()
    assert 0 < accepted < proposed
