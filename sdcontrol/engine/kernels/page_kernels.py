"""Summaries of cached pages, and how well they match the latest queries, by Triton.

    summarise  a program per (new page, KV head, layer): reads page * dim * itemsize bytes and
               writes 8 dim; every page once in its life
    score      a program per (some pages, KV head, layer of a request): reads 8 dim bytes per page
               and head, 1 / (page * itemsize / 4) of what reading the keys would cost, and writes
               4; 4 FLOPs for every 8 bytes, so the bus is the limit

The score of a page is the largest product that a key within its bounds can have with a query,
summed over the query heads that share the KV head (Tang et al. 2024, Quest). The sum of the heads'
positive parts meets the upper bounds, that of the negative parts the lower ones:

    sum over h of (max(q_h, 0) . high + min(q_h, 0) . low)

Knows keys and queries; nothing of budgets or drafts. The twins are in `reference_steps.TorchPageBounds`.
"""

# A kernel has no types until it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdcontrol.engine.kernels.cache_kernels import ELEMENTS, addresses_of
from sdcontrol.engine.kv_cache import KVCache

__all__ = ["PageBounds", "score_kernel", "summarise_kernel"]

_TILE_PAGES = 32


@triton.jit
def summarise_kernel(
    addresses, low, high, blocks, num_blocks, LIKE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PADDED_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Smallest and largest value of each key dimension in one page."""
    block = tl.load(blocks + tl.program_id(0))
    page = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)  # layer, KV head
    page = page.to(tl.int64) * num_blocks + block
    keys = tl.load(addresses + tl.program_id(2)).to(tl.pointer_type(LIKE))
    keys += (tl.program_id(1).to(tl.int64) * num_blocks + block) * (BLOCK_SIZE * DIM)
    rows = tl.arange(0, PADDED_BLOCK)
    dims = tl.arange(0, PADDED)
    inside = (rows < BLOCK_SIZE)[:, None] & (dims < DIM)[None, :]
    places = rows[:, None] * DIM + dims[None, :]
    key = tl.load(keys + places, mask=inside, other=0.0).to(tl.float32)
    smallest = tl.min(tl.where(inside, key, float("inf")), 0)
    largest = tl.max(tl.where(inside, key, float("-inf")), 0)
    tl.store(low + page * DIM + dims, smallest, mask=dims < DIM)
    tl.store(high + page * DIM + dims, largest, mask=dims < DIM)


@triton.jit(do_not_specialize=["max_pages"])
def score_kernel(
    queries, low, high, blocks, counts, scores, num_blocks, max_pages,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE_PAGES: tl.constexpr,
):  # fmt: skip
    """Scores of some pages of one request, in one KV head of one layer."""
    request = tl.program_id(2)
    layer_head = tl.program_id(1)
    pages = tl.program_id(0) * TILE_PAGES + tl.arange(0, TILE_PAGES)
    present = pages < tl.load(counts + request)
    dims = tl.arange(0, PADDED)
    row = request.to(tl.int64) * tl.num_programs(1) + layer_head
    upper = tl.zeros([PADDED], tl.float32)
    lower = tl.zeros([PADDED], tl.float32)
    for head in tl.static_range(GROUP):
        place = (row * GROUP + head) * DIM + dims
        query = tl.load(queries + place, mask=dims < DIM, other=0.0)
        upper += tl.maximum(query, 0.0)
        lower += tl.minimum(query, 0.0)
    block = tl.load(blocks + request * max_pages + pages, mask=present, other=0)
    place = (layer_head.to(tl.int64) * num_blocks + block)[:, None] * DIM + dims[None, :]
    inside = present[:, None] & (dims < DIM)[None, :]
    most = tl.load(high + place, mask=inside, other=0.0) * upper[None, :]
    least = tl.load(low + place, mask=inside, other=0.0) * lower[None, :]
    score = tl.where(present, tl.sum(most + least, 1), float("-inf"))
    tl.store(scores + row * max_pages + pages, score, mask=pages < max_pages)


class PageBounds:
    """Bounds of the keys of every page of a cache, whose layers are of one shape."""

    def __init__(self, cache: KVCache) -> None:
        kv_heads, _, dim = cache.keys[0].shape
        shape = (len(cache.keys), kv_heads, cache.num_blocks, dim)
        self.low = torch.zeros(shape, device=cache.keys[0].device)
        self.high = torch.zeros_like(self.low)
        self._cache = cache
        self._addresses = addresses_of(cache.keys)

    def summarise(self, blocks: Tensor) -> None:
        """Take in the keys that lie in `blocks` `[n]` now."""
        layers, kv_heads, num_blocks, dim = self.low.shape
        block_size = self._cache.block_size
        summarise_kernel[(len(blocks), kv_heads, layers)](
            self._addresses, self.low, self.high, blocks, num_blocks,
            LIKE=ELEMENTS[self._cache.keys[0].dtype], BLOCK_SIZE=block_size,
            PADDED_BLOCK=triton.next_power_of_2(block_size), DIM=dim,
            PADDED=triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip

    def score(self, queries: Tensor, blocks: Tensor, counts: Tensor) -> Tensor:
        """Scores of pages, float32 `[requests, layers, kv_heads, pages]`; -inf where is none.

        `queries` float32 `[requests, layers, kv_heads, shared, dim]`; `blocks` `[requests, pages]`
        lists each request's candidates, and the first `counts` `[requests]` of them count.
        """
        requests, layers, kv_heads, shared, dim = queries.shape
        pages = blocks.shape[1]
        scores = torch.empty((requests, layers, kv_heads, pages), device=queries.device)
        grid = (triton.cdiv(pages, _TILE_PAGES), layers * kv_heads, requests)
        score_kernel[grid](
            queries.contiguous(), self.low, self.high, blocks, counts, scores, self.low.shape[2],
            pages, GROUP=shared, DIM=dim, PADDED=triton.next_power_of_2(dim),
            TILE_PAGES=_TILE_PAGES, num_warps=4,
        )  # fmt: skip
        return scores
