"""One attention kernel for everything: decoding, chunked prefill, drafting and verification.

Program (query tile, KV head, split) reads the keys of its part of one request's context through
the page table. The query heads that share a KV head are folded into the rows of the tile, so that
every key is loaded once for all of them:

    rows of a tile, 3 heads per KV head | t0 h0 | t0 h1 | t0 h2 | t1 h0 | ...
    keys of a request                   | seen by all rows | draft: chain or tree |
                                        0            first_key    + tokens

What varies from step to step is read on the device (`AttentionTables`); the grid depends on the
tables' shape alone, so a captured graph serves every step of its bucket. Where contexts are split,
each part writes its normalised output and log-sum-exp, and a second kernel weighs the parts.

What a call costs, with C keys in all requests' contexts, H query and K KV heads, D dimensions:

    bytes   C K 2 D itemsize (KV, once per query tile), plus T H 2 D itemsize (queries, outputs)
            split into S parts: plus 2 S T H (4 D + 4)
    FLOPs   4 D times the (query, key) pairs computed: C tile_rows K

At batch 1 to 64 KV bytes are what counts: 4 KB per KV head and 16-token page at D = 128 in bf16,
contiguous in our layout. A tile of 64 rows does 64 FLOPs per byte of KV, far below a data centre
GPU's 250 to 300. What wide tiles cost is instructions, the softmax's above all. As compiled for 9.0,
a scheduler issues for 64 keys of D = 128, which come to an SM of an H100 in about 2300 cycles:

    rows of the tile          16         32          64          128
    instructions       450 - 600  600 - 800  650 - 1000  1150 - 1750    the more with trees

So they cost nothing only where the next keys come meanwhile: see the stages of `choose_tile`.

Knows the cache's layout and the tables; nothing of requests, drafts or models. The torch twin is
`reference.TorchAttention`; the flash-decoding scheme is Dao et al. (2023).
"""

# A kernel has no types until it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

__all__ = ["attention_kernel", "combine_kernel"]


@triton.jit
def _visible(index, limit, depth, low, high, first_key, nodes, num_tokens, WINDOW, HAS_TREES):
    """Whether rows see keys `index`: `[rows, keys]`."""
    seen = index[None, :] <= limit[:, None]
    if WINDOW > 0:
        seen = seen & (index[None, :] > (first_key + depth - WINDOW)[:, None])
    if HAS_TREES:
        node = index - first_key - 1
        word = tl.where(node[None, :] < 32, low[:, None], high[:, None])
        shift = tl.where((node >= 0) & (node < 64), node, 0) % 32
        on_path = ((word >> shift[None, :]) & 1) == 1
        on_path = on_path & ((node >= 0) & (node < 64))[None, :]
        if WINDOW > 0:
            inside = (node >= 0) & (node + 1 < num_tokens)
            height = tl.load(nodes + 4 * (node + 1) + 1, mask=inside, other=0)
            on_path = on_path & (depth[:, None] - height[None, :] < WINDOW)
        seen = seen | on_path
    return seen


@triton.jit
def _part_of_context(first, end, first_key, split, split_keys, WINDOW, HAS_TREES, IS_SPLIT, KEYS):
    """Keys `[lo, hi)` of this program: `end` is one past the last key that the tile may see."""
    begin = 0
    if WINDOW > 0:
        # A node of a tree may stand as high as the tree's first token.
        lowest = first_key if HAS_TREES else first_key + first
        begin = tl.maximum(lowest - WINDOW + 1, 0)
    if not IS_SPLIT:
        return begin, end
    span = tl.maximum(end - begin, 0)
    chunk = tl.maximum(tl.load(split_keys), tl.cdiv(span, tl.num_programs(2)))
    parts = tl.maximum(tl.cdiv(span, chunk), 1)  # of equal length
    chunk = tl.cdiv(tl.cdiv(span, parts), KEYS) * KEYS
    lo = begin + split * chunk
    return lo, tl.minimum(lo + chunk, end)


@triton.jit
def _row_limits(nodes, place, inside, first_key, HAS_TREES):
    """Last key that rows see without gaps, their depth and their words of ancestors."""
    limit = first_key + place
    depth = place
    low = place
    high = place
    if HAS_TREES:
        limit = first_key + tl.load(nodes + 4 * place, mask=inside, other=0)
        depth = tl.load(nodes + 4 * place + 1, mask=inside, other=0)
        low = tl.load(nodes + 4 * place + 2, mask=inside, other=0)
        high = tl.load(nodes + 4 * place + 3, mask=inside, other=0)
    return limit, depth, low, high


