"""Writing to the paged cache, and moving what a step accepted, by Triton.

    write     a program per (token, KV head): reads and writes (key_dim + value_dim) * itemsize
              bytes each; a step of T tokens moves 2 T K (Dk + Dv) itemsize in all, no FLOPs
    move      a program per (KV head, tensor): as much, for every token that moves

Both are a thousandth of what the step reads, so that one launch instead of many is all that
matters. Nothing waits for the device or allocates. Knows slots; nothing of models or drafters.
The twins are `KVCache`'s own methods.
"""

# A kernel has no types until it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdcontrol.engine.kernels.launching import OPTIONS

__all__ = ["CacheTensors", "addresses_of", "move_kernel", "write_kernel", "write_tokens"]


@triton.jit(do_not_specialize_on_alignment=["slots"])
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
        VALUE_DIM=values.shape[-1], PADDED=triton.next_power_of_2(widest), num_warps=1, **OPTIONS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_moves"],
    do_not_specialize_on_alignment=["sources", "targets"],
)
def move_kernel(
    addresses, sources, targets, num_moves, num_slots, LIKE: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Make all moves in one KV head of one tensor, a tile of them at a time.

    Each tile is read before it is written; no source was the target of a move before it.
    """
    cache = tl.multiple_of(tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(LIKE)), 16)
    cache += tl.program_id(0).to(tl.int64) * num_slots * DIM
    dims = tl.arange(0, PADDED)
    for begin in range(0, num_moves, TILE):
        move = begin + tl.arange(0, TILE)
        mask = (move < num_moves)[:, None] & (dims < DIM)[None, :]
        source = tl.load(sources + move, mask=move < num_moves, other=0) * DIM
        target = tl.load(targets + move, mask=move < num_moves, other=0) * DIM
        rows = tl.load(cache + source[:, None] + dims[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(cache + target[:, None] + dims[None, :], rows, mask=mask)


ELEMENTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""Triton's names of the types that a cache may have."""

_TILE_MOVES = 32


@dataclass(frozen=True, slots=True)
class _Alike:
    """Tensors of one shape."""

    addresses: Tensor  # int64 [tensors]
    kv_heads: int
    num_slots: int
    dim: int
    dtype: torch.dtype


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """Where tensors begin, int64 `[tensors]` on their device: good as long as they live.

    Multiples of 16, as torch allocates: so kernels may take 16 bytes at once.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert not any(address % 16 for address in addresses)
    return torch.tensor(addresses, device=tensors[0].device)


class CacheTensors:
    """Where the tensors of a cache lie: for whoever owns them, since it does not keep them alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        by_shape: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            by_shape.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
        self._alike = [
            _Alike(addresses_of(tensors), kv_heads, num_slots, dim, dtype)
            for ((kv_heads, num_slots, dim), dtype), tensors in by_shape.items()
        ]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """See `KVCache.move`."""
        for alike in self._alike:
            move_kernel[(alike.kv_heads, len(alike.addresses))](
                alike.addresses, sources, targets, len(sources), alike.num_slots,
                LIKE=ELEMENTS[alike.dtype], DIM=alike.dim,
                PADDED=triton.next_power_of_2(alike.dim), TILE=_TILE_MOVES, num_warps=4, **OPTIONS,
            )  # fmt: skip
