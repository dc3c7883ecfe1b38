"""Run the user's own transformers model over packed segments and a paged cache.

Knows models and caches; nothing of requests, drafts, policies or sampling.
"""

import inspect
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol.engine.attention import (
    AttentionBackend,
    ForwardCall,
    ProbedLayer,
    QuerySink,
    attention_configs,
    make_opaque_to,
    probing,
    with_paged_attention,
)
from sdcontrol.engine.backends import BackendName, TritonKVCache, backend_of, cache_class_of
from sdcontrol.engine.copies import upload
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.model_checks import check_layers, check_model, max_positions
from sdcontrol.engine.packing import PackedBatch, Segment, pack
from sdcontrol.engine.padding import compiles_by_size, pad
from sdcontrol.engine.static_inputs import Captured
from sdcontrol.errors import UnsupportedModel

__all__ = ["Graphs", "ModelRunner", "unwrap"]

_PART_SCORES = 100_000  # of attention on a CPU, that take as long as another part of a group
_COMPILED_PART_SCORES = 300_000  # the same where each shape of a part is compiled

_LOCKS: "WeakKeyDictionary[torch.nn.Module, threading.RLock]" = WeakKeyDictionary()
_PROBE_ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    LookupError,
    AssertionError,
)  # that models raise where they miss a mask or a cache


def unwrap(model: object) -> PreTrainedModel:
    """The transformers model inside `model`, which may be wrapped by PEFT.

    Raises `UnsupportedModel` for prompt-learning adapters, models spread over devices, encoder-
    decoder models, and anything that is no transformers model.
    """
    if hasattr(model, "get_base_model") and hasattr(model, "active_peft_config"):
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            raise UnsupportedModel(
                f"PEFT {model.active_peft_config.peft_type}: prompt learning adds virtual tokens "
                "outside the model; merge it or use a LoRA-like adapter"
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"{type(model).__name__} is no transformers PreTrainedModel; pass the model object "
            "that you call generate on"
        )
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise UnsupportedModel(
            f"device_map spreads the model over {sorted(devices)}; load it on one device"
        )
    return model


class Graphs(Protocol):
    """Forwards that were captured before."""

    @property
    def token_edges(self) -> tuple[int, ...]:
        """The numbers of tokens that forwards are padded to, ascending."""
        ...

    def forward(
        self, segments: Sequence[Segment], queries: QuerySink | None, ids: Tensor | None = None
    ) -> tuple[Tensor, list[int]] | None:
        """See `ModelRunner.forward`; None where this one is to be computed without a graph."""
        ...

    def captured(self, segments: Sequence[Segment]) -> Captured | None:
        """The graph for these segments, which are no prefill; None where it cannot be captured.

        A new one is captured on them, which writes their keys and values.
        """
        ...

    def replay(self, captured: Captured, num_rows: int) -> Tensor:
        """Logits `[num_rows, vocab]` of what stands in the graph's inputs."""
        ...


