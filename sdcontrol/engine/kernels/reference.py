"""Paged attention in plain torch: runs anywhere, and is what every kernel is compared with.

Knows the cache's layout and a group's limits; nothing of models, requests or drafts.
"""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from sdcontrol.engine.copies import upload
from sdcontrol.engine.kernels.masks import attention_mask, needs_company
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.packing import (
    MAX_GROUPED_TOKENS,
    AttentionGroup,
    IntArray,
    PackedBatch,
)

__all__ = ["TorchAttention"]

_COPIED_BYTES_PER_CALL = 384 * 1024  # copying this much takes about as long as one more call
_BLOCK_ROWS = 32  # queries that a CPU attends at once; in bfloat16 one alone is slower than two
_FEW_SHARED, _SHORT_SPAN = 3, 1024  # heads, keys: 10 to 20 % quicker so on a CPU, in float32
_LEAST_DIM = 64  # of heads whose attention on a CPU is quicker by plain products; 32 is too few


class TorchAttention:
    """`scaled_dot_product_attention` over pages: one call per group, which are gathered for it.

    On a CPU two batched products stand for it where they are quicker, and a request whose blocks are
    consecutive is read in place, in a call of its own, where that is cheaper than the copy.
    """

    def attend(
        self, layer: int, query: Tensor, cache: KVCache, batch: PackedBatch, scale: float
    ) -> Tensor:
        """Attention of packed queries `[heads, tokens, key_dim]`; returns `[tokens, heads, dim]`.

        The keys and values of the packed tokens are in the cache already.
        """
        parts = [_attend_group(layer, query, cache, group, scale) for group in batch.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_group(
    layer: int, query: Tensor, cache: KVCache, group: AttentionGroup, scale: float
) -> Tensor:
    queries = query
    if group.num_tokens < query.shape[1]:
        queries = query.narrow(1, group.first_token, group.num_tokens)
    window = cache.layers[layer].window
    if group.num_requests > 1 and _is_cheaper_one_by_one(cache.layers[layer], queries, group):
        return _attend_one_by_one(layer, queries, cache, group, scale)
    keys, values = _keys_and_values(layer, cache, group)
    if group.num_requests > 1 or 1 < group.num_tokens <= MAX_GROUPED_TOKENS:
        if not _are_products_faster(keys):  # a mask hides from those what lies behind the last key
            keys, values = _without_rest(keys, values, group)
        return _attend_folded(queries, keys, values, group, scale, window)
    keys, values = _without_rest(keys, values, group)
    attend = _attend_one_token if group.num_tokens == 1 else _attend_alone
    return attend(queries, keys, values, group, scale, window)


def _attend_one_token(
    queries: Tensor,  # [heads, 1, dim]
    keys: Tensor,  # [1, kv_heads, keys, dim]
    values: Tensor,
    group: AttentionGroup,
    scale: float,
    window: int | None,
) -> Tensor:
    """One query of one request, which sees every key unless a window ends before them."""
    if window is not None and window < group.num_keys:
        keys, values = keys[:, :, -window:], values[:, :, -window:]
    heads, _, dim = queries.shape
    if _is_quicker_unfolded(queries, keys):
        own = functional.scaled_dot_product_attention(
            queries.unsqueeze(0), keys, values, scale=scale, enable_gqa=heads != keys.shape[1]
        )
        return own.reshape(1, heads, -1)
    folded = queries.reshape(1, keys.shape[1], -1, dim)
    return _attend_rows(folded, keys, values, None, scale).reshape(1, heads, -1)


def _is_quicker_unfolded(queries: Tensor, keys: Tensor) -> bool:
    """Whether each of the few heads that share a KV head had better read its short span for itself."""
    if queries.dtype != torch.float32 or queries.device.type != "cpu":
        return False
    return queries.shape[0] <= _FEW_SHARED * keys.shape[1] and keys.shape[2] <= _SHORT_SPAN


def _is_cheaper_one_by_one(layer: LayerShape, queries: Tensor, group: AttentionGroup) -> bool:
    """On a CPU, whether copying the pages costs more than a call for each request."""
    if group.first_slots is None or queries.device.type != "cpu":
        return False
    return layer.bytes_per_token * group.num_keys > _COPIED_BYTES_PER_CALL


def _attend_one_by_one(
    layer: int, queries: Tensor, cache: KVCache, group: AttentionGroup, scale: float
) -> Tensor:
    """Each request on its own, over keys that are consecutive and need no copy."""
    assert group.first_slots is not None
    kv_heads = cache.layers[layer].num_kv_heads
    shared = queries.shape[0] // kv_heads
    mask = attention_mask(group, cache.layers[layer].window, queries.dtype, shared, group.num_keys)
    parts: list[Tensor] = []
    first = 0
    for row, (slot, length) in enumerate(zip(group.first_slots, group.lengths, strict=True)):
        num_keys = group.starts[row] + length
        keys, values = cache.span(layer, slot, num_keys)
        own = queries.narrow(1, first, length).view(kv_heads, shared, length, -1)
        folded = own.transpose(1, 2).reshape(1, kv_heads, length * shared, -1)
        sees_all = length == 1 and cache.layers[layer].window is None
        seen = None if mask is None or sees_all else mask[row : row + 1, :, :num_keys]
        out = _attend_rows(folded, keys, values, seen, scale)
        out = out.reshape(kv_heads, length, shared, -1).transpose(0, 1)
        parts.append(out.reshape(length, kv_heads * shared, -1))
        first += length
    return torch.cat(parts)


def _keys_and_values(layer: int, cache: KVCache, group: AttentionGroup) -> tuple[Tensor, Tensor]:
    if group.num_requests == 1 and group.first_slots is not None:
        return cache.span(layer, group.first_slots[0], group.num_keys)
    return cache.gather(layer, group.pages_of(layer))


def _without_rest(keys: Tensor, values: Tensor, group: AttentionGroup) -> tuple[Tensor, Tensor]:
    """Without what lies behind the last key in the last page."""
    if keys.shape[2] == group.num_keys:
        return keys, values
    return keys[:, :, : group.num_keys], values[:, :, : group.num_keys]


def _attend_alone(
    queries: Tensor,  # [heads, queries, dim]
    keys: Tensor,  # [1, kv_heads, keys, dim]
    values: Tensor,
    group: AttentionGroup,
    scale: float,
    window: int | None,
) -> Tensor:
    causal = group.is_full_causal and (window is None or window >= group.num_keys)
    mask = None if causal else attention_mask(group, window, queries.dtype, 1, group.num_keys)
    out = functional.scaled_dot_product_attention(
        queries.unsqueeze(0),
        keys,
        values,
        attn_mask=None if mask is None else mask[:, : queries.shape[1]].unsqueeze(0),
        is_causal=causal,
        scale=scale,
        enable_gqa=queries.shape[0] != keys.shape[1],
    )
    return out[0].transpose(0, 1)


def _attend_folded(
    queries: Tensor,  # [heads, tokens, dim]
    keys: Tensor,  # [requests, kv_heads, keys, dim]
    values: Tensor,
    group: AttentionGroup,
    scale: float,
    window: int | None,
) -> Tensor:
    """The query heads that share a KV head stand as further queries beside each other."""
    heads, _, dim = queries.shape
    kv_heads = keys.shape[1]
    shared = heads // kv_heads
    mask = attention_mask(group, window, queries.dtype, shared, keys.shape[2])
    there, back = _folding(group, heads, kv_heads, queries.device)
    folded = queries.transpose(0, 1).reshape(-1, dim).index_select(0, there)
    parts: list[Tensor] = []
    row = 0
    for first, count, width in group.parts:
        num_rows = count * heads * width
        rows = folded.narrow(0, row, num_rows).view(count, kv_heads, width * shared, dim)
        own = keys.narrow(0, first, count), values.narrow(0, first, count)
        seen = None if mask is None else mask.narrow(0, first, count)
        parts.append(_attend_rows(rows, *own, seen, scale).reshape(num_rows, -1))
        row += num_rows
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.index_select(0, back).view(group.num_tokens, heads, -1)


def _folding(
    group: AttentionGroup, heads: int, kv_heads: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The row `(token, head)` of each folded query, any where one is padded; and the folded query of
    each such row. Made once a forward and kept in the group."""
    key = heads, kv_heads
    if key not in group.folds:
        lengths = np.array(group.lengths)
        starts = np.cumsum(lengths) - lengths
        head = np.arange(heads).reshape(1, kv_heads, 1, -1)
        there: list[IntArray] = []
        back = np.empty(group.num_tokens * heads, dtype=np.int64)
        num_rows = 0
        for first, count, width in group.parts:
            own = slice(first, first + count)
            place = np.arange(width)
            is_real = place < lengths[own, None]
            token = np.where(is_real, starts[own, None] + place, 0)
            rows = token[:, None, :, None] * heads + head
            folded = np.arange(num_rows, num_rows + rows.size).reshape(rows.shape)
            is_real = np.broadcast_to(is_real[:, None, :, None], rows.shape)
            back[rows[is_real]] = folded[is_real]
            there.append(rows.reshape(-1))
            num_rows += rows.size
        group.folds[key] = upload(np.concatenate(there), device), upload(back, device)
    return group.folds[key]


def _attend_rows(
    rows: Tensor,  # [requests, kv_heads, rows, dim]
    keys: Tensor,  # [requests, kv_heads, keys, dim]
    values: Tensor,
    mask: Tensor | None,  # [requests, rows or more, keys]
    scale: float,
) -> Tensor:
    """Every row over the keys that it sees, `[requests, kv_heads, rows, dim]`."""
    count = rows.shape[2]
    if _are_products_faster(keys):
        return _attend_by_products(rows, keys, values, mask, scale)
    is_alone = count % _BLOCK_ROWS == 1 and needs_company(rows)
    if is_alone:
        rows = functional.pad(rows, (0, 0, 0, 1))
    seen = None if mask is None else mask[:, : rows.shape[2]].unsqueeze(1)
    out = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=seen, scale=scale)
    return out[:, :, :count] if is_alone else out


def _are_products_faster(keys: Tensor) -> bool:
    """Whether two batched products take less time than PyTorch's attention, which goes by blocks of rows.

    Only on a CPU, in bfloat16, with heads that are not small, and over keys without gaps (others they
    would copy). Without AVX-512 it was not measured.
    """
    if keys.device.type != "cpu" or keys.dtype != torch.bfloat16 or not keys.is_contiguous():
        return False
    return keys.shape[-1] >= _LEAST_DIM and _cpu_capability().startswith("AVX512")


@cache
def _cpu_capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def _attend_by_products(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """As `_attend_rows`. Scores are rounded to the dtype, as in attention that transformers calls eager."""
    scores = torch.bmm(rows.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    scores = scores.view(*rows.shape[:3], -1)
    if mask is None:
        scores.mul_(scale)
    else:
        torch.add(mask[:, : rows.shape[2]].unsqueeze(1), scores, alpha=scale, out=scores)
    shares = scores.softmax(-1)
    out = torch.bmm(shares.flatten(0, 1), values.flatten(0, 1))
    return out.view(*rows.shape[:3], -1)
