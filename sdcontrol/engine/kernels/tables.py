"""What the attention kernel reads of a forward's shape: who asks, who sees what, where keys lie.

All of it is int32 in one flat buffer, so that one copy brings a step's tables to the device, and a
captured graph finds them where it found them before. Knows segments, pages and how contexts are split;
nothing of models.

    flat   | requests | tiles | nodes | pages | split_keys |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdcontrol.engine.copies import upload
from sdcontrol.engine.kernels.splits import MIN_SPLIT_KEYS, SplitPlan
from sdcontrol.engine.packing import Segment, ancestors
from sdcontrol.errors import ConfigError

__all__ = [
    "MAX_TREE_NODES",
    "AttentionTables",
    "TableShape",
    "Written",
    "fill_tables",
    "segment_tables",
]

Int32Array = NDArray[np.int32]
Written = list["ref[NDArray[np.int64]]"]
"""By request of a buffer, the blocks that were listed there last; whoever ended is not kept alive."""

MAX_TREE_NODES = 64
_NO_KEYS = -(1 << 30)  # first key of padding: it sees nothing, and gets zeros
_WORD = 32


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """The tables of one forward on the device; views of one int32 buffer.

    A request of no tokens and a tile of such a request are padding. `requests[:, 2]` may be moved
    on the device, between the drafting rounds of one captured graph.
    """

    requests: Tensor  # [requests, 3]: first packed token, tokens, key index of the first token
    tiles: Tensor  # [tiles, 2]: request, the tile's first token inside the request
    nodes: Tensor  # [tokens, 4]: see `_node_rows`; [0, 4] where no request has a tree
    pages: Tensor  # [layers or 1, requests, kv_heads or 1, pages]
    split_keys: Tensor  # [plans]: keys that one program should read, where the context is split
    shape: "TableShape"

    def pages_of(self, layer: int) -> Tensor:
        """Page tables `[requests, kv_heads or 1, pages]` of one layer."""
        return self.pages[layer if self.pages.shape[0] > 1 else 0]

    def split_keys_of(self, window: int | None) -> Tensor:
        """Begins with what holds for layers of this window; of any where nothing was planned."""
        windows = [plan.window for plan in self.shape.plans]
        return self.split_keys[windows.index(window) :] if len(windows) > 1 else self.split_keys


@dataclass(frozen=True, slots=True)
class TableShape:
    """How much the tables hold: exactly one forward, or every forward of a graph's bucket."""

    requests: int
    tokens: int
    tile_tokens: int
    pages: int
    page_layers: int = 1  # more than one where page tables differ by layer and KV head
    page_heads: int = 1
    has_trees: bool = False
    plans: tuple[SplitPlan, ...] = ()  # of layers that differ by their windows

    @property
    def tiles(self) -> int:
        """No division of `tokens` among `requests` needs more tiles than this."""
        padding = self.requests * (self.tile_tokens - 1)
        return (self.tokens + padding) // self.tile_tokens

    @property
    def sections(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tables, in the buffer's order."""
        return (
            (self.requests, 3),
            (self.tiles, 2),
            (self.tokens if self.has_trees else 0, 4),
            (self.page_layers, self.requests, self.page_heads, self.pages),
            (max(len(self.plans), 1),),
        )

    @property
    def num_elements(self) -> int:
        """The buffer's length."""
        return sum(math.prod(section) for section in self.sections)

    def parts(self, flat: Int32Array) -> list[Int32Array]:
        """The tables inside a buffer `[num_elements]` on the host, in its order."""
        ends = np.cumsum([math.prod(section) for section in self.sections])
        parts = np.split(flat, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.sections, strict=True)]

    def views(self, flat: Tensor) -> AttentionTables:
        """The tables inside a buffer `[num_elements]`."""
        parts = flat.split([math.prod(section) for section in self.sections])
        requests, tiles, nodes, pages, split_keys = (
            part.view(shape) for part, shape in zip(parts, self.sections, strict=True)
        )
        return AttentionTables(requests, tiles, nodes, pages, split_keys, self)