class ModelRunner:
    """One model, one cache, one forward at a time.

    `backend` is the name of one, or the backend itself: see `backend_of`.
    """

    def __init__(
        self, model: PreTrainedModel, backend: AttentionBackend | BackendName = "auto"
    ) -> None:
        self.model = model
        self._device = model.device  # which transformers looks for anew each time
        self._configs = attention_configs(model)
        self._lock = _LOCKS.setdefault(model, threading.RLock())
        check_model(model)
        make_opaque_to(model)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        self._compiles_by_size = compiles_by_size(model)
        probed, self.vocab_size = self.probe()
        self.attention = tuple(layer.module for layer in probed)
        self._layer_of = {id(module): index for index, module in enumerate(self.attention)}
        self.layers: tuple[LayerShape, ...] = tuple(layer.shape for layer in probed)
        scores = _COMPILED_PART_SCORES if self._compiles_by_size else _PART_SCORES
        self._part_work = scores / max(layer.num_heads for layer in self.layers)
        self.backend = backend_of(backend, self.layers, self.device)
        self.cache: KVCache | None = None
        self.graphs: Graphs | None = None
        # Inference mode is cheaper, but what a model computes and keeps (growing rope) would stay
        # an inference tensor in the user's hands.
        keeps_state = max_positions(model) is not None
        self._mode = torch.no_grad if keeps_state else torch.inference_mode

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._device

    @property
    def has_kernels(self) -> bool:
        """Whether Triton's kernels run beside this model."""
        return cache_class_of(self.backend) is TritonKVCache

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the cache."""
        self.cache = cache_class_of(self.backend)(
            self.layers, num_blocks=num_blocks, block_size=block_size, device=self.device
        )

    def release(self) -> None:
        """Drop the cache; the model stays as it was found."""
        self.cache = self.graphs = None

    def forward(
        self,
        segments: Sequence[Segment],
        queries: QuerySink | None = None,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, list[int]]:
        """Logits `[kept, vocab]` of the wanted rows, and each segment's first row among them.

        The logits are good until the next forward: a captured one writes to the same memory. `ids`,
        int64 `[segments]` on the device, stand for the tokens of segments of one token each.
        """
        if self.graphs is not None:
            replayed = self.graphs.forward(segments, queries, ids)
            if replayed is not None:
                return replayed
        cache = self.cache
        assert cache is not None
        batch = pack(segments, cache.block_size, self.device, self._part_work)
        if ids is not None:
            order = upload(np.array(batch.order, dtype=np.int64), self.device)
            batch.input_ids[0].copy_(ids[order])
        if queries is not None:
            queries.arrange(batch.order)
        return self.compute(batch, self.backend, queries), batch.first_row

    def compute(
        self, batch: PackedBatch, backend: AttentionBackend, queries: QuerySink | None = None
    ) -> Tensor:
        """Logits `[kept, vocab]` of a packed batch, with this attention."""
        assert self.cache is not None
        call = ForwardCall(backend, self.cache, batch, self._layer_of, queries)
        with self._lock, self._mode():
            return with_paged_attention(self._configs, call, lambda: self._logits(batch))

    def alone(self) -> AbstractContextManager[object]:
        """Inside the block no other thread computes with this model through a runner."""
        return self._lock

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy tokens between slots of the cache."""
        assert self.cache is not None
        index = upload(np.array([sources, targets], dtype=np.int64), self.device)
        self.cache.move(index[0], index[1])

    def _logits(self, batch: PackedBatch) -> Tensor:
        ids, positions, rows = batch.input_ids, batch.positions, batch.logit_rows
        if self._compiles_by_size:
            ids, positions, rows = (pad(each) for each in (ids, positions, rows))
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        output = self.model(input_ids=ids, position_ids=positions, use_cache=False, **keep)
        logits: Tensor = output.logits[0]
        if not self._keeps_rows:
            return logits.index_select(0, batch.logit_rows)
        return logits[: len(batch.logit_rows)]

    def probe(self) -> tuple[list[ProbedLayer], int]:
        """The attention layers that a forward goes through, and the width of its logits."""
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device).unsqueeze(0)
        widths: list[int] = []

        def forward() -> None:
            with torch.no_grad():
                output = self.model(input_ids=ids, position_ids=positions, use_cache=False)
            widths.append(int(output.logits.shape[-1]))

        with self._lock:
            try:
                layers = probing(self.model, forward)
            except UnsupportedModel:
                raise
            except _PROBE_ERRORS as error:
                raise UnsupportedModel(
                    f"{type(self.model).__name__}: {_reason(self.model, error)}; decode this model "
                    "with plain generate"
                ) from error
        check_layers(self.model, layers)
        return layers, widths[0]


def _reason(model: PreTrainedModel, error: Exception) -> str:
    if not getattr(model, "_supports_attention_backend", True):
        return "its attention does not go through transformers' AttentionInterface"
    return f"a forward without a mask and cache failed: {error!r}"
