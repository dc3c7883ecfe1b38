"""What a step of the engine consists of, from the batch to what came of it.

The engine knows a `Planner`, not what is behind it. It never looks into a drafter, a verifier or
the block pool: each part of a step is told in the nouns of its neighbours. In which order steps
follow one another, `loop` says.
"""

from collections.abc import Sequence

from torch import Tensor

from sdcontrol.core import BatchView, Observation, Plan
from sdcontrol.engine.batch import Batch
from sdcontrol.engine.clock import StepClock, marks_of, unmeasured
from sdcontrol.engine.compilations import compilations
from sdcontrol.engine.drafting import Drafts
from sdcontrol.engine.flight import Flight
from sdcontrol.engine.parts import EngineParts
from sdcontrol.engine.request import FinishReason, Request
from sdcontrol.engine.shadows import ShadowDrafts, agreements
from sdcontrol.engine.verify import Asked, Verdict, VerifyTask
from sdcontrol.logs import EventLog
from sdcontrol.scheduling.scheduler import ScheduledBatch

__all__ = ["EngineSteps"]

log = EventLog(__name__)


class EngineSteps(EngineParts):
    """The parts of a step, one method each. See `loop.Engine`, which puts them in order."""

    _free_kv_tokens = 0  # that the drafts of a step may take

    def _clock(self, before: StepClock | None = None) -> StepClock:
        return StepClock(marks_of(self.runner.device), before=before)

    def _plan(self, batch: Batch, step: int, clock: StepClock) -> tuple[BatchView, Plan]:
        """What the planner is shown of a batch, and what it says."""
        offered = None if self.planner.never_drafts else self.drafting
        view = batch.view(step, self._free_kv_tokens, offered)
        clock.lap("overhead")
        plan = self.planner.plan(view)
        clock.lap("controller")
        return view, plan

    def _take_off(
        self,
        batch: Batch,
        view: BatchView,
        plan: Plan,
        clock: StepClock,
        ids: Tensor | None = None,
    ) -> Flight:
        """Draft, and ask the device for the forward; `ids` are tokens that only the device knows."""
        num_made = self._num_made()
        self._reserve(plan, batch)
        self._host.clear(batch.pieces)
        drafts = self._propose(view, plan, batch)
        clock.lap("draft")
        logits, tasks = self._forward(batch, ids)
        clock.lap("verify")
        faults = self.planner.take_faults()
        return Flight(batch, view, plan, drafts, logits, tasks, clock, num_made, faults)

    def _ask(self, flight: Flight) -> Asked:
        """Ask the device for a step's verdicts."""
        flight.clock.resume()
        asked = Asked(list)
        if flight.logits is not None and flight.tasks:
            asked = self._verify_rows(flight.logits, flight.tasks)
        flight.clock.lap("verify")
        return asked

    def _land(self, flight: Flight, asked: Asked) -> Observation:
        """Wait for a step's verdicts, and keep what they say."""
        batch, clock = flight.batch, flight.clock
        for piece in batch.pieces:  # of tokens that were known before; the device still computes
            piece.request.update_keys(self.config.block_size)
        shadows = flight.shadows
        if shadows is None:
            shadows = self._shadows(batch, flight.plan)
            clock.lap("meanwhile")
        verdicts = flight.counted(asked.read())
        clock.lap("wait")
        outputs = batch.outputs(verdicts)
        shadow = agreements(shadows, outputs[: len(batch.decoding)])
        self._commit(batch, verdicts, outputs)
        clock.lap("commit")
        timing = clock.timing(flight.drafts.seconds, flight.observe_seconds)
        is_measured = self._num_made() == flight.num_made and flight.rows is None
        return batch.observation(
            flight.view,
            flight.plan,
            flight.drafts,
            verdicts,
            timing=timing if is_measured else unmeasured(timing),
            shadow=shadow,
            faults=(*flight.faults, *self.drafting.take_faults()),
        )

    def _num_made(self) -> int:
        """Graphs that were captured, or tried, and kernels that were compiled, so far."""
        return self._host.graph_stats.tried + compilations()

    def _learn(self, observation: Observation) -> None:
        self._tally.add(observation)
        self.planner.observe(observation)

    def _start_again(self) -> None:
        """After a step that did not come to its end, of which anything may be half done.

        Requests go on from the tokens that were told, drafters learn of them anew, and the cache is empty.
        """
        self.drafting.quarantine.forgive()
        for request in list(self._intake.live.values()):
            self.drafting.finish(request)
            self.drafting.quarantine.forgive()  # one that was not told of the request yet
        self.pool = self._host.empty_pool()
        self.scheduler = self.config.scheduler(self.pool)
        self._intake.start_again()
        log.info("requests_started_again", requests=len(self._intake.live))

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

    def _reserve(self, plan: Plan, batch: Batch) -> None:
        if plan.is_off:
            return
        for piece, choice in zip(batch.decoding, plan.choices, strict=True):
            if choice.num_draft_tokens:
                self.scheduler.reserve(piece.request.scheduled, choice.num_draft_tokens)

    def _propose(self, view: BatchView, plan: Plan, batch: Batch) -> Drafts:
        if plan.is_off:
            return Drafts.none(len(batch.decoding))
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

    def _forward(
        self, batch: Batch, ids: Tensor | None
    ) -> tuple[Tensor | None, Sequence[VerifyTask]]:
        if not batch.pieces:
            return None, ()
        segments = batch.segments(self.config.block_size)
        queries = self._host.query_sink(batch.pieces)
        logits, first_rows = self.runner.forward(segments, queries, ids)
        self._host.check_cache(self.scheduler.running)
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
        committed: list[tuple[Request, int]] = []
        for piece in batch.pieces:
            request, emitted = piece.request, piece.emitted
            tokens = request.tokens
            new_tokens = tuple(tokens[len(tokens) - emitted :]) if emitted else ()
            if request.finish_reason is not None:
                scheduled = request.scheduled  # blocks that are full can be shared
                self.scheduler.commit(scheduled, scheduled.cached_tokens, scheduled.num_tokens)
                self.scheduler.finish(scheduled)
                self._end(request, new_tokens, request.finish_reason)
                continue
            self.scheduler.commit(request.scheduled, request.cached_after, len(tokens))
            if emitted:
                self._events.tell(request, new_tokens)
                committed.append((request, emitted))
        self.drafting.commit(committed)

    def _end(self, request: Request, tokens: tuple[int, ...], reason: FinishReason) -> None:
        request.finish_reason = reason
        self._events.tell(request, tokens, reason)
        self.drafting.finish(request)
        self._host.forget(request.id)
        self._ended.append(request)
        self._intake.remove(request)
