"""Paged attention in plain torch: runs anywhere, and is what every kernel is compared with.

Knows the cache's layout and a group's limits; nothing of models, requests or drafts.
"""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.packing import (
    MAX_GROUPED_TOKENS,
    AttentionGroup,
    PackedBatch,
    ancestors,
)

__all__ = ["TorchAttention"]

_COPIED_BYTES_PER_CALL = 384 * 1024  # copying this much takes about as long as one more call
_BLOCK_ROWS = 32  # queries that a CPU attends at once; in bfloat16 one alone is slower than two
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
    keys: Tensor,  # [kv_heads, 1, keys, dim]
    values: Tensor,
    group: AttentionGroup,
    scale: float,
    window: int | None,
) -> Tensor:
    """One query of one request, which sees every key unless a window ends before them."""
    if window is not None and window < group.num_keys:
        keys, values = keys[:, :, -window:], values[:, :, -window:]
    heads, _, dim = queries.shape
    folded = queries.reshape(keys.shape[0], 1, -1, dim)
    return _attend_rows(folded, keys, values, None, scale).reshape(1, heads, -1)


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
        folded = own.transpose(1, 2).reshape(kv_heads, 1, length * shared, -1)
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
    return keys[:, :, : group.num_keys], values[:, :, : group.num_keys]


def _attend_alone(
    queries: Tensor,  # [heads, queries, dim]
    keys: Tensor,  # [kv_heads, 1, keys, dim]
    values: Tensor,
    group: AttentionGroup,
    scale: float,
    window: int | None,
) -> Tensor:
    causal = group.is_full_causal and (window is None or window >= group.num_keys)
    mask = None if causal else attention_mask(group, window, queries.dtype, 1, group.num_keys)
    out = functional.scaled_dot_product_attention(
        queries.unsqueeze(0),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=None if mask is None else mask[:, : queries.shape[1]].unsqueeze(0),
        is_causal=causal,
        scale=scale,
        enable_gqa=queries.shape[0] != keys.shape[0],
    )
    return out[0].transpose(0, 1)


def _attend_folded(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    group: AttentionGroup,
    scale: float,
    window: int | None,
) -> Tensor:
    """The query heads that share a KV head stand as further queries beside each other."""
    heads, _, dim = queries.shape
    kv_heads = keys.shape[0]
    shared = heads // kv_heads
    requests, width = group.num_requests, group.num_queries
    mask = attention_mask(group, window, queries.dtype, shared, keys.shape[2])
    if group.scatter is not None:
        there, back = _folding(group, group.scatter, heads, kv_heads)
        rows = queries.transpose(0, 1).reshape(-1, dim).index_select(0, there)
        folded = rows.view(kv_heads, requests, width * shared, dim)
        out = _attend_rows(folded, keys, values, mask, scale)
        flat = out.reshape(-1, out.shape[-1]).index_select(0, back)
        return flat.view(group.num_tokens, heads, -1)
    rows = queries.view(kv_heads, shared, requests, width, dim)
    folded = rows.permute(0, 2, 3, 1, 4).reshape(kv_heads, requests, width * shared, dim)
    out = _attend_rows(folded, keys, values, mask, scale)
    out = out.reshape(kv_heads, requests, width, shared, -1).permute(1, 2, 0, 3, 4)
    return out.reshape(requests * width, heads, -1)


def _folding(
    group: AttentionGroup, scatter: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Of unequal lengths: the row `(token, head)` of each folded query, any where one is padded; and
    the folded query of each such row. Made once a forward and kept in the group."""
    key = heads, kv_heads
    if key not in group.folds:
        device, width, shared = scatter.device, group.num_queries, heads // kv_heads
        token = torch.zeros(group.num_requests * width, dtype=torch.int64, device=device)
        token[scatter] = torch.arange(group.num_tokens, device=device)
        head = torch.arange(heads, device=device)
        there = token.view(1, -1, width, 1) * heads + head.view(kv_heads, 1, 1, shared)
        row = head // shared * len(token) + scatter.unsqueeze(1)
        group.folds[key] = there.reshape(-1), (row * shared + head % shared).reshape(-1)
    return group.folds[key]


def _attend_rows(
    rows: Tensor,  # [kv_heads, requests, rows, dim]
    keys: Tensor,  # [kv_heads, requests, keys, dim]
    values: Tensor,
    mask: Tensor | None,  # [requests, rows or more, keys]
    scale: float,
) -> Tensor:
    """Every row over the keys that it sees, `[kv_heads, requests, rows, dim]`."""
    count = rows.shape[2]
    if _are_products_faster(keys):
        return _attend_by_products(rows, keys, values, mask, scale)
    is_alone = count % _BLOCK_ROWS == 1 and _needs_company(rows)
    if is_alone:
        rows = functional.pad(rows, (0, 0, 0, 1))
    seen = None if mask is None else mask[:, : rows.shape[2]].unsqueeze(0)
    out = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=seen, scale=scale)
    return out[:, :, :count] if is_alone else out


def _needs_company(rows: Tensor) -> bool:
    """Whether a row that is alone in its block would take longer than two."""
    return rows.device.type == "cpu" and rows.dtype == torch.bfloat16


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
        torch.add(mask[:, : rows.shape[2]], scores, alpha=scale, out=scores)
    shares = scores.softmax(-1)
    out = torch.bmm(shares.flatten(0, 1), values.flatten(0, 1))
    return out.view(*rows.shape[:3], -1)


def attention_mask(
    group: AttentionGroup, window: int | None, dtype: torch.dtype, shared: int, num_keys: int
) -> Tensor | None:
    """Additive mask `[requests, queries * shared, keys]`; None: everything is visible.

    Where a row may get company there is one more, which sees everything. Made once a forward and kept
    in the group for the layers that follow.
    """
    if window is not None and window >= group.num_keys:
        window = None
    key = (window, dtype, shared, num_keys)
    if key not in group.masks:
        mask = _build_mask(group, window, dtype, num_keys)
        folded = None if mask is None else mask.repeat_interleave(shared, dim=1)
        if folded is not None and _needs_company(folded):
            folded = functional.pad(folded, (0, 0, 0, 1))
        group.masks[key] = folded
    return group.masks[key]


def _build_mask(
    group: AttentionGroup, window: int | None, dtype: torch.dtype, num_keys: int
) -> Tensor | None:
    even = min(group.starts) + 1 == num_keys and group.num_queries == 1
    if even and window is None:
        return None
    device = group.limits.device
    index = torch.arange(num_keys, device=device)
    limits = group.limits.unsqueeze(-1)
    visible = index <= limits
    if window is not None:
        visible &= index > limits - window
    for row, parents in enumerate(group.trees):
        if parents is not None:
            _show_tree(visible[row], group.starts[row], parents, window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def _show_tree(
    visible: Tensor,  # [queries, keys] of one request
    start: int,
    parents: tuple[int, ...],
    window: int | None,
) -> None:
    """Inside a draft, a node sees the path to its root; before it, what its depth allows."""
    nodes = len(parents)
    paths = ancestors(parents)
    depths = paths.sum(1)
    if window is not None:
        paths &= depths[:, None] - depths[None, :] < window
    rows = visible[1 : nodes + 1]
    index = np.arange(visible.shape[1])[None, :]
    first = -1 if window is None else (start + depths - window)[:, None]
    before = (index <= start) & (index > first)
    rows[:] = torch.from_numpy(before).to(visible.device)
    rows[:, start + 1 : start + 1 + nodes] = torch.from_numpy(paths).to(visible.device)
