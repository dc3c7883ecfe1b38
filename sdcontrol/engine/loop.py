"""The engine: continuous batching in which every request may draft differently at every step.

    view -> plan -> propose -> verify -> commit -> observe

The engine knows a `Planner`, not what is behind it. It never looks into a drafter, a verifier or
the block pool: each step is told in the nouns of its neighbours.
"""

from collections.abc import Mapping, Sequence
from typing import Self

from transformers import GenerationConfig, PreTrainedTokenizerBase

from sdcontrol.core import BatchView, Observation, Plan, Planner
from sdcontrol.engine.backends import device_scope
from sdcontrol.engine.batch import Batch
from sdcontrol.engine.clock import StepClock, marks_of
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.device_step import verify_of
from sdcontrol.engine.drafters.build import DrafterSpec, build_drafters
from sdcontrol.engine.drafters.host import DraftHost
from sdcontrol.engine.drafting import Drafting, Drafts
from sdcontrol.engine.events import Events
from sdcontrol.engine.generation import Decoding, decoding_of, fresh_seed, prepare_config, tokens_of
from sdcontrol.engine.guard import PlannerGuard
from sdcontrol.engine.intake import Intake
from sdcontrol.engine.request import FinishReason, Request, TokenEvent
from sdcontrol.engine.runner import ModelRunner, max_positions, unwrap
from sdcontrol.engine.sampling import Processor
from sdcontrol.engine.stats import EngineStats
from sdcontrol.engine.verify import RejectionVerifier, Verdict, Verifier, verifier_of
from sdcontrol.errors import EngineClosed
from sdcontrol.logs import EventLog
from sdcontrol.scheduling.scheduler import ScheduledBatch

__all__ = ["Engine"]

log = EventLog(__name__)


