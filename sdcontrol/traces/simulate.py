"""What-if replay: a discrete-event simulation of the engine, step by step.

The scheduler and the block pool are the engine's own; plans come from a real planner; what drafts
achieve comes from recorded outcomes, how long a step takes from `StepTimes`. It follows
`Engine.step` line by line, on counts instead of tensors, and on a simulated clock. Knows nothing of
files. Raises `CounterfactualError` for a plan that the record cannot answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Observation, Plan, Planner, RequestView, Timing
from sdcontrol.errors import CounterfactualError, RequestRefused
from sdcontrol.scheduling.blocks import BlockPool, block_keys
from sdcontrol.scheduling.scheduler import Row, ScheduledBatch, ScheduledRequest, Scheduler
from sdcontrol.traces.measurements import Measurements
from sdcontrol.traces.simulated_cache import DraftCaches
from sdcontrol.traces.simulated_drafting import SimulatedDrafting
from sdcontrol.traces.simulated_drafts import Foreknowledge, LiveRequest
from sdcontrol.traces.step_times import StepTimes, tell_engine
from sdcontrol.traces.workload import SimulatedRequest, Workload

__all__ = ["Simulation", "SimulationSettings"]


class SimulationSettings(BaseModel):
    """The engine that is simulated; the same names mean the same as in the engine's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(16, ge=1, description="tokens per KV block")
    max_batch_size: int = Field(64, ge=1, description="requests decoded together")
    max_prefill_tokens: int = Field(512, ge=1, description="prompt tokens computed in one step")
    kv_tokens: int = Field(1 << 18, ge=1, description="tokens that the KV cache holds")
    prefix_sharing: bool = Field(True, description="share the blocks of common prompt beginnings")
    drafters: tuple[str, ...] | None = Field(
        None, description="arms on offer; None: all that the workload can answer"
    )


