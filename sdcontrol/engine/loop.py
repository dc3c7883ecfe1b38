"""The engine: continuous batching in which every request may draft differently at every step.

    view -> plan -> propose -> verify -> commit -> observe
    |------- launch -------|   |----- land ------| learn

Two loops give the same text. The plain one learns from a step before it launches the next. The
overlapped one launches first: learning, and all that the caller does between two steps, such as
detokenising, takes place while the device computes. A plan has then seen one observation less.

The engine knows a `Planner`, not what is behind it. It never looks into a drafter, a verifier or
the block pool: each step is told in the nouns of its neighbours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sdcontrol.core import BatchView, Observation, Plan, Planner
from sdcontrol.engine.backends import device_scope
from sdcontrol.engine.batch import Batch
from sdcontrol.engine.clock import StepClock, marks_of, unmeasured
from sdcontrol.engine.compilations import compilations
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.drafting import Drafts
from sdcontrol.engine.parts import EngineParts
from sdcontrol.engine.request import FinishReason, Request, TokenEvent
from sdcontrol.engine.shadows import ShadowDrafts, agreements
from sdcontrol.engine.verify import Verdict, Verifier, VerifyTask
from sdcontrol.logs import EventLog
from sdcontrol.scheduling.scheduler import ScheduledBatch

__all__ = ["Engine"]

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose forward the device was asked for."""

    batch: Batch
    view: BatchView
    plan: Plan
    drafts: Drafts
    logits: Tensor | None  # None: there was nothing to compute
    tasks: Sequence[VerifyTask]
    shadows: ShadowDrafts
    clock: StepClock
    observe_seconds: float  # that were spent before the launch
    num_made: int  # graphs and kernels, before the step


