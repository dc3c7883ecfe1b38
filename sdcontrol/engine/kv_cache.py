"""The paged KV cache: tensors only.

Which block belongs to whom is the block pool's business; this module is told slots and moves
numbers. Knows nothing of requests, drafts or models.

    slot = block * block_size + offset          keys[layer]  [kv_heads, slots, key_dim]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["KVCache", "LayerShape"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores, as seen in a probe forward."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None = None  # sliding window: a query sees this many keys, itself included

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """Keys and values of every layer of one model, in fixed-size blocks."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = num_blocks * block_size

        def allocate(layer: LayerShape, dim: int) -> Tensor:
            return _zeros((layer.num_kv_heads, slots, dim), layer.dtype, device)

        self.keys = [allocate(layer, layer.key_dim) for layer in self.layers]
        self.values = [allocate(layer, layer.value_dim) for layer in self.layers]
        pairs = zip(self.keys, self.values, strict=True)
        self._rows = [(keys.unsqueeze(0), values.unsqueeze(0)) for keys, values in pairs]
        self._sums: list[Tensor] | None = None  # of what was written since `check`, if anybody asks

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        per_token = sum(layer.bytes_per_token for layer in self.layers)
        return per_token * self.num_blocks * self.block_size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `[kv_heads, tokens, dim]` at `slots` `[tokens]`."""
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)
        if self._sums is not None and layer == len(self.layers) - 1:
            self._sums += [each.sum(dtype=torch.float32) for each in (keys, values)]

    def watch(self) -> bool:
        """From now on `check` answers; False where it would have to wait for a device."""
        self._sums = [] if self.keys[0].device.type == "cpu" else None
        return self._sums is not None

    def check(self) -> bool:
        """Whether all that was written since the last call is finite; once it is not, nobody looks any more.

        The last layer is looked at: what is not finite in another makes that token's so in those above it.
        """
        is_finite = math.isfinite(sum(map(float, self._sums or ())))
        self._sums = [] if is_finite else None
        return is_finite

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeros in place of what others left in these blocks: what is masked must be finite."""
        offsets = np.arange(self.block_size)
        slots = (np.array(blocks, dtype=np.int64)[:, None] * self.block_size + offsets).reshape(-1)
        index = torch.from_numpy(slots).to(self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(1, index, 0)

    def span(self, layer: int, first_slot: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[1, kv_heads, num_keys, dim]` of consecutive slots, without a copy."""
        keys, values = self._rows[layer]
        return keys.narrow(2, first_slot, num_keys), values.narrow(2, first_slot, num_keys)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of page tables: `[requests, kv_heads, pages * block_size, dim]`.

        `pages` is `[requests, pages]`, or `[requests, kv_heads, pages]` where heads differ.
        """
        heads = self.layers[layer].num_kv_heads
        first = torch.arange(heads, device=pages.device).view(1, heads, 1) * self.num_blocks
        index = first + (pages if pages.dim() == 3 else pages.unsqueeze(1))
        return self._take(self.keys[layer], index), self._take(self.values[layer], index)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy tokens from slots to slots in every layer, both int64 `[moves]`.

        A slot may be both, but no source the target of a move before it: paths are compacted so.
        """
        for tensor in (*self.keys, *self.values):
            tensor[:, targets] = tensor[:, sources]

    def _take(self, tensor: Tensor, index: Tensor) -> Tensor:
        """The blocks of every head at `index` `[requests, kv_heads, pages]`, as whole rows of memory."""
        heads, _, dim = tensor.shape
        blocks = tensor.view(heads * self.num_blocks, self.block_size * dim)
        taken = blocks.index_select(0, index.reshape(-1))
        return taken.view(len(index), heads, -1, dim)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since masked keys must be finite; on a CPU memory is taken when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
