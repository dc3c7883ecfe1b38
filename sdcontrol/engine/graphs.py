"""CUDA graphs of decoding forwards: captured when a bucket is first met, replayed ever after.

Knows runners, buckets and a recorder; nothing of requests, drafts or policies. A forward that is
computed without a graph is counted with the reason, and a bucket that cannot be captured is said
aloud once: nothing is eager silently.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol.engine.attention import QuerySink
from sdcontrol.engine.buckets import Bucket, BucketLimits, Buckets
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.packing import Segment
from sdcontrol.engine.runner import ModelRunner, max_positions
from sdcontrol.engine.static_inputs import BucketAttention, Captured, StaticInputs
from sdcontrol.engine.stats import GraphStats
from sdcontrol.logs import EventLog

__all__ = [
    "CudaRecorder",
    "GraphParts",
    "GraphRecorder",
    "GraphedForwards",
    "attach_graphs",
    "graph_bytes",
    "largest_forward_bytes",
]

log = EventLog(__name__)

_WARM_UPS = 2  # compile what is compiled on first use, and let libraries take their workspaces


class GraphRecorder(Protocol):
    """Turns work for the device into something that can be repeated by one call."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` asks of the device; calling the result does it once more.

        `work` may be run several times. Raises `RuntimeError` where it cannot be recorded.
        """
        ...

    def reserved_bytes(self) -> int:
        """Device memory taken so far, by everybody."""
        ...


class CudaRecorder:
    """torch's CUDA graphs; all of one recorder share their memory, so they never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `GraphRecorder`."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, hence "thread_local".
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        return graph.replay

    def reserved_bytes(self) -> int:
        """What torch's allocator holds."""
        return torch.cuda.memory_reserved(self._device)


@dataclass(frozen=True, slots=True)
class GraphParts:
    """What graphs are made of on one device."""

    recorder: GraphRecorder
    query_tile: Callable[[int], int]
    attention: Callable[[Bucket], BucketAttention]


