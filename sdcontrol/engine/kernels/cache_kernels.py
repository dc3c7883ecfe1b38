"""Writing to the paged cache, and moving what a step accepted, by Triton.

    write     a program per (token, KV head): reads and writes (key_dim + value_dim) * itemsize
              bytes each; a step of T tokens moves 2 T K (Dk + Dv) itemsize in all, no FLOPs
    compact   a program per (request, KV head, tensor): as much, for every node that moves

Both are a thousandth of what the step reads, so that one launch instead of many is all that
matters. Nothing waits for the device or allocates. Knows slots; nothing of models or drafters.
The twins are in `reference_steps`.
"""

# A kernel has no types until it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdcontrol.engine.kv_cache import KVCache

__all__ = ["CacheTensors", "addresses_of", "compact_kernel", "write_kernel", "write_tokens"]


@triton.jit
def write_kernel(
    keys, values, key_cache, value_cache, slots, num_slots, key_head_stride, key_token_stride,
    value_head_stride, value_token_stride, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Copy one token's key and value of one KV head to the token's slot."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = head * num_slots + tl.load(slots + token)
    dims = tl.arange(0, PADDED)
    key = tl.load(
        keys + head * key_head_stride + token * key_token_stride + dims, mask=dims < KEY_DIM
    )
    tl.store(key_cache + row * KEY_DIM + dims, key, mask=dims < KEY_DIM)
    value = tl.load(
        values + head * value_head_stride + token * value_token_stride + dims,
        mask=dims < VALUE_DIM,
    )
    tl.store(value_cache + row * VALUE_DIM + dims, value, mask=dims < VALUE_DIM)


def write_tokens(
    key_cache: Tensor, value_cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Store `[kv_heads, tokens, dim]` at `slots` `[tokens]` of one layer's cache.

    Slots may repeat (padding goes to the null block): one of those tokens stays.
    """
    kv_heads, num_tokens, key_dim = keys.shape
    assert keys.stride(-1) == 1
    assert values.stride(-1) == 1
    widest = max(key_dim, values.shape[-1])
    write_kernel[(num_tokens, kv_heads)](
        keys, values, key_cache, value_cache, slots, key_cache.shape[1], keys.stride(0),
        keys.stride(1), values.stride(0), values.stride(1), KEY_DIM=key_dim,
        VALUE_DIM=values.shape[-1], PADDED=triton.next_power_of_2(widest), num_warps=1,
    )  # fmt: skip


@triton.jit
def compact_kernel(
    addresses, slots, first_nodes, verdicts, num_slots, verdict_stride, LIKE: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Move one request's accepted path in one KV head of one tensor, in ascending order.

    A node never stands before its depth, so a row is written only after it was read. One warp,
    and the same lane for the same element each time, keep that order.
    """
    request = tl.program_id(0)
    cache = tl.load(addresses + tl.program_id(2)).to(tl.pointer_type(LIKE))
    cache += tl.program_id(1).to(tl.int64) * num_slots * DIM
    slots += tl.load(first_nodes + request)
    dims = tl.arange(0, PADDED)
    verdict = verdicts + request * verdict_stride
    for depth in range(tl.load(verdict).to(tl.int32)):
        node = tl.load(verdict + 2 + depth)
        if node != depth:
            source = tl.load(slots + node) * DIM + dims
            target = tl.load(slots + depth) * DIM + dims
            row = tl.load(cache + source, mask=dims < DIM)
            tl.store(cache + target, row, mask=dims < DIM)


ELEMENTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""Triton's names of the types that a cache may have."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """Tensors of one shape."""

    addresses: Tensor  # int64 [tensors]
    kv_heads: int
    num_slots: int
    dim: int
    dtype: torch.dtype


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """Where tensors begin, int64 `[tensors]` on their device: good as long as they live."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)


class CacheTensors:
    """Where the tensors of a cache lie, on its device: made once, good as long as the cache is."""

    def __init__(self, cache: KVCache) -> None:
        by_shape: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for tensor in (*cache.keys, *cache.values):
            by_shape.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
        self._cache = cache  # the addresses are good while it lives
        self._alike = [
            _Alike(addresses_of(tensors), kv_heads, num_slots, dim, dtype)
            for ((kv_heads, num_slots, dim), dtype), tensors in by_shape.items()
        ]

    def compact(self, slots: Tensor, first_nodes: Tensor, verdicts: Tensor) -> None:
        """Move accepted nodes up, in every layer: depth `d` of a path to the slot of node `d`.

        `slots` `[tokens]` are those of the packed tokens, `first_nodes` `[requests]` the packed
        index of each draft's node 0; `verdicts` is what `walk_drafts` gave. All int64.
        """
        for alike in self._alike:
            compact_kernel[(len(verdicts), alike.kv_heads, len(alike.addresses))](
                alike.addresses, slots, first_nodes, verdicts, alike.num_slots,
                verdicts.stride(0), LIKE=ELEMENTS[alike.dtype], DIM=alike.dim,
                PADDED=triton.next_power_of_2(alike.dim), num_warps=1,
            )  # fmt: skip