class Engine:
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
        self.config = config or EngineConfig()
        self.model = unwrap(model)
        self.tokenizer = tokenizer
        self.planner = PlannerGuard(planner)
        self.verifier = verifier_of(verification)
        self.runner = ModelRunner(self.model, self.config.attention_backend)
        self._verify_rows = verify_of(self.verifier, has_kernels=self.runner.has_kernels)
        trees = self.verifier.supports_trees
        built = build_drafters(drafters, allow_trees=trees)
        is_rejection = isinstance(self.verifier, RejectionVerifier)
        self._host = DraftHost(self.runner, self.config, "rejection" if is_rejection else "coupled")
        self.pool = self._host.allocate(built)
        self.scheduler = self.config.scheduler(self.pool)
        self.drafting = Drafting(
            built,
            vocab_size=self.runner.vocab_size,
            allow_trees=trees,
            max_draft_tokens=self.config.max_draft_tokens,
            is_idle=self.planner.never_drafts,
        )
        self._intake = Intake(
            capacity_tokens=self.pool.capacity_tokens,
            position_limit=max_positions(self.model),
            vocab_size=self.runner.vocab_size,
        )
        self.stats = EngineStats(graphs=self._host.graph_stats)
        self._events = Events(planner)
        self._ended: list[Request] = []  # with the last step
        self._is_closed = False
        self._free_kv_tokens = 0

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        seed: int | None = None,
        speculation: bool | Sequence[str] = True,
        generation_config: GenerationConfig | None = None,
        processors: Sequence[Processor] = (),
        stop_strings: Sequence[str] = (),
        **options: object,
    ) -> str:
        """Queue a prompt; returns the request's id. `options` are those of `generate`.

        `speculation` False opts out; a list of families allows only those. Without a seed, a
        sampled request takes one from torch's generator. Raises `RequestRefused` where the request
        could never run, `ConfigError` and `UnsupportedGeneration` for settings.
        """
        tokens = tokens_of(prompt, self.tokenizer)
        config = prepare_config(self.model, generation_config, len(tokens), options)
        decoding = decoding_of(
            self.model,
            config,
            tokens,
            seed=fresh_seed() if seed is None else seed,
            processors=processors,
            stop_strings=stop_strings,
            tokenizer=self.tokenizer,
        )
        return self.enqueue(tokens, decoding, request_id=request_id, speculation=speculation)

    def enqueue(
        self,
        prompt: Sequence[int],
        decoding: Decoding,
        *,
        request_id: str | None = None,
        speculation: bool | Sequence[str] = True,
    ) -> str:
        """Queue token ids whose sampler and stop rules are made already. See `submit`."""
        self._check_open()
        allowed = self.drafting.allowed(speculation)

        def make(name: str) -> Request:
            return Request(
                name,
                prompt,
                sampler=decoding.sampler,
                rules=decoding.rules,
                temperature=decoding.temperature,
                may_draft=allowed.__contains__,
            )

        return self._intake.add(make, request_id, self._events.arrived)

    def cancel(self, request_id: str) -> bool:
        """End a request with the next step; False where no such request is live."""
        return self._intake.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._intake.live)

    @property
    def token_edges(self) -> tuple[int, ...]:
        """The numbers of tokens that decoding forwards are padded to; none without CUDA graphs."""
        return self.runner.graphs.token_edges if self.runner.graphs is not None else ()

    @property
    def requests(self) -> Mapping[str, Request]:
        """The live requests, by id."""
        return self._intake.live

    def run(self) -> dict[str, Request]:
        """Step until nothing is left to do; the finished requests by id."""
        finished: dict[str, Request] = {}
        while self._intake.live:
            self.step()
            finished.update({request.id: request for request in self._ended})
        return finished

    def take_events(self) -> list[TokenEvent]:
        """What was emitted since the last call, in order."""
        return self._events.take()

    def close(self) -> None:
        """Free the cache; the model is as it was found. Requests still live are dropped."""
        self._is_closed = True
        self._intake.live.clear()
        self._host.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self) -> Observation:
        """Decode one step; an empty observation where there is nothing to do."""
        self._check_open()
        with device_scope(self.runner.device):
            return self._step()

    def _step(self) -> Observation:
        self._ended = []
        clock = StepClock(marks_of(self.runner.device))
        self._take_inbox()
        batch = Batch(self._next_batch(), self._intake.live)
        offered = None if self.planner.never_drafts else self.drafting
        view = batch.view(self.stats.steps, self._free_kv_tokens, offered)
        clock.lap("overhead")
        plan = self.planner.plan(view)
        clock.lap("controller")
        drafts = self._propose(view, plan, batch)
        clock.lap("draft")
        verdicts = self._verify(batch)
        clock.lap("verify")
        shadow = self._shadow(batch, plan, verdicts) if self.planner.learns else {}
        self._commit(batch, verdicts)
        clock.lap("overhead")
        observation = batch.observation(
            view,
            plan,
            drafts,
            verdicts,
            timing=clock.timing(drafts.seconds, self.planner.observe_seconds),
            shadow=shadow,
            faults=(*self.planner.take_faults(), *self.drafting.take_faults()),
        )
        self.stats.add(observation)
        self.planner.observe(observation)
        return observation

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
        drafts = self.drafting.propose(batch.requests, view, plan, self.planner.refine)
        batch.take(drafts.drafts, plan.choices)
        return drafts

    def _verify(self, batch: Batch) -> list[Verdict]:
        if not batch.pieces:
            return []
        segments = batch.segments(self.config.block_size)
        logits, first_rows = self.runner.forward(segments, self._host.query_sink(batch.pieces))
        tasks = batch.tasks(first_rows)
        return self._verify_rows(logits, tasks) if tasks else []

    def _shadow(
        self, batch: Batch, plan: Plan, verdicts: Sequence[Verdict]
    ) -> dict[str, tuple[int | None, ...]]:
        return self.drafting.shadow(batch.requests, plan, batch.outputs(verdicts))

    def _commit(self, batch: Batch, verdicts: Sequence[Verdict]) -> None:
        """Keep what was accepted; give back what was not."""
        self._host.move(batch.accept(verdicts))
        for piece in batch.pieces:
            request, emitted = piece.request, piece.emitted
            new_tokens = tuple(request.tokens[len(request.tokens) - emitted :]) if emitted else ()
            if request.finish_reason is not None:
                self.scheduler.finish(request.scheduled)
                self._end(request, new_tokens, request.finish_reason)
                continue
            request.update_keys(self.config.block_size)
            self.scheduler.commit(request.scheduled, request.cached_after, len(request.tokens))
            if emitted:
                self.drafting.commit(request, emitted)
                self._events.append(TokenEvent(request.id, new_tokens))

    def _end(self, request: Request, tokens: tuple[int, ...], reason: FinishReason) -> None:
        request.finish_reason = reason
        self._events.append(TokenEvent(request.id, tokens, reason))
        self.drafting.finish(request)
        self._host.forget(request.id)
        self._ended.append(request)
        self._intake.remove(request)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine is closed; make another")
