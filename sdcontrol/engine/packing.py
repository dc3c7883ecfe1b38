"""Pack ragged pieces of many requests into one forward.

Turns segments (tokens, where they go, what they may see) into the flat tensors that a forward
reads. Knows nothing of models, drafters or the scheduler.

    segments    [a a a][b][c c]            one after the other in one packed row
    groups      {b} {a c}                  requests of like shape, padded to a rectangle each
    a query at slot s of its request sees key indices 0 .. limit, limit = s - shift
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdcontrol.engine.drafters.base import ROOT

__all__ = ["AttentionGroup", "PackedBatch", "PageTable", "Segment", "pack", "upload"]

IntArray = NDArray[np.int64]
MAX_GROUPED_TOKENS = 64  # longer segments (prefill) are attended alone
_STEPS: IntArray = np.arange(1 << 16)
NEGLIGIBLE_KEYS = 128  # padding below this is cheaper than another group
GROUP_WORK = 25_000.0  # queries times keys that take as long as another group, with four heads


@dataclass(frozen=True, slots=True)
class PageTable:
    """Which blocks a segment's keys lie in.

    `blocks` is `[pages]`, or `[layers, kv_heads, pages]` where layers and heads differ. A dense
    table lists every block and has `shift` 0; a sparse one leaves out `shift` tokens, all before
    its last, uncommitted pages.
    """

    blocks: IntArray
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
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


@dataclass(slots=True)
class AttentionGroup:
    """Segments attended together, padded to a rectangle of queries and of keys."""

    first_token: int  # the group's tokens stand at [first_token, first_token + num_tokens)
    num_tokens: int
    lengths: list[int]
    limits: Tensor  # [requests, queries]: the last key index that a query sees
    starts: list[int]  # key index of each segment's first token
    num_keys: int
    trees: list[tuple[int, ...] | None]
    first_slots: list[int] | None  # not None: each request's keys are consecutive from its slot
    scatter: Tensor | None  # [num_tokens] index into requests * queries; None: no padding
    members: Sequence[Segment]
    block_size: int
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
        """Width of the rectangle of queries."""
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
            self._pages = torch.from_numpy(pages).to(self.limits.device)
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
    group_work: float = GROUP_WORK,
) -> PackedBatch:
    """Lay the segments out in one row, grouped for attention.

    `group_work` is what another group costs on a CPU: that many queries, times their keys.
    """
    clusters = _cluster(segments)
    if device.type == "cpu":  # a GPU's kernel pads nothing, and every group costs uploads
        clusters = [part for cluster in clusters for part in _parts(segments, cluster, group_work)]
    order = [index for cluster in clusters for index in cluster]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    kept: list[int] = []
    first_row = [0] * len(segments)
    for index in order:
        segment = segments[index]
        tokens.extend(segment.tokens)
        start = segment.start
        positions.extend([start + depth for depth in segment.depths])
        slots.extend(segment.slots)
        first_row[index] = len(kept)
        kept.extend(range(len(tokens) - segment.num_logits, len(tokens)))
    groups = _groups(segments, clusters, block_size, device)
    flat = torch.tensor([tokens, positions, slots], dtype=torch.int64).to(device)
    return PackedBatch(
        input_ids=flat[:1],
        positions=flat[1:2],
        slots=flat[2],
        logit_rows=torch.tensor(kept, dtype=torch.int64).to(device),
        first_row=first_row,
        groups=groups,
        order=order,
    )


def upload(values: IntArray, device: torch.device) -> Tensor:
    """The values on `device`; without waiting for what that was asked to do before."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
    segments: Sequence[Segment], cluster: Sequence[int], group_work: float
) -> list[list[int]]:
    """The cluster, cut by length where that saves more padding than another group costs.

    The best of all cuts: of the longest ones, and of what is left by the best cut of it.
    """
    by_length: dict[int, list[int]] = {}
    for index in cluster:
        by_length.setdefault(len(segments[index].tokens), []).append(index)
    if len(by_length) == 1:
        return [list(cluster)]
    lengths = sorted(by_length, reverse=True)
    group = group_work / max(_num_keys(segments[index]) for index in cluster)  # in queries
    best = [(0.0, 0)]  # of the first lengths: queries, and where the last part begins
    for end in range(1, len(lengths) + 1):
        members, cuts = 0, []
        for first in range(end - 1, -1, -1):
            members += len(by_length[lengths[first]])
            cuts.append((best[first][0] + group + lengths[first] * members, first))
        best.append(min(cuts))
    parts: list[list[int]] = []
    end = len(lengths)
    while end:
        first = best[end][1]
        parts.insert(0, sorted(i for length in lengths[first:end] for i in by_length[length]))
        end = first
    return parts


def _belongs(longest: Segment, other: Segment) -> bool:
    if longest.table.blocks.ndim != other.table.blocks.ndim:
        return False
    keys, most = _num_keys(other), _num_keys(longest)
    return 2 * keys >= most or most - keys <= NEGLIGIBLE_KEYS


def _groups(
    segments: Sequence[Segment],
    clusters: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
) -> list[AttentionGroup]:
    groups: list[AttentionGroup] = []
    first_token = 0
    for cluster in clusters:
        members = [segments[index] for index in cluster]
        groups.append(_group(members, first_token, block_size, device))
        first_token += groups[-1].num_tokens
    return groups


def _group(
    members: Sequence[Segment], first_token: int, block_size: int, device: torch.device
) -> AttentionGroup:
    lengths = [len(segment.tokens) for segment in members]
    queries = max(lengths)
    starts = [segment.start - segment.table.shift for segment in members]
    limits = np.array(starts, dtype=np.int64)[:, None] + np.arange(queries)[None, :]
    padded = min(lengths) < queries
    return AttentionGroup(
        first_token=first_token,
        num_tokens=sum(lengths),
        lengths=lengths,
        limits=torch.from_numpy(limits).to(device),
        starts=starts,
        num_keys=max(_num_keys(segment) for segment in members),
        trees=[segment.parents for segment in members],
        first_slots=_first_slots(members, block_size),
        scatter=_scatter(lengths, queries).to(device) if padded else None,
        members=members,
        block_size=block_size,
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
        if blocks.ndim > 1 or not (blocks[1:count] == blocks[0] + _STEPS[1:count]).all():
            return None
        slots.append(int(blocks[0]) * block_size)
    return slots


def _scatter(lengths: Sequence[int], queries: int) -> Tensor:
    rows = [np.arange(length) + row * queries for row, length in enumerate(lengths)]
    return torch.from_numpy(np.concatenate(rows))


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """`[nodes, nodes]`: whether node j is node i or stands on its path to the root."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            seen[node] |= seen[parent]
    return seen