class Engine(EngineParts):
    """Decodes many requests of one model together, with any mix of drafters.

    `drafters` are names (`"ngram"`, `"sparse_kv:512"`), draft model objects, `Drafter` objects, or
    a mapping from arm names to those. Without a `planner` nothing is drafted. `submit` and `cancel`
    may be called from any thread while one thread steps.

    Raises `UnsupportedModel` for what the attention path cannot honour, `ConfigError` for settings.
    """

    def __init__(
        self,
        model: object,
        *,
        drafters: "Sequence[DrafterSpec] | Mapping[str, DrafterSpec]" = (),
        planner: Planner | None = None,
        verification: str | Verifier = "coupled",
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        super().__init__(
            model,
            drafters=drafters,
            planner=planner,
            verification=verification,
            tokenizer=tokenizer,
            config=config,
        )
        overlap = self.config.overlap
        self._overlaps = self.runner.device.type == "cuda" if overlap is None else overlap
        self._flight: _Flight | None = None  # launched ahead
        self._ended: list[Request] = []  # with the last step
        self._free_kv_tokens = 0

    def run(self) -> dict[str, Request]:
        """Step until nothing is left to do; the finished requests by id."""
        finished: dict[str, Request] = {}
        while self._intake.live:
            self.step()
            finished.update({request.id: request for request in self._ended})
        return finished

    def close(self) -> None:
        """Free the cache; the model is as it was found. Requests still live are dropped."""
        self._is_closed = True
        self._flight = None
        self._intake.live.clear()
        self._host.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self) -> Observation:
        """Decode one step; an empty observation where there is nothing to do.

        Where steps overlap, the next one is launched before this one is returned: a request that is
        submitted or cancelled meanwhile takes part, or no more, from the one after it on.
        """
        self._check_open()
        self._ended = []
        # Whoever steps in inference mode and goes on outside finds tensors that may be written.
        with device_scope(self.runner.device), torch.inference_mode(False), torch.no_grad():
            if self._overlaps:
                return self._step_ahead()
            observation = self._land(self._launch(self._tally.steps))
            self._learn(observation)
            return observation

    def _step_ahead(self) -> Observation:
        """Land a step, and launch the next before learning from it, if the planner allows that."""
        flight, self._flight = self._flight or self._launch(self._tally.steps), None
        observation = self._land(flight)
        has_next = bool(self._intake.live)
        learns_late = has_next and self.planner.allows_late_observations
        if not learns_late:
            self._learn(observation)
        try:
            if has_next:
                ahead = self._launch(observation.view.step + 1)
                self._flight = ahead if ahead.batch.pieces else None
        finally:
            if learns_late:
                self._learn(observation)
                self.planner.take_observe_seconds()  # the flight's own clock counts them
        if learns_late and self._flight is not None:
            self._flight.clock.lap("learning")
        return observation

    def _launch(self, step: int) -> _Flight:
        """Schedule, plan and draft a step, and ask the device for its forward."""
        observe_seconds, num_made = self.planner.take_observe_seconds(), self._num_made()
        clock = StepClock(marks_of(self.runner.device))
        self._take_inbox()
        batch = Batch(self._next_batch(), self._intake.live)
        offered = None if self.planner.never_drafts else self.drafting
        view = batch.view(step, self._free_kv_tokens, offered)
        clock.lap("overhead")
        plan = self.planner.plan(view)
        clock.lap("controller")
        drafts = self._propose(view, plan, batch)
        clock.lap("draft")
        logits, tasks = self._forward(batch)
        clock.lap("verify")
        shadows = self._shadows(batch, plan)
        clock.lap("meanwhile")
        return _Flight(
            batch,
            view,
            plan,
            drafts,
            logits,
            tasks,
            shadows,
            clock,
            observe_seconds,
            num_made,
        )

    def _land(self, flight: _Flight) -> Observation:
        """Wait for a step's verdicts, and keep what they say."""
        batch, clock = flight.batch, flight.clock
        clock.resume()
        verdicts: list[Verdict] = []
        if flight.logits is not None and flight.tasks:
            verdicts = self._verify_rows(flight.logits, flight.tasks)
        clock.lap("verify")
        outputs = batch.outputs(verdicts)
        shadow = agreements(flight.shadows, outputs[: len(batch.decoding)])
        self._commit(batch, verdicts, outputs)
        clock.lap("overhead")
        timing = clock.timing(flight.drafts.seconds, flight.observe_seconds)
        is_measured = self._num_made() == flight.num_made
        return batch.observation(
            flight.view,
            flight.plan,
            flight.drafts,
            verdicts,
            timing=timing if is_measured else unmeasured(timing),
            shadow=shadow,
            faults=(*self.planner.take_faults(), *self.drafting.take_faults()),
        )

    def _num_made(self) -> int:
        """Graphs that were captured, or tried, and kernels that were compiled, so far."""
        return self._host.graph_stats.tried + compilations()

    def _learn(self, observation: Observation) -> None:
        self._tally.add(observation)
        self.planner.observe(observation)

    def _take_inbox(self) -> None:
        arrivals, cancels = self._intake.take()
        for request in arrivals:
            request.update_keys(self.config.block_size)
            self.scheduler.submit(request.scheduled)
            self.drafting.start(request)
        for request in cancels:
            if request.finish_reason is None:
                self.scheduler.cancel(request.id)
                self._end(request, (), "cancelled")

    def _next_batch(self) -> ScheduledBatch:
        scheduled = self.scheduler.next_batch()
        for lost in scheduled.preempted:
            request = self._intake.live[lost.id]
            request.lose_cache()
            self.drafting.lose_cache(request)
            self._host.forget(request.id)
            log.info("request_preempted", request=lost.id, tokens=lost.num_tokens)
        self._free_kv_tokens = self.scheduler.free_draft_tokens(scheduled)
        return scheduled

    def _propose(self, view: BatchView, plan: Plan, batch: Batch) -> Drafts:
        if plan.is_off:
            return Drafts.none(len(batch.decoding))
        for piece, choice in zip(batch.decoding, plan.choices, strict=True):
            if choice.num_draft_tokens:
                self.scheduler.reserve(piece.request.scheduled, choice.num_draft_tokens)
        planner = self.planner
        drafts = self.drafting.propose(
            batch.requests,
            view,
            plan,
            planner.refine if planner.refines else None,
            between_rounds=planner.refines_rounds_of(plan),
            refines_hinted=planner.refines_hinted,
        )
        batch.take(drafts.drafts, plan.choices)
        return drafts

    def _forward(self, batch: Batch) -> tuple[Tensor | None, Sequence[VerifyTask]]:
        if not batch.pieces:
            return None, ()
        segments = batch.segments(self.config.block_size)
        logits, first_rows = self.runner.forward(segments, self._host.query_sink(batch.pieces))
        return logits, batch.tasks(first_rows)

    def _shadows(self, batch: Batch, plan: Plan) -> ShadowDrafts:
        """What free drafters would have drafted, before any of it is known to be right."""
        if not self.planner.learns:
            return {}
        return self.drafting.shadows(batch.requests, plan, batch.most_outputs)

    def _commit(
        self, batch: Batch, verdicts: Sequence[Verdict], outputs: Sequence[list[int]]
    ) -> None:
        """Keep what was accepted; give back what was not."""
        self._host.move(batch.accept(verdicts, outputs))
        block_size, is_idle = self.config.block_size, self.drafting.is_idle
        for piece in batch.pieces:
            request, emitted = piece.request, piece.emitted
            tokens = request.tokens
            new_tokens = tuple(tokens[len(tokens) - emitted :]) if emitted else ()
            if request.finish_reason is not None:
                self.scheduler.finish(request.scheduled)
                self._end(request, new_tokens, request.finish_reason)
                continue
            request.update_keys(block_size)
            self.scheduler.commit(request.scheduled, request.cached_after, len(tokens))
            if emitted:
                self._events.append(TokenEvent(request.id, new_tokens))
                if not is_idle:
                    self.drafting.commit(request, emitted)

    def _end(self, request: Request, tokens: tuple[int, ...], reason: FinishReason) -> None:
        request.finish_reason = reason
        self._events.append(TokenEvent(request.id, tokens, reason))
        self.drafting.finish(request)
        self._host.forget(request.id)
        self._ended.append(request)
        self._intake.remove(request)
