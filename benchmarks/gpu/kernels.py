"""Decode attention by different kernels, over the same random KV: one query per request.

A kernel is made from the inputs and called with the number of a copy; None where it is not to be
had on this machine. Knows no time.
"""

import importlib.util
from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.floors import Load
from sdcontrol.engine.backends import backend_of, cache_class_of
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.packing import PageTable, Segment, pack
from sdcontrol.estimators.shapes import ModelShape

__all__ = ["KERNELS", "Call", "DecodeInputs"]

Call = Callable[[int], object]
_PAGE = 16
_WORKSPACE_BYTES = 256 << 20


class DecodeInputs:
    """KV of `copies` layers, and a query for each request."""

    def __init__(
        self,
        shape: ModelShape,
        load: Load,
        copies: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.batch_size, self.context_tokens = load.batch_size, load.context_tokens
        self.copies, self.device = copies, device
        dim = shape.head_dim
        self.layer = LayerShape(shape.num_heads, shape.num_kv_heads, dim, dim, dtype)
        self.backend = backend_of("auto", [self.layer], device)
        self.pages = load.context_tokens // _PAGE
        self.cache: KVCache = cache_class_of(self.backend)(
            [self.layer] * copies,
            num_blocks=1 + load.batch_size * self.pages,
            block_size=_PAGE,
            device=device,
        )
        generator = torch.Generator(device).manual_seed(0)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.normal_(generator=generator)
        self.query = torch.empty(shape.num_heads, load.batch_size, dim, dtype=dtype, device=device)
        self.query.normal_(generator=generator)

    @cached_property
    def contiguous(self) -> list[tuple[Tensor, Tensor]]:
        """Per copy, keys and values `[batch, kv_heads, context, dim]`."""
        return [(self._rows(k), self._rows(v)) for k, v in self._caches]

    @property
    def pages_first(self) -> list[tuple[Tensor, Tensor]]:
        """Per copy, keys and values `[pages, page, kv_heads, dim]`, without the null block."""
        heads, dim = self.layer.num_kv_heads, self.layer.key_dim

        def turned(tensor: Tensor) -> Tensor:
            paged = tensor[:, _PAGE:].view(heads, -1, _PAGE, dim)
            return paged.permute(1, 2, 0, 3).contiguous()

        return [(turned(k), turned(v)) for k, v in self._caches]

    @property
    def batched_query(self) -> Tensor:
        """`[batch, heads, 1, dim]`."""
        return self.query.transpose(0, 1).unsqueeze(2).contiguous()

    @property
    def _caches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.cache.keys, self.cache.values, strict=True))

    def _rows(self, tensor: Tensor) -> Tensor:
        heads, dim = self.layer.num_kv_heads, self.layer.key_dim
        rows = tensor[:, _PAGE:].view(heads, self.batch_size, self.context_tokens, dim)
        return rows.transpose(0, 1).contiguous()


def _ours(inputs: DecodeInputs) -> Call:
    pages, context = inputs.pages, inputs.context_tokens
    segments = [
        Segment(
            tokens=[1],
            start=context - 1,
            table=PageTable(1 + row * pages + np.arange(pages, dtype=np.int64)),
            slots=[_PAGE * (1 + row * pages) + context - 1],
        )
        for row in range(inputs.batch_size)
    ]
    batch = pack(segments, _PAGE, inputs.device)
    scale = inputs.layer.key_dim**-0.5
    return lambda copy: inputs.backend.attend(copy, inputs.query, inputs.cache, batch, scale)


def _torch_sdpa(inputs: DecodeInputs) -> Call:
    query, caches = inputs.batched_query, inputs.contiguous
    return lambda copy: scaled_dot_product_attention(query, *caches[copy], enable_gqa=True)


def _torch_sdpa_grouped(inputs: DecodeInputs) -> Call:
    """The heads of a group as queries of their KV head, so that each key is read once."""
    query, caches = inputs.batched_query, inputs.contiguous
    batch, heads, _, dim = query.shape
    grouped = query.view(batch, inputs.layer.num_kv_heads, -1, dim)
    assert grouped.shape[1] * grouped.shape[2] == heads
    return lambda copy: scaled_dot_product_attention(grouped, *caches[copy])


def _torch_flex(inputs: DecodeInputs) -> Call | None:
    if inputs.device.type != "cuda":
        return None
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    query, caches = inputs.batched_query, inputs.contiguous
    return lambda copy: compiled(query, *caches[copy], enable_gqa=True)


def _flashinfer(inputs: DecodeInputs) -> Call | None:
    if inputs.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer  # type: ignore[import-not-found]  # optional

    pages, batch, layer = inputs.pages, inputs.batch_size, inputs.layer
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)

    def int32(values: Tensor) -> Tensor:
        return values.to(inputs.device, torch.int32)

    wrapper.plan(
        int32(torch.arange(batch + 1) * pages),
        int32(torch.arange(batch * pages)),
        int32(torch.full((batch,), _PAGE)),
        layer.num_heads,
        layer.num_kv_heads,
        layer.key_dim,
        _PAGE,
        q_data_type=layer.dtype,
        kv_data_type=layer.dtype,
    )
    query, caches = inputs.query.transpose(0, 1).contiguous(), inputs.pages_first
    return lambda copy: wrapper.run(query, caches[copy])


KERNELS: Mapping[str, Callable[[DecodeInputs], Call | None]] = {
    "ours": _ours,
    "scaled_dot_product_attention": _torch_sdpa,
    "scaled_dot_product_attention, groups as queries": _torch_sdpa_grouped,
    "FlexAttention": _torch_flex,
    "FlashInfer": _flashinfer,
}
