"""CUDA graphs of decoding forwards: captured when a bucket is first met, replayed ever after.

Knows runners, buckets and a recorder; nothing of requests, drafts or policies. A forward that is
computed without a graph is counted with the reason, and a bucket that cannot be captured is said
aloud once, as is that there are too many: nothing is eager silently.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol.engine.attention import QuerySink
from sdcontrol.engine.buckets import Bucket, BucketLimits, Buckets
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.fusion import Fusion, fusion_of
from sdcontrol.engine.graph_recorder import CudaRecorder, GraphRecorder, recording_errors
from sdcontrol.engine.kernels.splits import MOST_PART_ROWS
from sdcontrol.engine.model_checks import max_positions
from sdcontrol.engine.packing import Segment
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.static_inputs import BucketAttention, Captured, StaticInputs
from sdcontrol.engine.stats import GraphStats
from sdcontrol.logs import EventLog

__all__ = [
    "GraphParts",
    "GraphedForwards",
    "attach_graphs",
    "forward_bytes",
    "graph_bytes",
    "largest_forward_bytes",
]

log = EventLog(__name__)

_MOST_SHAPES = 256  # of one runner: each takes a tenth of a second and some megabytes of the driver


@dataclass(frozen=True, slots=True)
class GraphParts:
    """What graphs are made of on one device."""

    recorder: GraphRecorder
    query_tile: Callable[[int], int]
    attention: Callable[[Bucket], BucketAttention]


class GraphedForwards:
    """The graphs of one runner. See `Graphs` in `runner`."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: BucketLimits,
        parts: GraphParts,
        stats: GraphStats,
        fusion: Fusion,
    ) -> None:
        self._runner = runner
        self._fusion = fusion
        self._limits = limits
        self._parts = parts
        self._stats = stats
        self._buckets = Buckets(limits, parts.query_tile)
        self._captured: dict[Bucket, Captured | None] = {}  # None: it cannot be
        self._logits: Tensor | None = None  # of whichever graph ran last

    @property
    def token_edges(self) -> tuple[int, ...]:
        """The numbers of tokens that forwards are padded to."""
        return self._buckets.token_edges

    def forward(
        self, segments: Sequence[Segment], queries: QuerySink | None, ids: Tensor | None = None
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
        if ids is not None:
            captured.inputs.batch.input_ids[0, : len(ids)].copy_(ids)
        return self.replay(captured, first_rows[-1] + segments[-1].num_logits), first_rows

    def captured(
        self, segments: Sequence[Segment], queries: QuerySink | None = None
    ) -> Captured | None:
        """See `runner.Graphs`; the queries go to their slots."""
        assert self._runner.cache is not None
        page = self._runner.cache.block_size
        bucket = self._buckets.bucket_of(segments, page, keeps_queries=queries is not None)
        if bucket not in self._captured and len(self._captured) < _MOST_SHAPES:
            self._captured[bucket] = self._capture(bucket, segments, queries)
            if len(self._captured) == _MOST_SHAPES:
                log.warning("graph_shapes_used_up", shapes=_MOST_SHAPES)
        captured = self._captured.get(bucket)
        if captured is None:
            self._count_eager("capture failed" if bucket in self._captured else "too many shapes")
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
        """The bucket's graph; None, with a warning, where it cannot be captured."""
        stats, recorder = self._stats, self._parts.recorder
        started, before = time.perf_counter(), recorder.reserved_bytes()
        stats.tried += 1
        try:
            captured = self._record(bucket, segments, queries)
        except recording_errors() as error:
            if self._fusion.compiles:
                log.warning("layers_not_compiled", bucket=str(bucket), reason=str(error))
                self._fusion.stop_compiling()
                return self._capture(bucket, segments, queries)
            log.warning("graph_capture_failed", bucket=str(bucket), reason=str(error))
            return None
        stats.captured += 1
        stats.reserved_bytes += recorder.reserved_bytes() - before
        stats.capture_seconds += time.perf_counter() - started
        log.info("graph_captured", bucket=str(bucket))
        return captured

    def _record(
        self, bucket: Bucket, segments: Sequence[Segment], queries: QuerySink | None
    ) -> Captured:
        """Record the bucket, on these segments: doing them twice writes the same twice."""
        runner, attention = self._runner, self._parts.attention(bucket)
        inputs = StaticInputs(bucket, attention, runner.device)
        inputs.load(segments, queries)
        sink = None if queries is None else queries.at(inputs.query_slots)

        def work() -> None:
            logits = runner.compute(inputs.batch, attention, sink)
            self._logits_like(logits)[: len(logits)].copy_(logits)

        with runner.alone(), self._fusion.applied():
            return Captured(inputs, self._parts.recorder.capture(work))

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
    runner.graphs = GraphedForwards(runner, limits, parts, stats, fusion_of(runner, config))


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
    """What a graph of so many tokens computes, and logits once more where all graphs leave them."""
    logits = tokens * runner.vocab_size * runner.model.dtype.itemsize
    return forward_bytes(runner, tokens, tokens) + logits


def forward_bytes(runner: ModelRunner, tokens: int, rows: int) -> int:
    """So many rows of logits, and what a layer has at once for so many tokens: taken as four rows of
    its own and of its MLP's width, and what attention writes of contexts that are split.
    """
    config = runner.model.config.get_text_config()
    hidden: int = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden  # a list: by layer
    widest = inner if isinstance(inner, int) else max(inner)
    elements = rows * runner.vocab_size + tokens * 4 * (hidden + widest)
    outputs = max(layer.num_heads * (layer.value_dim + 1) for layer in runner.layers)
    of_parts = MOST_PART_ROWS * outputs * torch.float32.itemsize
    return elements * runner.model.dtype.itemsize + of_parts


def parts_of(runner: ModelRunner, config: EngineConfig) -> GraphParts | None:
    """What this runner's graphs would be made of; None where it has no use for any."""
    if not _are_wanted(runner.device, config):
        return None
    if not runner.has_kernels:
        _leave_out(runner, f"{type(runner.backend).__name__} reads lengths on the host")
        return None
    from sdcontrol.engine.kernels.bucket_attention import TritonBucketAttention, query_tile

    layers, device = tuple(dict.fromkeys(runner.layers)), runner.device
    tokens = config.most_decoding_tokens
    room = forward_bytes(runner, tokens, tokens)
    return GraphParts(
        CudaRecorder(device, room),
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
    groups = _groups_on_device(model)
    for module in model.modules():
        name = type(module).__name__
        if "Experts" not in name and not isinstance(
            getattr(module, "experts", None), torch.nn.ModuleList
        ):
            continue
        how = getattr(getattr(module, "config", None), "_experts_implementation", "eager")
        if how not in {None, "eager", "grouped_mm"} or (how == "grouped_mm" and groups):
            continue
        remedy = "grouped_mm" if groups else "batched_mm"
        return (
            f"{name} picks its experts on the host, as experts_implementation={how or 'eager'!r} "
            f"does with {model.dtype} here; load the model with experts_implementation={remedy!r}"
        )
    return None


def _groups_on_device(model: PreTrainedModel) -> bool:
    """Whether products grouped by expert ask nothing of the host: ATen's `_grouped_mm` does,
    unless they are of bfloat16 on compute capability 9 or 10.
    """
    if model.device.type != "cuda":
        return True
    major, _ = torch.cuda.get_device_capability(model.device)
    return model.dtype == torch.bfloat16 and major in {9, 10}