@triton.jit
def _slots(table, index, present, BLOCK_SIZE: tl.constexpr):
    """Slots of keys `index`, int64: a head's slots times its dimensions may pass 2**31."""
    page = tl.load(table + index // BLOCK_SIZE, mask=present, other=0)
    return page.to(tl.int64) * BLOCK_SIZE + index % BLOCK_SIZE


@triton.jit
def _load_rows(base, start, present, DIM: tl.constexpr, PADDED: tl.constexpr):
    """`[rows, PADDED]`: the DIM elements from each `start` on; zeros in absent rows."""
    dims = tl.arange(0, PADDED)
    mask = present[:, None]
    if PADDED != DIM:
        mask = mask & (dims < DIM)[None, :]
    return tl.load(base + start[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _product(left, right, WIDEN: tl.constexpr):
    """Matrix product, fp32 accumulation; Triton's interpreter cannot multiply bf16."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _write_rows(target, rows, values, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store `values` `[rows, PADDED]` at `target + rows * DIM`."""
    dims = tl.arange(0, PADDED)
    mask = inside[:, None]
    if PADDED != DIM:
        mask = mask & (dims < DIM)[None, :]
    pointers = target + rows[:, None] * DIM + dims[None, :]
    tl.store(pointers, values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _if_any(inside, lo, hi):
    """`inside`, if there are keys `[lo, hi)`; Triton 3.9's interpreter takes no mask of one bool."""
    return inside & (tl.zeros_like(inside.to(tl.int32)) + lo < hi)


@triton.jit
def _attend_part(
    q, keys, values, table, nodes, lo, hi, first_key, length, limit, depth, low, high, scale_log2,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_KEY: tl.constexpr,
    PADDED_VALUE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_TREES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Softmax over keys `[lo, hi)` in one pass: normalised output, and log2 of the sum."""
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    mean = tl.zeros([TILE_ROWS, PADDED_VALUE], tl.float32)
    for begin in range(lo, hi, TILE_KEYS):
        index = begin + tl.arange(0, TILE_KEYS)
        present = index < hi
        slot = _slots(table, index, present, BLOCK_SIZE)
        k = _load_rows(keys, slot * KEY_DIM, present, KEY_DIM, PADDED_KEY)
        v = _load_rows(values, slot * VALUE_DIM, present, VALUE_DIM, PADDED_VALUE)
        scores = _product(q, tl.trans(k), WIDEN) * scale_log2
        seen = _visible(index, limit, depth, low, high, first_key, nodes, length, WINDOW, HAS_TREES)
        scores = tl.where(seen & present[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that sees nothing yet
        share = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(share, 1)
        mean = mean * fade[:, None] + _product(share.to(v.dtype), v, WIDEN)
        top = new_top
    some = tl.where(total > 0, total, 1.0)
    return mean / some[:, None], tl.where(total > 0, top + tl.log2(some), float("-inf"))


@triton.jit
def _tile(tiles, requests, index):
    """Request, first token inside it; and the request's first packed token, tokens, first key."""
    request = tl.load(tiles + 2 * index)
    row = requests + 3 * request
    return request, tl.load(tiles + 2 * index + 1), tl.load(row), tl.load(row + 1), tl.load(row + 2)


@triton.jit(
    do_not_specialize=["num_tokens", "page_row_stride", "page_head_stride"],
    do_not_specialize_on_alignment=["requests", "tiles", "nodes", "pages", "split_keys"],
)
def attention_kernel(
    query, keys, values, out, parts, weights, requests, tiles, nodes, pages, split_keys,
    num_tokens, num_slots, query_head_stride, query_token_stride, page_row_stride, page_head_stride,
    scale_log2, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_KEY: tl.constexpr, PADDED_VALUE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_TREES: tl.constexpr, IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One query tile, one KV head, one part of the context: into `out`, or `parts` if split."""
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request, first, first_token, length, first_key = _tile(tiles, requests, tl.program_id(0))
    if first >= length:
        return
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    rows = tl.arange(0, TILE_ROWS)
    place = first + rows // GROUP  # of the row's token inside the request
    head = kv_head * GROUP + rows % GROUP
    inside = (place < length) & (rows < TILE_TOKENS * GROUP)
    end = first_key + tl.minimum(first + TILE_TOKENS, length)
    lo, hi = _part_of_context(
        first, end, first_key, split, split_keys, WINDOW, HAS_TREES, IS_SPLIT, TILE_KEYS
    )
    nodes += 4 * first_token
    limit, depth, low, high = _row_limits(nodes, place, inside, first_key, HAS_TREES)
    token = (first_token + place).to(tl.int64)
    origin = token * query_token_stride + head * query_head_stride
    q = _load_rows(query, origin, inside, KEY_DIM, PADDED_KEY)
    head_start = kv_head.to(tl.int64) * num_slots
    mean, weight = _attend_part(
        q, keys + head_start * KEY_DIM, values + head_start * VALUE_DIM,
        pages + request.to(tl.int64) * page_row_stride + kv_head * page_head_stride, nodes, lo, hi,
        first_key, length, limit, depth, low, high, scale_log2, KEY_DIM, VALUE_DIM, PADDED_KEY,
        PADDED_VALUE, BLOCK_SIZE, WINDOW, HAS_TREES, TILE_ROWS, TILE_KEYS, WIDEN,
    )  # fmt: skip
    place_of_row = (split.to(tl.int64) * num_tokens + token) * (tl.num_programs(1) * GROUP) + head
    if IS_SPLIT:
        tl.store(weights + place_of_row, weight, mask=inside)
        _write_rows(parts, place_of_row, mean, _if_any(inside, lo, hi), VALUE_DIM, PADDED_VALUE)
    else:
        _write_rows(out, place_of_row, mean, inside, VALUE_DIM, PADDED_VALUE)


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    parts, weights, out, num_rows, VALUE_DIM: tl.constexpr, PADDED_VALUE: tl.constexpr,
    SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows (token, head): the parts of their contexts, weighed by their sums of exponentials."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_VALUE)
    places = splits.to(tl.int64)[None, :] * num_rows + row[:, None]
    there = (row < num_rows)[:, None] & (splits < SPLITS)[None, :]
    weight = tl.load(weights + places, mask=there, other=float("-inf"))
    top = tl.max(weight, 1)
    share = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top)[:, None])
    mask = (weight > float("-inf"))[:, :, None] & (dims < VALUE_DIM)[None, None, :]
    pointers = parts + places[:, :, None] * VALUE_DIM + dims[None, None, :]
    part = tl.load(pointers, mask=mask, other=0.0)
    total = tl.sum(share, 1)
    mean = tl.sum(part * share[:, :, None], 1) / tl.where(total > 0, total, 1.0)[:, None]
    _write_rows(out, row, mean, row < num_rows, VALUE_DIM, PADDED_VALUE)