class Simulation:
    """A `Backend` over a workload.

    `foreknowledge` is shared with the policy `oracle`, if it plans; the clock begins at
    `start_seconds` of the workload's time. Raises `CounterfactualError` where the settings or the policy name an arm that the workload
    cannot answer.
    """

    def __init__(
        self,
        workload: Workload,
        planner: Planner,
        times: StepTimes,
        settings: SimulationSettings | None = None,
        *,
        foreknowledge: Foreknowledge | None = None,
        start_seconds: float = 0.0,
    ) -> None:
        self.settings = settings or SimulationSettings()
        self.planner = planner
        self.clock_seconds = start_seconds
        self.measurements = Measurements(times, start_seconds)
        self._drafters = _drafters_of(workload, planner, self.settings)
        self._pool = _pool_of(self.settings)
        self._scheduler = Scheduler(
            self._pool,
            max_batch_size=self.settings.max_batch_size,
            max_prefill_tokens=self.settings.max_prefill_tokens,
        )
        self._arrivals: Iterator[SimulatedRequest] = iter(workload)
        self._next = next(self._arrivals, None)
        self._concurrency = workload.concurrency
        self._live: dict[str, LiveRequest] = {}
        if foreknowledge is not None:
            foreknowledge.live = self._live
        self._caches = DraftCaches(self._pool)
        self._drafting = SimulatedDrafting(planner, self._caches, self._drafters)
        self._times = times
        tell_engine(times, planner)
        self._pause_of = getattr(times, "pause_seconds", None)
        self._pause_seconds = 0.0  # before the next step
        self._num_steps = 0
        self._offers = bool(self._drafters) and getattr(planner, "drafts", True)
        self._checks_plans = not isinstance(planner, Controller)  # which has checked them itself
        self._learns = self._offers and getattr(planner, "learns", True)

    @property
    def has_work(self) -> bool:
        """Whether a request is to come, waiting or running."""
        return self._next is not None or bool(self._live)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._scheduler.num_preemptions

    def step(self) -> Observation:
        """Simulate one step; an empty observation where there is nothing to do."""
        self.clock_seconds += self._pause_seconds
        self._take_arrivals()
        batch = self._scheduler.next_batch()
        for lost in batch.preempted:
            self._caches.lose(self._live[lost.id])
        live = [self._live[row.request.id] for row in batch.decoding]
        view = self._view(live, batch)
        plan = self._plan(view)
        drafted = self._drafting.propose(view, plan, live)
        self._reserve(live, drafted.reserved)
        shadow = self._drafting.shadow(live, plan, drafted.accepted) if self._learns else {}
        emitted = self._emit(live, drafted.accepted)
        work = self._drafting.work(view, drafted, emitted, shadow)
        timing = self._times.timing(work) if work.num_tokens else Timing()
        self.clock_seconds += timing.total_seconds
        self._pause_seconds = 0.0 if self._pause_of is None else self._pause_of(work)
        self._commit(live, emitted, drafted.drafted, batch)
        observation = Observation(
            view=view,
            plan=plan,
            drafted=drafted.drafted,
            proposed=drafted.proposed,
            accepted=drafted.accepted,
            emitted=emitted,
            timing=timing,
            accepted_nodes=drafted.accepted_nodes,
            confidence=drafted.confidence,
            shadow=shadow,
            faults=self._take_faults(),
            launched_ahead=getattr(self._times, "launched_ahead", False),
        )
        self._num_steps += 1
        self.measurements.add_step(observation, work, self.clock_seconds)
        self.planner.observe(observation)
        return observation

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the books of the block pool balance."""
        self._scheduler.check_integrity()

    def _take_arrivals(self) -> None:
        """Submit who has arrived, and at most one more than could be admitted now; the rest stays unread.

        Admission is first come, first served: behind a full batch it changes nothing who waits, only that
        somebody does, which planners are shown.
        """
        if not self._live and self._next is not None:
            self.clock_seconds = max(self.clock_seconds, self._next.arrival_seconds)
        most = self.settings.max_batch_size
        while (
            self._next is not None
            and self._next.arrival_seconds <= self.clock_seconds
            and self._scheduler.num_waiting <= most
            and (self._concurrency is None or len(self._live) < self._concurrency)
        ):
            self._submit(self._next)
            self._next = next(self._arrivals, None)

    def _submit(self, source: SimulatedRequest) -> None:
        if self._concurrency is not None:  # in a closed loop it comes now that there is room
            source = replace(source, arrival_seconds=self.clock_seconds)
        tokens = source.prompt_tokens
        scheduled = ScheduledRequest(source.id, tokens, tokens + source.most_output_tokens)
        if self.settings.prefix_sharing:
            scheduled.keys = _keys(source, self.settings.block_size)
        if self._offers and any(
            a.endswith(":scored") for a in self._drafters if a in source.acceptance
        ):
            scheduled.recompute_tail_tokens = 2 * self.settings.block_size
        try:
            self._scheduler.submit(scheduled)
        except RequestRefused as error:
            self.measurements.add_refusal(str(error))
            return
        self._live[source.id] = LiveRequest(source, scheduled, self._drafters)

    def _view(self, live: Sequence[LiveRequest], batch: ScheduledBatch) -> BatchView:
        return BatchView(
            step=self._num_steps,
            requests=tuple([self._view_of(request) for request in live]),
            free_kv_tokens=self._scheduler.free_draft_tokens(batch),
            prefill_tokens=batch.prefill_tokens if batch.prefilling else 0,
            others_wait=batch.others_wait,
        )

    def _view_of(self, live: LiveRequest) -> RequestView:
        context, remaining = live.scheduled.num_tokens, live.most - live.generated
        if not self._offers or remaining <= 1:
            return RequestView(live.id, context, live.generated, remaining, live.temperature)
        if context >= live.menu_tokens:
            live.update_menu(context)
        hints = self._caches.hints(live)
        return RequestView(
            live.id, context, live.generated, remaining, live.temperature, live.menu, hints
        )

    def _plan(self, view: BatchView) -> Plan:
        if not view.requests:
            return Plan.off(view)
        plan = self.planner.plan(view)
        if self._checks_plans:
            plan.check(view)
        return plan

    def _reserve(self, live: Sequence[LiveRequest], reserved: Sequence[int]) -> None:
        """Draft slots, as planned: blocks are asked for only where the last one is too small."""
        block_size = self._pool.block_size
        for request, tokens in zip(live, reserved, strict=True):
            if tokens:
                scheduled = request.scheduled
                held = len(scheduled.table.blocks) * block_size
                if scheduled.num_tokens + tokens > held:
                    self._scheduler.reserve(scheduled, tokens)

    def _emit(self, live: Sequence[LiveRequest], accepted: Sequence[int]) -> tuple[int, ...]:
        """Tokens that join each request: what was accepted and one more, up to its end."""
        return tuple(
            [
                more + 1 if more < (left := r.output_tokens - r.generated) else left
                for r, more in zip(live, accepted, strict=True)
            ]
        )

    def _commit(
        self,
        live: Sequence[LiveRequest],
        emitted: Sequence[int],
        drafted: Sequence[int],
        batch: ScheduledBatch,
    ) -> None:
        """Keep what was accepted; give back what was not."""
        self._caches.commit(live, emitted, drafted)
        commit = self._scheduler.commit
        for request, tokens in zip(live, emitted, strict=True):
            request.generated += tokens
            scheduled = request.scheduled
            length = scheduled.num_tokens + tokens
            if request.generated == tokens:
                request.first_token_seconds = self.clock_seconds
            if request.generated >= request.output_tokens:
                self._finish(request)
            else:
                commit(scheduled, length - 1, length)
        for row in batch.prefilling:
            self._commit_prefill(row)

    def _commit_prefill(self, row: Row) -> None:
        """A chunk is cached; the one that completes the prompt gives a token."""
        scheduled, request = row.request, self._live[row.request.id]
        cached = scheduled.cached_tokens + row.num_new_tokens
        length = scheduled.num_tokens + row.completes
        if row.completes:
            request.generated += 1
            self.measurements.add_token_of_prefill()
            if request.generated == 1:
                request.first_token_seconds = self.clock_seconds
            if request.generated >= request.output_tokens:
                self._finish(request)
                return
        self._scheduler.commit(scheduled, cached, length)

    def _finish(self, request: LiveRequest) -> None:
        self._scheduler.finish(request.scheduled)
        del self._live[request.id]
        self.measurements.add_request(request, self.clock_seconds)

    def _take_faults(self) -> tuple[str, ...]:
        take = getattr(self.planner, "take_faults", None)
        return () if take is None else tuple(take())


def _pool_of(settings: SimulationSettings) -> BlockPool:
    num_blocks = -(-settings.kv_tokens // settings.block_size) + 1
    return BlockPool(num_blocks, settings.block_size, prefix_sharing=settings.prefix_sharing)


def _keys(source: SimulatedRequest, block_size: int) -> list[bytes]:
    """One for every full block that the text will have; what nobody knows is like nothing else."""
    keys = block_keys(source.token_contents().tolist(), block_size, [])
    num_blocks = (source.prompt_tokens + source.output_tokens) // block_size
    unknown = (f"{source.id}/{index}" for index in range(len(keys), num_blocks))
    keys += [key.encode("utf-8", "surrogatepass") for key in unknown]  # JSON may escape half a pair
    return keys


def _drafters_of(
    workload: Workload, planner: Planner, settings: SimulationSettings
) -> tuple[str, ...]:
    """The arms on offer, budgets last as in the engine; refuses what nobody recorded."""
    arms = workload.arms if settings.drafters is None else settings.drafters
    named = getattr(getattr(planner, "policy", None), "drafter", None)
    asked = [*arms, named] if isinstance(named, str) else [*arms]
    if missing := [arm for arm in dict.fromkeys(asked) if arm not in workload.arms]:
        raise CounterfactualError(
            f"workload {workload.name!r} has no acceptance for {missing}, only for "
            f"{[*workload.arms]}; record the acceptance table with those drafters"
        )
    return tuple(sorted(arms, key=lambda arm: arm.startswith("sparse_kv")))
