"""Which shapes of forwards share a CUDA graph.

A captured graph has fixed shapes, so a forward is padded to the next ones. Knows segments; nothing
of graphs, devices or kernels.

    sizes    1 2 3 4 5 6 7 8 | 10 12 14 16 | 20 24 28 32 | 40 ...     a quarter of each octave
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdcontrol.engine.packing import Segment

__all__ = ["Bucket", "BucketLimits", "Buckets", "size_edges"]

_FEWEST_PAGES = 64  # 1000 tokens; from there in steps of four: wider tables cost next to nothing
_PAGE_STEP = 4  # but where each KV head of each layer has its own, which take megabytes


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """The largest forward that is captured; a larger one is prefill, or catching up."""

    requests: int
    query_tokens: int  # of one request
    pages: int  # of one request


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a captured forward."""

    requests: int
    tokens: int
    rows: int  # of logits
    query_tokens: int  # of a request that one tile of the attention takes
    pages: int  # of a request's page table
    page_layers: int = 1  # more than one where page tables differ by layer and KV head
    page_heads: int = 1
    has_trees: bool = False
    keeps_queries: bool = False  # for page scores


def size_edges(most: int) -> tuple[int, ...]:
    """Sizes to pad to, ascending, the last one `most`: at most a quarter of a size is padding."""
    edges: list[int] = []
    size = 1
    while size < most:
        edges.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(octave // 4, 1)
    return (*edges, most)


class Buckets:
    """Chooses the smallest bucket that holds a forward.

    `query_tile` gives, for the longest segment's tokens, how many of them one tile takes.
    """

    def __init__(self, limits: BucketLimits, query_tile: Callable[[int], int]) -> None:
        self._limits = limits
        self._query_tile = query_tile
        self._request_edges = size_edges(limits.requests)
        self.token_edges = size_edges(limits.requests * limits.query_tokens)
        self._page_edges = _page_edges(limits.pages)
        sizes = size_edges(limits.pages)
        self._own_page_edges = sizes[bisect_left(sizes, min(_FEWEST_PAGES, limits.pages)) :]

    def refusal(self, segments: Sequence[Segment]) -> str | None:
        """Why these are computed without a graph; None where there is a bucket for them."""
        limits = self._limits
        longest = max(len(segment.tokens) for segment in segments)
        if len(segments) > limits.requests or longest > limits.query_tokens:
            return "prefill or catch-up"
        if not all(segment.num_logits for segment in segments):
            return "prefill or catch-up"
        return None

    def bucket_of(
        self, segments: Sequence[Segment], block_size: int, *, keeps_queries: bool = False
    ) -> Bucket:
        """The bucket of segments that are not refused."""
        lengths = [len(segment.tokens) for segment in segments]
        kept = sum(segment.num_logits for segment in segments)
        requests = _next(self._request_edges, len(segments))
        tokens = _next(self.token_edges, max(sum(lengths), requests))
        pages = -(-max(s.start - s.table.shift + len(s.tokens) for s in segments) // block_size)
        per_head = [s.table.blocks.shape[:-1] for s in segments if s.table.blocks.ndim > 1]
        layers, heads = per_head[0] if per_head else (1, 1)
        return Bucket(
            requests=requests,
            tokens=tokens,
            rows=requests if kept <= requests else tokens,
            query_tokens=self._query_tile(max(lengths)),
            pages=_next(self._own_page_edges if per_head else self._page_edges, pages),
            page_layers=layers,
            page_heads=heads,
            has_trees=any(segment.parents is not None for segment in segments),
            keeps_queries=keeps_queries,
        )


def _next(edges: Sequence[int], size: int) -> int:
    return edges[bisect_left(edges, size)]


def _page_edges(most: int) -> tuple[int, ...]:
    edges: list[int] = []
    pages = _FEWEST_PAGES
    while pages < most:
        edges.append(pages)
        pages *= _PAGE_STEP
    return (*edges, most)