class GraphedForwards:
    """The graphs of one runner. See `Graphs` in `runner`."""

    def __init__(
        self, runner: ModelRunner, limits: BucketLimits, parts: GraphParts, stats: GraphStats
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._parts = parts
        self._stats = stats
        self._buckets = Buckets(limits, parts.query_tile)
        self._captured: dict[Bucket, Captured] = {}
        self._refused: set[Bucket] = set()
        self._logits: Tensor | None = None  # of whichever graph ran last

    @property
    def token_edges(self) -> tuple[int, ...]:
        """The numbers of tokens that forwards are padded to."""
        return self._buckets.token_edges

    def forward(
        self, segments: Sequence[Segment], queries: QuerySink | None
    ) -> tuple[Tensor, list[int]] | None:
        """Logits `[kept, vocab]` and each segment's first row; None where no graph will do."""
        refusal = self._buckets.refusal(segments)
        if refusal is not None:
            self._count_eager(refusal)
            return None
        captured = self.captured(segments, queries)
        if captured is None:
            return None
        first_rows = captured.inputs.load(segments, queries)
        return self.replay(captured, first_rows[-1] + segments[-1].num_logits), first_rows

    def captured(
        self, segments: Sequence[Segment], queries: QuerySink | None = None
    ) -> Captured | None:
        """See `runner.Graphs`; the queries go to their slots."""
        assert self._runner.cache is not None
        page = self._runner.cache.block_size
        bucket = self._buckets.bucket_of(segments, page, keeps_queries=queries is not None)
        captured = self._captured.get(bucket)
        if captured is None and bucket not in self._refused:
            captured = self._capture(bucket, segments, queries)
        if captured is None:
            self._count_eager("capture failed")
        return captured

    def replay(self, captured: Captured, num_rows: int) -> Tensor:
        """See `runner.Graphs`."""
        captured.replay()
        self._stats.replayed += 1
        assert self._logits is not None
        return self._logits[:num_rows]

    def _count_eager(self, reason: str) -> None:
        self._stats.eager[reason] = self._stats.eager.get(reason, 0) + 1

    def _capture(
        self, bucket: Bucket, segments: Sequence[Segment], queries: QuerySink | None
    ) -> Captured | None:
        """Record the bucket, on these segments: doing them twice writes the same twice."""
        runner, recorder = self._runner, self._parts.recorder
        attention = self._parts.attention(bucket)
        inputs = StaticInputs(bucket, attention, runner.device)
        inputs.load(segments, queries)
        sink = None if queries is None else queries.at(inputs.query_slots)

        def work() -> None:
            logits = runner.compute(inputs.batch, attention, sink)
            self._logits_like(logits)[: len(logits)].copy_(logits)

        started, before = time.perf_counter(), recorder.reserved_bytes()
        try:
            replay = recorder.capture(work)
        except RuntimeError as error:
            self._refused.add(bucket)
            log.warning("graph_capture_failed", bucket=str(bucket), reason=str(error))
            return None
        self._captured[bucket] = Captured(inputs, replay)
        self._stats.captured += 1
        self._stats.capture_seconds += time.perf_counter() - started
        self._stats.reserved_bytes += recorder.reserved_bytes() - before
        log.info("graph_captured", bucket=str(bucket))
        return self._captured[bucket]

    def _logits_like(self, logits: Tensor) -> Tensor:
        """Where every graph leaves its logits: made in the first warm-up, for the largest bucket.

        One place for all, or each graph would keep its own rows of the vocabulary for good.
        """
        if self._logits is None:
            most = self._limits.requests * self._limits.query_tokens
            self._logits = logits.new_empty((most, logits.shape[1]))
        return self._logits


def attach_graphs(runner: ModelRunner, config: EngineConfig, stats: GraphStats) -> None:
    """Let a runner with a cache use graphs, where it can; a warning names why one cannot."""
    parts = parts_of(runner, config)
    if parts is None:
        return
    reason = uncapturable(runner.model)
    if reason is not None:
        _leave_out(runner, reason)
        return
    assert runner.cache is not None
    limits = BucketLimits(
        requests=config.max_batch_size,
        query_tokens=1 + config.max_draft_tokens,
        pages=runner.cache.num_blocks,
    )
    runner.graphs = GraphedForwards(runner, limits, parts, stats)


def graph_bytes(runner: ModelRunner, config: EngineConfig) -> int:
    """Device memory to leave for the graphs of a runner, about; 0 where it has none.

    They share it, so that the largest bucket counts. What the driver keeps of each graph, and of
    layers compiled by `torch.compile`, nobody knows beforehand.
    """
    if not (_are_wanted(runner.device, config) and runner.has_kernels):
        return 0
    if uncapturable(runner.model) is not None:
        return 0
    return largest_forward_bytes(runner, config.most_decoding_tokens)


def largest_forward_bytes(runner: ModelRunner, tokens: int) -> int:
    """What a graph of so many tokens computes: logits, here and where all graphs leave them, and
    what a layer has at once, taken as four rows of its own and of its MLP's width.
    """
    config = runner.model.config.get_text_config()
    hidden: int = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden  # a list: by layer
    widest = inner if isinstance(inner, int) else max(inner)
    row = 2 * runner.vocab_size + 4 * (hidden + widest)
    return tokens * row * runner.model.dtype.itemsize


def parts_of(runner: ModelRunner, config: EngineConfig) -> GraphParts | None:
    """What this runner's graphs would be made of; None where it has no use for any."""
    if not _are_wanted(runner.device, config):
        return None
    if not runner.has_kernels:
        _leave_out(runner, f"{type(runner.backend).__name__} reads lengths on the host")
        return None
    from sdcontrol.engine.kernels.bucket_attention import TritonBucketAttention, query_tile

    layers, device = tuple(dict.fromkeys(runner.layers)), runner.device
    return GraphParts(
        CudaRecorder(device),
        cache(lambda longest: query_tile(layers, longest, device)),
        lambda bucket: TritonBucketAttention(
            bucket, layers, block_size=config.block_size, device=device
        ),
    )


def _are_wanted(device: torch.device, config: EngineConfig) -> bool:
    is_asked = config.cuda_graphs and config.attention_backend != "torch"
    return device.type == "cuda" and is_asked


def _leave_out(runner: ModelRunner, reason: str) -> None:
    log.warning("cuda_graphs_left_out", model=type(runner.model).__name__, reason=reason)


def uncapturable(model: PreTrainedModel) -> str | None:
    """Why forwards of `model` wait for the device inside, which a graph cannot; None if not so."""
    if max_positions(model) is not None:
        return "its rotary embedding grows with the longest position, which it reads on the host"
    for module in model.modules():
        name = type(module).__name__
        if "Experts" not in name and not isinstance(
            getattr(module, "experts", None), torch.nn.ModuleList
        ):
            continue
        how = getattr(getattr(module, "config", None), "_experts_implementation", "eager")
        if how in {None, "eager"}:
            return (
                f"{name} picks its experts on the host; load the model with "
                "experts_implementation='grouped_mm'"
            )
    return None
