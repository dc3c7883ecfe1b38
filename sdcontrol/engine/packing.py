"""Pack ragged pieces of many requests into one forward.

Turns segments (tokens, where they go, what they may see) into the flat tensors that a forward
reads. Knows nothing of models, drafters or the scheduler.

    segments    [a a a][b][c c]            one after the other in one packed row
    groups      {a c b}                    requests of like context, whose keys are fetched together
    parts       {a c} {b}                  requests of like length, padded to a rectangle each
    a query at slot s of its request sees key indices 0 .. limit, limit = s - shift
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdcontrol.engine.copies import upload
from sdcontrol.engine.cutting import cut_by_length
from sdcontrol.engine.drafters.base import ROOT

__all__ = [
    "AttentionGroup",
    "PackedBatch",
    "PageTable",
    "Part",
    "Segment",
    "pack",
]

IntArray = NDArray[np.int64]
MAX_GROUPED_TOKENS = 64  # longer segments (prefill) are attended alone
_STEPS: IntArray = np.arange(1 << 16)
NEGLIGIBLE_KEYS = 128  # padding below this is cheaper than another group
PART_WORK = 25_000.0  # queries times keys that take as long as another part, with four heads


class PageTable(NamedTuple):
    """Which blocks a segment's keys lie in.

    `blocks` is `[pages]`, or `[layers, kv_heads, pages]` where layers and heads differ. A dense
    table lists every block and has `shift` 0; a sparse one leaves out `shift` tokens, all before
    its last, uncommitted pages.
    """

    blocks: IntArray
    shift: int = 0


class Segment(NamedTuple):
    """Consecutive tokens of one request, or a draft tree hanging on the first of them."""

    tokens: Sequence[int]
    start: int  # position and slot of the first token
    table: PageTable
    slots: Sequence[int]  # where keys and values go
    num_logits: int = 1  # logits are wanted for this many of the last tokens
    parents: tuple[int, ...] | None = None  # tree: of tokens[1:]; None: a chain

    @property
    def depths(self) -> Sequence[int]:
        """Position of each token, counted from `start`."""
        if self.parents is None:
            return range(len(self.tokens))
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return depths

    @property
    def positions(self) -> Sequence[int]:
        """Of each token in its request."""
        start = self.start
        if self.parents is None:
            return range(start, start + len(self.tokens))
        return [start + depth for depth in self.depths]


class Part(NamedTuple):
    """Requests of a group, from the `first` on, padded to `width` queries each."""

    first: int
    num_requests: int
    width: int


@dataclass(slots=True)
class AttentionGroup:
    """Segments attended together: keys padded to those of the longest, queries by parts."""

    first_token: int  # the group's tokens stand at [first_token, first_token + num_tokens)
    num_tokens: int
    lengths: list[int]
    starts: list[int]  # key index of each segment's first token
    num_keys: int
    trees: list[tuple[int, ...] | None]
    first_slots: list[int] | None  # not None: each request's keys are consecutive from its slot
    parts: list[Part]  # of all requests, in their order
    members: Sequence[Segment]
    block_size: int
    device: torch.device
    masks: dict[tuple[int | None, torch.dtype, int, int], Tensor | None] = field(
        default_factory=dict
    )
    folds: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _pages: Tensor | None = None  # made when a gather first asks for them

    @property
    def num_requests(self) -> int:
        """Segments in this group."""
        return len(self.lengths)

    @property
    def num_queries(self) -> int:
        """Of the longest segment."""
        return max(self.lengths)

    @property
    def is_full_causal(self) -> bool:
        """One whole sequence from its first token on: the plain causal triangle."""
        only = self.num_requests == 1 and self.trees[0] is None
        return only and self.starts[0] == 0 and self.num_keys == self.lengths[0]

    def pages_of(self, layer: int) -> Tensor:
        """The page tables of one layer: `[requests, pages]` or `[requests, kv_heads, pages]`."""
        if self._pages is None:
            pages = _pages(self.members, self.block_size)
            self._pages = upload(pages, self.device)
        return self._pages[layer] if self._pages.dim() == 4 else self._pages


@dataclass(slots=True)
class PackedBatch:
    """One forward: packed tokens, where they are written, who sees what."""

    input_ids: Tensor  # [1, tokens]
    positions: Tensor  # [1, tokens]
    slots: Tensor  # [tokens]
    logit_rows: Tensor  # [kept] index into tokens
    first_row: list[int]  # per segment, in the caller's order: its first row among the kept
    groups: list[AttentionGroup]
    order: list[int]  # segments in packed order


def pack(
    segments: Sequence[Segment],
    block_size: int,
    device: torch.device,
    part_work: float = PART_WORK,
) -> PackedBatch:
    """Lay the segments out in one row, grouped for attention.

    `part_work` is what another part of a group costs on a CPU: that many queries, times their keys.
    """
    clusters = [[[0]]]
    if len(segments) > 1:
        pads, found = device.type == "cpu", _cluster(segments)  # a GPU's kernel does not pad
        clusters = [_parts(segments, one, part_work) if pads else [one] for one in found]
    order = [index for parts in clusters for part in parts for index in part]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    kept: list[int] = []
    first_row = [0] * len(segments)
    for index in order:
        segment = segments[index]
        tokens.extend(segment.tokens)
        positions.extend(segment.positions)
        slots.extend(segment.slots)
        first_row[index] = len(kept)
        kept.extend(range(len(tokens) - segment.num_logits, len(tokens)))
    groups = _groups(segments, clusters, block_size, device)
    count = len(tokens)
    flat = upload(np.array([*tokens, *positions, *slots, *kept], dtype=np.int64), device)
    return PackedBatch(
        input_ids=flat[:count].view(1, count),
        positions=flat[count : 2 * count].view(1, count),
        slots=flat[2 * count : 3 * count],
        logit_rows=flat[3 * count :],
        first_row=first_row,
        groups=groups,
        order=order,
    )


def _num_keys(segment: Segment) -> int:
    return segment.start - segment.table.shift + len(segment.tokens)


def _cluster(segments: Sequence[Segment]) -> list[list[int]]:
    """Indices of segments to attend together: keys within a factor; long ones alone."""
    alone = [[i] for i, s in enumerate(segments) if len(s.tokens) > MAX_GROUPED_TOKENS]
    short = [i for i, s in enumerate(segments) if len(s.tokens) <= MAX_GROUPED_TOKENS]
    short.sort(key=lambda i: (segments[i].table.blocks.ndim, -_num_keys(segments[i]), i))
    clusters: list[list[int]] = []
    for index in short:
        if clusters and _belongs(segments[clusters[-1][0]], segments[index]):
            clusters[-1].append(index)
        else:
            clusters.append([index])
    return [sorted(cluster) for cluster in clusters] + alone


def _parts(
    segments: Sequence[Segment], cluster: Sequence[int], part_work: float
) -> list[list[int]]:
    """The cluster, cut by length where that saves more padding than another part costs."""
    most_keys = max(_num_keys(segments[index]) for index in cluster)
    lengths = [len(segments[index].tokens) for index in cluster]
    return [[cluster[i] for i in part] for part in cut_by_length(lengths, part_work / most_keys)]


def _belongs(longest: Segment, other: Segment) -> bool:
    if longest.table.blocks.ndim != other.table.blocks.ndim:
        return False
    keys, most = _num_keys(other), _num_keys(longest)
    return 2 * keys >= most or most - keys <= NEGLIGIBLE_KEYS


def _groups(
    segments: Sequence[Segment],
    clusters: Sequence[Sequence[Sequence[int]]],
    block_size: int,
    device: torch.device,
) -> list[AttentionGroup]:
    groups: list[AttentionGroup] = []
    first_token = 0
    for cluster in clusters:
        parts = [[segments[index] for index in part] for part in cluster]
        groups.append(_group(parts, first_token, block_size, device))
        first_token += groups[-1].num_tokens
    return groups


def _group(
    parts: Sequence[Sequence[Segment]], first_token: int, block_size: int, device: torch.device
) -> AttentionGroup:
    members = [segment for part in parts for segment in part]
    lengths = [len(segment.tokens) for segment in members]
    return AttentionGroup(
        first_token=first_token,
        num_tokens=sum(lengths),
        lengths=lengths,
        starts=[segment.start - segment.table.shift for segment in members],
        num_keys=max(_num_keys(segment) for segment in members),
        trees=[segment.parents for segment in members],
        first_slots=_first_slots(members, block_size),
        parts=_rectangles(parts),
        members=members,
        block_size=block_size,
        device=device,
    )


def _pages(members: Sequence[Segment], block_size: int) -> IntArray:
    """Page tables padded with the null block 0, `[requests, pages]` or with layers and heads."""
    counts = [-(-_num_keys(segment) // block_size) for segment in members]
    lead = members[0].table.blocks.shape[:-1]
    pages = np.zeros((len(members), *lead, max(counts)), dtype=np.int64)
    for row, (segment, count) in enumerate(zip(members, counts, strict=True)):
        pages[row, ..., :count] = segment.table.blocks[..., :count]
    return np.ascontiguousarray(np.moveaxis(pages, 0, 1)) if lead else pages


def _first_slots(members: Sequence[Segment], block_size: int) -> list[int] | None:
    """Where each segment's keys begin, if those of all lie in consecutive blocks."""
    slots: list[int] = []
    for segment in members:
        blocks = segment.table.blocks
        count = -(-_num_keys(segment) // block_size)
        if blocks.ndim > 1:
            return None
        first, end = int(blocks[0]), int(blocks[0]) + count
        steps = _STEPS[first:end] if end <= len(_STEPS) else np.arange(first, end)
        if blocks[:count].tobytes() != steps.tobytes():
            return None
        slots.append(first * block_size)
    return slots


def _rectangles(parts: Sequence[Sequence[Segment]]) -> list[Part]:
    first, rectangles = 0, []
    for part in parts:
        rectangles.append(Part(first, len(part), max(len(segment.tokens) for segment in part)))
        first += len(part)
    return rectangles


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """`[nodes, nodes]`: whether node j is node i or stands on its path to the root."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            seen[node] |= seen[parent]
    return seen
