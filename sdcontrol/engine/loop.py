"""The engine: continuous batching in which every request may draft differently at every step.

    view -> plan -> propose -> verify -> commit -> observe

The engine knows a `Planner`, not what is behind it. It never looks into a drafter, a verifier or
the block pool: each step is told in the nouns of its neighbours.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import structlog
from transformers import GenerationConfig, PreTrainedTokenizerBase

from sdcontrol.core import BatchView, Confidence, Observation, Plan, Planner, family_of
from sdcontrol.engine.batch import Batch, accepted_nodes
from sdcontrol.engine.clock import StepClock
from sdcontrol.engine.config import EngineConfig, num_cache_blocks
from sdcontrol.engine.drafters.base import Drafter
from sdcontrol.engine.drafters.build import DrafterSpec, build_drafters
from sdcontrol.engine.drafters.host import DraftHost, ModelDrafter
from sdcontrol.engine.drafting import Drafting, Drafts
from sdcontrol.engine.generation import Decoding, decoding_of, fresh_seed, prepare_config
from sdcontrol.engine.kernels.reference import TorchAttention
from sdcontrol.engine.request import FinishReason, Request, TokenEvent
from sdcontrol.engine.runner import ModelRunner, max_positions, unwrap
from sdcontrol.engine.sampling import Processor
from sdcontrol.engine.stats import EngineStats
from sdcontrol.engine.verify import RejectionVerifier, Verdict, Verifier, build_verifier
from sdcontrol.errors import ConfigError, EngineClosed, RequestRefused
from sdcontrol.scheduling.blocks import BlockPool
from sdcontrol.scheduling.scheduler import ScheduledBatch, Scheduler

__all__ = ["Engine"]

log = structlog.get_logger(__name__)


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
        self.planner = planner
        self.verifier = (
            build_verifier(verification) if isinstance(verification, str) else verification
        )
        self.runner = ModelRunner(self.model, TorchAttention())
        built = build_drafters(drafters, allow_trees=self.verifier.supports_trees)
        is_rejection = isinstance(self.verifier, RejectionVerifier)
        self._attach(built, "rejection" if is_rejection else "coupled")
        self.drafting = Drafting(
            built,
            vocab_size=self.runner.vocab_size,
            allow_trees=self.verifier.supports_trees,
            max_draft_tokens=self.config.max_draft_tokens,
        )
        self._position_limit = max_positions(self.model)
        self._live: dict[str, Request] = {}
        self._events: list[TokenEvent] = []
        self._arrivals: deque[Request] = deque()
        self._cancels: deque[Request] = deque()
        self._ended: list[Request] = []  # with the last step
        self._faults: list[str] = []  # of the current step
        self._lock = threading.Lock()
        self._num_submitted = 0
        self.stats = EngineStats()
        self._is_closed = False
        self._observe_seconds = 0.0
        self._free_kv_tokens = 0

    def _attach(self, drafters: Sequence[Drafter], verification: str) -> None:
        """Give drafters with a model their part of the blocks, and size the pool for all."""
        with_model = [drafter for drafter in drafters if isinstance(drafter, ModelDrafter)]
        host = DraftHost(self.runner, self.config, verification)
        for drafter in with_model:
            drafter.attach(host)
        num_blocks = num_cache_blocks(self.config, host.bytes_per_token, self.runner.device)
        self.pool = BlockPool(
            num_blocks, self.config.block_size, prefix_sharing=self.config.prefix_sharing
        )
        self.scheduler = Scheduler(
            self.pool,
            max_batch_size=self.config.max_batch_size,
            max_prefill_tokens=self.config.max_prefill_tokens,
        )
        host.allocate(self.pool)
        self._host = host

    # ---- requests

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
        tokens = self._tokenize(prompt)
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
        allowed = self._allowed_families(speculation)
        with self._lock:
            if request_id is None:
                request_id = f"request-{self._num_submitted}"
            request = Request(
                request_id,
                prompt,
                sampler=decoding.sampler,
                rules=decoding.rules,
                temperature=decoding.temperature,
                may_draft=allowed.__contains__,
            )
            self._check_fits(request)
            self._num_submitted += 1
            self._live[request_id] = request
            self._arrivals.append(request)
        return request_id

    def cancel(self, request_id: str) -> bool:
        """End a request with the next step; False where no such request is live."""
        with self._lock:
            request = self._live.get(request_id)
            if request is not None:
                self._cancels.append(request)
            return request is not None

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._live)

    def run(self) -> dict[str, Request]:
        """Step until nothing is left to do; the finished requests by id."""
        finished: dict[str, Request] = {}
        while self._live:
            self.step()
            finished.update({request.id: request for request in self._ended})
        return finished

    def take_events(self) -> list[TokenEvent]:
        """What was emitted since the last call, in order."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Free the cache; the model is as it was found. Requests still live are dropped."""
        self._is_closed = True
        self._live.clear()
        self._host.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- the loop

    def step(self) -> Observation:
        """Decode one step; an empty observation where there is nothing to do."""
        self._check_open()
        self._ended = []
        clock = StepClock()
        self._take_inbox()
        batch = Batch(self._next_batch(), self._live)
        view = self._view(batch)
        clock.lap("overhead")
        plan = self._plan(view)
        clock.lap("controller")
        drafts = self._propose(view, plan, batch)
        clock.lap("draft")
        verdicts = self._verify(batch)
        clock.lap("verify")
        emitted = self._commit(batch, verdicts)
        clock.lap("overhead")
        observation = Observation(
            view=view,
            plan=plan,
            drafted=drafts.drafted,
            proposed=tuple([len(piece.draft.tokens) for piece in batch.decoding]),
            accepted=tuple([len(v.accepted_nodes) for v in verdicts[: len(batch.decoding)]]),
            emitted=tuple(emitted[: len(batch.decoding)]),
            timing=clock.timing(drafts.seconds, self._observe_seconds),
            accepted_nodes=accepted_nodes(batch.decoding, verdicts),
            confidence=drafts.confidence,
            faults=self._take_faults(),
        )
        self._observe(observation)
        return observation

    def _take_inbox(self) -> None:
        with self._lock:
            arrivals, cancels = list(self._arrivals), list(self._cancels)
            self._arrivals.clear()
            self._cancels.clear()
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
            request = self._live[lost.id]
            request.lose_cache()
            self.drafting.lose_cache(request)
            self._host.forget(request.id)
            log.info("request_preempted", request=lost.id, tokens=lost.num_tokens)
        self._free_kv_tokens = self.scheduler.free_draft_tokens(scheduled)
        return scheduled

    def _view(self, batch: Batch) -> BatchView:
        offered = None if self.planner is None else self.drafting
        return batch.view(self.stats.steps, self._free_kv_tokens, offered)

    def _plan(self, view: BatchView) -> Plan:
        """The planner's answer, or no drafts where it fails: a bad plan costs one plain step."""
        if self.planner is None or not view.requests:
            return Plan.off(view)
        try:
            plan = self.planner.plan(view)
            plan.check(view)
        except Exception as error:
            self._planner_failed("plan", error)
            return Plan.off(view, "planner failed")
        return plan

    def _propose(self, view: BatchView, plan: Plan, batch: Batch) -> Drafts:
        if plan.is_off:
            return Drafts.none(len(batch.decoding))
        for piece, choice in zip(batch.decoding, plan.choices, strict=True):
            if choice.num_draft_tokens:
                self.scheduler.reserve(piece.request.scheduled, choice.num_draft_tokens)
        requests = [piece.request for piece in batch.decoding]
        drafts = self.drafting.propose(requests, view, plan, self._refine)
        batch.take(drafts.drafts, plan.choices)
        return drafts

    def _refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        assert self.planner is not None
        try:
            refined = self.planner.refine(view, plan, confidence)
            refined.check(view)
        except Exception as error:
            self._planner_failed("refine", error)
            return plan
        return refined

    def _planner_failed(self, verb: str, error: Exception) -> None:
        log.warning("planner_failed", verb=verb, step=self.stats.steps, error=repr(error))
        self._faults.append(f"planner failed to {verb}: {error!r}")

    def _take_faults(self) -> tuple[str, ...]:
        faults, self._faults = (*self._faults, *self.drafting.take_faults()), []
        return faults

    def _verify(self, batch: Batch) -> list[Verdict]:
        if not batch.pieces:
            return []
        segments = batch.segments(self.config.block_size)
        logits, first_rows = self.runner.forward(segments, self._host.query_sink(batch.pieces))
        tasks = batch.tasks(first_rows)
        return self.verifier.verify(logits, tasks) if tasks else []

    def _commit(self, batch: Batch, verdicts: Sequence[Verdict]) -> list[int]:
        """Keep what was accepted; give back what was not."""
        outcome = batch.accept(verdicts)
        self._host.move(outcome.moves)
        for piece, emitted in zip(batch.pieces, outcome.emitted, strict=True):
            request = piece.request
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
        return outcome.emitted

    def _end(self, request: Request, tokens: tuple[int, ...], reason: FinishReason) -> None:
        request.finish_reason = reason
        self._events.append(TokenEvent(request.id, tokens, reason))
        self.drafting.finish(request)
        self._host.forget(request.id)
        self._ended.append(request)
        with self._lock:
            del self._live[request.id]

    def _observe(self, observation: Observation) -> None:
        self.stats.add(observation)
        if self.planner is None:
            return
        started = time.perf_counter()
        try:
            self.planner.observe(observation)
        except Exception as error:
            self._planner_failed("observe", error)  # stands among the faults of the next step
        self._observe_seconds = time.perf_counter() - started

    # ---- checks

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine is closed; make another")

    def _check_fits(self, request: Request) -> None:
        most = request.scheduled.max_tokens
        if not request.tokens:
            raise RequestRefused(f"request {request.id!r}: empty prompt; give at least 1 token")
        if request.id in self._live:
            raise RequestRefused(f"request id {request.id!r} is taken; choose another")
        if most > self.pool.capacity_tokens:
            raise RequestRefused(
                f"request {request.id!r} may grow to {most} tokens, the KV cache holds "
                f"{self.pool.capacity_tokens}; shorten it or raise kv_tokens"
            )
        if self._position_limit is not None and most > self._position_limit:
            raise RequestRefused(
                f"request {request.id!r} may grow to {most} tokens; this model's rope scaling "
                f"can be batched only to {self._position_limit}"
            )
        bad = [token for token in request.tokens if not 0 <= token < self.runner.vocab_size]
        if bad:
            raise RequestRefused(
                f"request {request.id!r}: token {bad[0]} is outside [0, {self.runner.vocab_size})"
            )

    def _allowed_families(self, speculation: bool | Sequence[str]) -> frozenset[str]:
        if isinstance(speculation, bool):
            return frozenset(self.drafting.families if speculation else ())
        unknown = {family_of(name) for name in speculation} - set(self.drafting.families)
        if unknown:
            raise ConfigError(
                f"unknown drafters {sorted(unknown)}; this engine has {list(self.drafting.families)}"
            )
        return frozenset(family_of(name) for name in speculation)

    def _tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ConfigError("a text prompt needs a tokenizer; pass Engine(..., tokenizer=...)")
        return list(self.tokenizer(prompt)["input_ids"])