def segment_tables(
    segments: Sequence[Segment],
    *,
    block_size: int,
    tile_tokens: int,
    device: torch.device,
    plans: tuple[SplitPlan, ...] = (),
) -> AttentionTables:
    """Tables that hold exactly these segments, in packed order."""
    tables = [segment.table.blocks for segment in segments]
    per_head = next((table.shape[:-1] for table in tables if table.ndim > 1), (1, 1))
    shape = TableShape(
        requests=len(segments),
        tokens=sum(len(segment.tokens) for segment in segments),
        tile_tokens=tile_tokens,
        pages=max(-(-_num_keys(segment) // block_size) for segment in segments),
        page_layers=per_head[0],
        page_heads=per_head[1],
        has_trees=any(segment.parents is not None for segment in segments),
        plans=plans,
    )
    flat = fill_tables(segments, shape, block_size=block_size)
    return shape.views(upload(flat, device))


def fill_tables(
    segments: Sequence[Segment],
    shape: TableShape,
    *,
    block_size: int,
    into: Int32Array | None = None,
    written: Written | None = None,
) -> Int32Array:
    """The buffer `[shape.num_elements]` for segments in packed order; what is left is padding.

    Where `shape` has room for more requests, the next one takes the tokens that are left, sees no
    keys and gets zeros. `into` is the buffer to fill, whatever stands there: page tables, which may
    be megabytes, are written as far as they are read, and not again where `written`, which is brought
    up to date, has the very same one in its place. Raises `ConfigError` for a draft tree beyond
    `MAX_TREE_NODES`, or what the shape cannot hold.
    """
    lengths = [len(segment.tokens) for segment in segments]
    _check_fit(segments, shape, sum(lengths))
    flat: Int32Array = np.zeros(shape.num_elements, dtype=np.int32) if into is None else into
    requests, tiles, nodes, pages, split_keys = shape.parts(flat)
    requests[:] = 0
    offsets = np.cumsum([0, *lengths])
    count = len(segments)
    requests[:count, 0] = offsets[:-1]
    requests[:count, 1] = lengths
    requests[:count, 2] = [segment.start - segment.table.shift for segment in segments]
    if count < shape.requests:
        requests[count] = offsets[-1], shape.tokens - offsets[-1], _NO_KEYS
    tiles[:] = _tile_rows(requests[:, 1], shape)
    nodes[:] = _node_rows(segments, shape)
    _fill_pages(pages, segments, block_size, [] if written is None else written)
    contexts, tokens = requests[:count, 2], requests[:count, 1]
    split_keys[:] = [plan.part_keys(contexts, tokens) for plan in shape.plans] or MIN_SPLIT_KEYS
    return flat


def _check_fit(segments: Sequence[Segment], shape: TableShape, num_tokens: int) -> None:
    full = len(segments) == shape.requests
    if len(segments) > shape.requests or num_tokens > shape.tokens:
        raise ConfigError(
            f"{len(segments)} requests with {num_tokens} tokens do not fit attention tables for "
            f"{shape.requests} and {shape.tokens}; use larger ones"
        )
    if full and num_tokens < shape.tokens:
        raise ConfigError(
            f"{shape.tokens - num_tokens} tokens of padding belong to no request; give the "
            "attention tables room for one more request"
        )


def _num_keys(segment: Segment) -> int:
    return segment.start - segment.table.shift + len(segment.tokens)


def _tile_rows(lengths: Int32Array, shape: TableShape) -> Int32Array:
    """`[tiles, 2]`; tiles that nobody needs begin behind the last token of request 0."""
    counts = -(-lengths // shape.tile_tokens)
    rows = np.empty((shape.tiles, 2), dtype=np.int32)
    owners = np.repeat(np.arange(len(lengths)), counts)
    used = len(owners)
    firsts = np.arange(used) - np.repeat(np.cumsum(counts) - counts, counts)
    rows[:used, 0] = owners
    rows[:used, 1] = firsts * shape.tile_tokens
    rows[used:] = 0, lengths[0]
    return rows


def _node_rows(segments: Sequence[Segment], shape: TableShape) -> Int32Array:
    """`[tokens, 4]`, for each packed token, counted from its segment's first.

    The last of the keys that it sees without gaps; its depth; and as two words of bits, which
    nodes of its draft tree it sees beyond: itself and those above it.
    """
    rows = np.zeros(shape.sections[2], dtype=np.int32)
    first = 0
    for segment in segments if shape.has_trees else ():
        own = rows[first : first + len(segment.tokens)]
        first += len(segment.tokens)
        own[:, 1] = segment.depths
        if segment.parents is None:
            own[:, 0] = own[:, 1]
        else:
            own[1:, 2:] = _ancestor_words(segment.parents)
    return rows


def _ancestor_words(parents: Sequence[int]) -> Int32Array:
    if len(parents) > MAX_TREE_NODES:
        raise ConfigError(
            f"a draft tree of {len(parents)} nodes; at most {MAX_TREE_NODES}: lower "
            "max_draft_tokens"
        )
    bits = np.zeros((len(parents), 2 * _WORD), dtype=np.uint8)
    bits[:, : len(parents)] = ancestors(parents)
    words: Int32Array = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    return words


def _fill_pages(
    pages: Int32Array, segments: Sequence[Segment], block_size: int, written: Written
) -> None:
    num_layers, *_, most = pages.shape
    for row, segment in enumerate(segments):
        blocks, count = segment.table.blocks, -(-_num_keys(segment) // block_size)
        if count > most or (blocks.ndim > 1 and blocks.shape[0] != num_layers):
            raise ConfigError(
                f"page tables of {blocks.shape[:-1]} x {count} pages do not fit attention tables "
                f"for {num_layers} layers and {most} pages; use larger ones"
            )
        if row < len(written) and written[row]() is blocks:
            continue
        listed = blocks[..., :most]
        pages[:, row, :, : listed.shape[-1]] = listed
        written[row : row + 1] = [ref(blocks)]
