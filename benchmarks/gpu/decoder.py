"""One engine that arms decode with in turn, from contexts that nobody computed.

An arm is a controller and what it has learned, as in `benchmarks.regret`. A turn submits every
request, decodes until all are admitted and warm, times a fixed number of steps, and cancels. What
the engine does on its own (graphs, overlap, kernels) is as its settings have it.
"""

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import torch
from transformers import LlamaForCausalLM, LogitsProcessorList

from benchmarks.regret.contexts import lay_out
from benchmarks.regret.grid import PhaseSpec
from benchmarks.regret.pairs import Prompt, TirelessNgram, prompts_of
from benchmarks.regret.rig import Arm
from benchmarks.regret.shadows import SyntheticEngine
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.base import Drafter
from sdcontrol.engine.generation import Decoding
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request, StopRules
from sdcontrol.engine.sampling import RowSampler
from sdcontrol.engine.stats import EngineStats
from sdcontrol.engine.verify import Verifier
from sdcontrol.errors import DrafterFault
from sdcontrol.scheduling.blocks import block_keys

__all__ = ["Decoder", "DecoderSpec", "Turn", "check_drafters", "kv_tokens_for"]

_KV_SPREAD = 0.05
_AMISS = ("capture failed", "too many shapes")  # reasons of forwards that should have had a graph
_PREFILL_TOKENS = 8192  # what scored pages compute again fits in a few steps


def kv_tokens_for(batch_size: int, context_tokens: int, room: int) -> int:
    """KV tokens that a turn may need: contexts, `room` to grow on each, and blocks half used."""
    return batch_size * (context_tokens + room + 32) + 64


