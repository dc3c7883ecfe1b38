"""Summaries of cached pages, and how well they match the latest queries, by Triton.

    summarise  a program per (new page, KV head, layer): reads page * dim * itemsize bytes and
               writes 2 dim itemsize; every page once in its life
    score      a program per (some pages, KV head, layer) of one request: reads 2 dim itemsize
               bytes per page and head, 1 / page of what reading keys and values would cost, and
               writes 4; 4 FLOPs for every 4 bytes in bf16, so the bus is the limit

The score of a page is the largest product that a key within its bounds can have with a query,
summed over the query heads that share the KV head (Tang et al. 2024, Quest). The sum of the heads'
positive parts meets the upper bounds, that of the negative parts the lower ones:

    sum over h of (max(q_h, 0) . high + min(q_h, 0) . low)

Bounds are keys' own values, so that the keys' type holds them exactly. Knows keys and queries;
nothing of budgets or drafts. The twins are in `reference_steps.TorchPageBounds`.
"""

# A kernel has no types until it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdcontrol.engine.kernels.cache_kernels import ELEMENTS, addresses_of
from sdcontrol.engine.kernels.launching import OPTIONS
from sdcontrol.engine.kv_cache import KVCache

__all__ = ["TritonPageBounds", "score_kernel", "summarise_kernel"]

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
    keys = tl.multiple_of(tl.load(addresses + tl.program_id(2)).to(tl.pointer_type(LIKE)), 16)
    keys += (tl.program_id(1).to(tl.int64) * num_blocks + block) * (BLOCK_SIZE * DIM)
    rows = tl.arange(0, PADDED_BLOCK)
    dims = tl.arange(0, PADDED)
    inside = (rows < BLOCK_SIZE)[:, None] & (dims < DIM)[None, :]
    places = rows[:, None] * DIM + dims[None, :]
    key = tl.load(keys + places, mask=inside, other=0.0).to(tl.float32)
    smallest = tl.min(tl.where(inside, key, float("inf")), 0)
    largest = tl.max(tl.where(inside, key, float("-inf")), 0)
    tl.store(low + page * DIM + dims, smallest.to(LIKE), mask=dims < DIM)
    tl.store(high + page * DIM + dims, largest.to(LIKE), mask=dims < DIM)


@triton.jit(do_not_specialize=["num_pages"])
def score_kernel(
    queries, low, high, blocks, scores, num_blocks, num_pages, GROUP: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, TILE_PAGES: tl.constexpr,
):  # fmt: skip
    """Scores of some pages in one KV head of one layer."""
    layer_head = tl.program_id(1).to(tl.int64)
    pages = tl.program_id(0) * TILE_PAGES + tl.arange(0, TILE_PAGES)
    present = pages < num_pages
    dims = tl.arange(0, PADDED)
    upper = tl.zeros([PADDED], tl.float32)
    lower = tl.zeros([PADDED], tl.float32)
    for head in tl.static_range(GROUP):
        place = (layer_head * GROUP + head) * DIM + dims
        query = tl.load(queries + place, mask=dims < DIM, other=0.0)
        upper += tl.maximum(query, 0.0)
        lower += tl.minimum(query, 0.0)
    block = tl.load(blocks + pages, mask=present, other=0)
    place = (layer_head * num_blocks + block)[:, None] * DIM + dims[None, :]
    inside = present[:, None] & (dims < DIM)[None, :]
    most = tl.load(high + place, mask=inside, other=0.0).to(tl.float32) * upper[None, :]
    least = tl.load(low + place, mask=inside, other=0.0).to(tl.float32) * lower[None, :]
    tl.store(scores + layer_head * num_pages + pages, tl.sum(most + least, 1), mask=present)


class TritonPageBounds:
    """Bounds of the keys of every page of a cache, whose layers are of one shape."""

    def __init__(self, cache: KVCache) -> None:
        kv_heads, _, dim = cache.keys[0].shape
        self.low = cache.keys[0].new_zeros((len(cache.keys), kv_heads, cache.num_blocks, dim))
        self.high = torch.zeros_like(self.low)
        self._cache = cache  # the addresses are good while it lives
        self._addresses = addresses_of(cache.keys)

    def summarise(self, blocks: Tensor) -> None:
        """Take in the keys that lie in `blocks` `[n]` now."""
        layers, kv_heads, num_blocks, dim = self.low.shape
        block_size = self._cache.block_size
        summarise_kernel[(len(blocks), kv_heads, layers)](
            self._addresses, self.low, self.high, blocks, num_blocks,
            LIKE=ELEMENTS[self._cache.keys[0].dtype], BLOCK_SIZE=block_size,
            PADDED_BLOCK=triton.next_power_of_2(block_size), DIM=dim,
            PADDED=triton.next_power_of_2(dim), num_warps=4, **OPTIONS,
        )  # fmt: skip

    def score(self, queries: Tensor, blocks: Tensor) -> Tensor:
        """Scores of the pages of one request, float32 `[layers, kv_heads, pages]`.

        `queries` float32 `[layers, kv_heads, shared, dim]`; `blocks` `[pages]`.
        """
        layers, kv_heads, shared, dim = queries.shape
        num_pages = len(blocks)
        scores = queries.new_empty((layers, kv_heads, num_pages))
        score_kernel[(triton.cdiv(num_pages, _TILE_PAGES), layers * kv_heads)](
            queries.contiguous(), self.low, self.high, blocks, scores, self.low.shape[2],
            num_pages, GROUP=shared, DIM=dim, PADDED=triton.next_power_of_2(dim),
            TILE_PAGES=_TILE_PAGES, num_warps=4, **OPTIONS,
        )  # fmt: skip
        return scores