def check_drafters(engine: Engine) -> None:
    """Raises `DrafterFault` where one was quarantined: texts stay right, but it is not measured."""
    if quarantined := engine.drafting.quarantined:
        reasons = (f"drafter {family} quarantined: {why}" for family, why in quarantined.items())
        raise DrafterFault("; ".join(reasons))


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What an engine is made of. `verifier` counts as the same if it is the same object.

    With an n-gram drafter it is synthetic and shares luck: see `SyntheticEngine`.
    """

    drafters: tuple[str, ...]  # "draft_model" stands for the draft model
    verifier: Verifier
    kv_tokens: int
    max_batch_size: int
    room: int  # tokens that a request may grow by in a turn
    extra: tuple[Drafter, ...] = ()
    compiles: bool = True  # layers of captured forwards
    has_queue: bool = False  # one more request waits for a place, as on a server with work to do


@dataclass(frozen=True, slots=True)
class Turn:
    """What one arm did in one turn.

    A graph is captured once in an engine's life, whenever its bucket is first met. A turn is short,
    so that time is taken out of it, and written down.
    """

    tokens: int  # emitted while time was taken
    seconds: float  # without what captures took
    capture_seconds: float
    step_seconds: tuple[float, ...]
    stats: EngineStats  # of the timed steps
    controller_seconds: tuple[float, ...]
    host_seconds: tuple[float, ...]  # what the engine counts as overhead

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(slots=True)
class _Timed:
    """The steps of a turn while they are taken."""

    stats: EngineStats = field(default_factory=EngineStats)
    ends: list[float] = field(default_factory=list)
    controller: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class Decoder:
    """An engine with contexts in its cache."""

    def __init__(
        self, spec: DecoderSpec, target: LlamaForCausalLM, draft: LlamaForCausalLM | None
    ) -> None:
        self.spec = spec
        named: dict[str, object] = {name: _drafter(name, draft) for name in spec.drafters}
        named |= {drafter.name: drafter for drafter in spec.extra}
        engine = SyntheticEngine if "ngram" in spec.drafters else Engine
        self.engine = engine(
            target,
            drafters=named,  # type: ignore[arg-type]  # a dict is invariant
            verification=spec.verifier,
            config=EngineConfig(
                kv_tokens=spec.kv_tokens,
                max_batch_size=spec.max_batch_size,
                max_prefill_tokens=_PREFILL_TOKENS,
                compile_layers=spec.compiles and target.device.type == "cuda",
            ),
        )
        self.graphs = self.engine.stats.graphs  # of all arms: captured once, replayed by everybody
        self._eager_before: dict[str, int] = {}
        self._prompts: list[Prompt] = []
        self._laid_out: tuple[int, int] | None = None
        self._fill_drafters()
        gc.collect()
        gc.freeze()  # models and libraries: else each collection looks through them

    def prepare(self, batch_size: int, context_tokens: int) -> None:
        """Contexts of that many requests, in every model's cache: a cell begins."""
        self._eager_before = dict(self.graphs.eager)
        if self._laid_out == (batch_size, context_tokens):
            return
        phase = PhaseSpec(f"{batch_size}x{context_tokens}", batch_size, context_tokens, "copy")
        self._prompts = prompts_of(phase, is_synthetic=True, seed=0)
        lay_out(self.engine, self._prompts, room=self.spec.room, computed=False)
        if "draft_model" in self.spec.drafters:
            self._mark("draft_model")
        self._laid_out = (batch_size, context_tokens)

    def turn(
        self,
        arm: Arm,
        *,
        steps: int,
        warm_steps: int = 2,
        seeds: Sequence[int] = (),
        speculation: "bool | tuple[str, ...]" = True,
    ) -> Turn:
        """Decode with an arm; admission is not timed. Without `seeds` request `r` has the seed r.

        Raises `DrafterFault` where a drafter failed, now or before.
        """
        self._put_in(arm)
        live = self._submit(seeds or range(len(self._prompts)), speculation)
        waiting = self._queue() if self.spec.has_queue else ()
        self._admit(live, warm_steps)
        gc.collect()
        timed, before, captures = _Timed(), _num_emitted(live), self.graphs.capture_seconds
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            self._step(timed)
        self._wait()
        seconds = time.perf_counter() - started
        tokens = _num_emitted(live) - before
        captures = self.graphs.capture_seconds - captures
        self._cancel((*waiting, *live))
        check_drafters(self.engine)
        return Turn(
            tokens,
            seconds - captures,
            captures,
            tuple(end - begin for begin, end in pairwise([started, *timed.ends])),
            timed.stats,
            tuple(timed.controller),
            tuple(timed.host),
        )

    def graph_facts(self) -> dict[str, object]:
        """Of the engine so far, and by reason the forwards without a graph since `prepare`."""
        return {**asdict(self.graphs), "eager_in_cell": self._eager_in_cell()}

    def check_graphs(self) -> None:
        """Raises `RuntimeError` where a forward since `prepare` should have had a graph."""
        amiss = {why: n for why, n in self._eager_in_cell().items() if why in _AMISS}
        if amiss:
            raise RuntimeError(f"{self.graphs.captured} graphs, forwards without: {amiss}")

    def close(self) -> None:
        """Free the memory."""
        gc.unfreeze()
        self.engine.close()

    def _eager_in_cell(self) -> dict[str, int]:
        counts = {why: n - self._eager_before.get(why, 0) for why, n in self.graphs.eager.items()}
        return {why: count for why, count in counts.items() if count}

    def _step(self, timed: _Timed) -> None:
        observation = self.engine.step()
        timed.ends.append(time.perf_counter())
        timed.stats.add(observation)
        timed.controller.append(observation.timing.controller_seconds)
        timed.host.append(observation.timing.overhead_seconds)

    def _put_in(self, arm: Arm) -> None:
        """As if the engine had been made with this planner: off tells its drafters nothing."""
        engine = self.engine
        engine._decode_by(arm.controller)
        engine._tally = arm.tally
        arm.stats.graphs = self.graphs

    def _submit(
        self, seeds: Sequence[int], speculation: "bool | tuple[str, ...]"
    ) -> Mapping[str, Request]:
        content = self.engine.model_content()  # once: of an 8B model it takes a millisecond or more
        for prompt, seed in zip(self._prompts, seeds, strict=True):
            sampler = RowSampler(processors=LogitsProcessorList(), seed=seed)
            decoding = Decoding(sampler, StopRules(max_new_tokens=self.spec.room), 0.0)
            self.engine.enqueue(prompt.tokens, decoding, speculation=speculation, content=content)
        return dict(self.engine.requests)

    def _admit(self, live: Mapping[str, Request], warm_steps: int) -> None:
        """Step until everybody has begun, and then a little; the cache keeps the contexts only."""
        waiting = list(live.values())
        while waiting:
            self.engine.step()
            for request in live.values():
                request.scheduled.shareable = not request.scheduled.table.blocks
            waiting = [request for request in waiting if not request.generated_tokens]
        for _ in range(warm_steps):
            self.engine.step()

    def _queue(self) -> tuple[str, ...]:
        """One request more than there are places."""
        sampler = RowSampler(processors=LogitsProcessorList(), seed=0)
        decoding = Decoding(sampler, StopRules(max_new_tokens=self.spec.room), 0.0)
        return (self.engine.enqueue(self._prompts[0].tokens, decoding, speculation=True),)

    def _cancel(self, names: Iterable[str]) -> None:
        for name in names:
            self.engine.cancel(name)
        while self.engine.has_work:
            self.engine.step()
        self.engine.take_events()

    def _mark(self, name: str) -> None:
        """The drafter's cache counts as filled where the contexts lie."""
        pool, page = self.engine.pool, self.engine.config.block_size
        content = self.engine.model_content()
        for prompt in self._prompts:
            keys = block_keys(prompt.tokens, page, [], root=content)
            for block in pool.match_prefix(keys, len(prompt.tokens)):
                pool.mark(block, name)

    def _fill_drafters(self) -> None:
        """Memory that was never written is not really there, and too fast to read."""
        generator = torch.Generator(self.engine.runner.device).manual_seed(1)
        for runner in self.engine._host.runners.values():
            if runner.cache is not None:
                for tensor in (*runner.cache.keys, *runner.cache.values):
                    tensor.normal_(std=_KV_SPREAD, generator=generator)

    def _wait(self) -> None:
        device = self.engine.runner.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _drafter(name: str, draft: LlamaForCausalLM | None) -> object:
    if name == "draft_model":
        assert draft is not None
        return draft
    return TirelessNgram(max_branches=1) if name == "ngram" else name


def _num_emitted(live: Mapping[str, Request]) -> int:
    return sum(request.generated_tokens for request in live.values())
