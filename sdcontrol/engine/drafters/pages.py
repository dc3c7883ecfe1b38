"""Which cached pages the latest queries look at.

A page is summed up by the smallest and largest value of each key dimension; its score is the
largest product that any key inside those bounds could have with the mean query of the latest full
page of committed tokens (Tang et al. 2024, Quest). The window of queries is fixed to page
boundaries, so scores depend on committed tokens alone, never on where a step ended.

Knows blocks, keys and queries; nothing of drafts or budgets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from sdcontrol.engine.backends import PageBounds, page_bounds_of
from sdcontrol.engine.batch import Moves, Piece
from sdcontrol.engine.copies import upload
from sdcontrol.engine.drafters.host import DraftHost
from sdcontrol.engine.packing import IntArray
from sdcontrol.engine.request import Request
from sdcontrol.errors import ConfigError

__all__ = ["PageScorer", "WantedPages"]

_SUMMARISED = "page_summary"
_MOST_DRAFT_NODES = 64


@dataclass(frozen=True, slots=True)
class WantedPages:
    """The best `count` among pages `first` to `end` of a request, `end` not included."""

    request: Request
    first: int
    end: int
    count: int

    def blocks(self, page: int) -> IntArray:
        """Where those pages lie."""
        return self.request.page_table(page).blocks[self.first : self.end]


class PageScorer:
    """Queries of the latest tokens of each request, summaries of full pages, and choices of pages.

    ring of a request   | page w: scored with | tokens since, drafts | ...
    store               | ring of row 0 | ring of row 1 | ... | one slot for padding |
    """

    def __init__(self, host: DraftHost) -> None:
        layers = host.target.layers
        heads = {(layer.num_heads, layer.num_kv_heads, layer.key_dim) for layer in layers}
        if len(heads) > 1:
            raise ConfigError("scored pages need layers of one shape; use sparse_kv:<tokens>")
        self._host = host
        self._page = host.config.block_size
        self._ring = 2 * self._page + _MOST_DRAFT_NODES + 1
        self._num_heads, self._kv_heads, self._dim = heads.pop()
        self._num_layers = len(layers)
        self._queries: Tensor | None = None
        self._bounds: PageBounds | None = None
        self.forget_all()

    @property
    def bytes_per_token(self) -> int:
        """What bounds of pages take, shared out among the tokens of a page: two of every page."""
        layer = self._host.target.layers[0]
        bounds = 2 * self._num_layers * self._kv_heads * self._dim * layer.dtype.itemsize
        return -(-bounds // self._page)

    @property
    def fixed_bytes(self) -> int:
        """What kept queries take: made for a full batch."""
        itemsize = self._host.target.layers[0].dtype.itemsize
        return math.prod(self._store_shape) * itemsize

    def sink(self, pieces: Sequence[Piece]) -> "_Sink":
        """Takes the queries of these pieces' tokens, drafts included, in their order."""
        targets: list[list[int]] = []
        for piece in pieces:
            start = piece.request.scheduled.cached_tokens
            count = piece.num_new_tokens + len(piece.draft.tokens)
            base = self._row(piece.request) * self._ring
            targets.append([base + p % self._ring for p in range(start, start + count)])
        return _Sink(self._store(), targets, self._ring)

    def move(self, moves: Moves) -> None:
        """Queries follow the tokens of a compacted tree."""
        store = self._store()
        for request, sources, targets in moves:
            places = np.array([sources, targets], dtype=np.int64) % self._ring
            index = upload(self._row(request) * self._ring + places, store.device)
            store.index_copy_(2, index[1], store.index_select(2, index[0]))

    def forget(self, request_id: str) -> None:
        """The request ended or lost its cache."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        self._chosen.pop(request_id, None)

    def forget_all(self) -> None:
        """Every request lost its cache."""
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(self._host.config.max_batch_size))[::-1]
        self._chosen: dict[str, tuple[tuple[int, WantedPages], IntArray]] = {}  # by full pages

    def release(self) -> None:
        """The cache is gone."""
        self._queries = self._bounds = None

    def choose(self, wanted: Sequence[WantedPages]) -> list[IntArray]:
        """The best blocks of each, `[layers, kv_heads, count]`: one copy to the host for all.

        Kept until the next page is full.
        """
        keys = [(want.request.scheduled.cached_tokens // self._page, want) for want in wanted]
        known = [self._chosen.get(want.request.id) for want in wanted]
        stale = [key for key, own in zip(keys, known, strict=True) if own is None or own[0] != key]
        best = [self._best(want) for _, want in stale]
        if best:
            sizes = [pages.numel() for pages in best]
            there = torch.cat([pages.reshape(-1) for pages in best]).cpu().split(sizes)
            for key, pages, flat in zip(stale, best, there, strict=True):
                chosen = key[1].blocks(self._page)[flat.view(pages.shape).numpy()]
                self._chosen[key[1].request.id] = (key, chosen)
        return [self._chosen[want.request.id][1] for want in wanted]

    def _best(self, want: WantedPages) -> Tensor:
        """Indices of the best pages, ascending `[layers, kv_heads, count]`; on the device."""
        blocks = want.blocks(self._page)
        count = max(min(want.count, len(blocks)), 0)
        scores = self._scores(want.request, blocks)
        return scores.topk(count, dim=-1).indices.sort(dim=-1).values

    def _scores(self, request: Request, blocks: IntArray) -> Tensor:
        """`[layers, kv_heads, blocks]`: summed over the query heads that share a KV head."""
        bounds = self._summarised(blocks)
        return bounds.score(self._window(request), upload(blocks, self._host.target.device))

    def _window(self, request: Request) -> Tensor:
        """The mean query of the latest full page: float32 `[layers, kv_heads, shared, dim]`."""
        last_full = request.scheduled.cached_tokens // self._page - 1
        positions = np.arange(last_full * self._page, (last_full + 1) * self._page)
        index = self._row(request) * self._ring + positions % self._ring
        queries = self._store().index_select(2, upload(index, self._host.target.device))
        return queries.float().mean(dim=2).view(self._num_layers, self._kv_heads, -1, self._dim)

    def _summarised(self, blocks: IntArray) -> PageBounds:
        """Bounds of the keys, once pages that had none have theirs; a shared page is summed up once."""
        pool, cache = self._host.blocks, self._host.target.cache
        assert cache is not None
        if self._bounds is None:
            self._bounds = page_bounds_of(cache)
        new = [block for block in blocks.tolist() if not pool.is_marked(block, _SUMMARISED)]
        if new:
            index = np.array(new, dtype=np.int64)
            self._bounds.summarise(upload(index, self._host.target.device))
        for block in new:
            pool.mark(block, _SUMMARISED)
        return self._bounds

    def _row(self, request: Request) -> int:
        if request.id not in self._rows:
            self._rows[request.id] = self._free_rows.pop()
        return self._rows[request.id]

    @property
    def _store_shape(self) -> tuple[int, int, int, int]:
        rows = self._host.config.max_batch_size * self._ring + 1
        return (self._num_layers, self._num_heads, rows, self._dim)

    def _store(self) -> Tensor:
        """`[layers, heads, rows * ring + 1, dim]`."""
        if self._queries is None:
            runner = self._host.target
            self._queries = torch.zeros(
                self._store_shape, dtype=runner.layers[0].dtype, device=runner.device
            )
        return self._queries


class _Sink:
    """One forward's queries on their way into the rings."""

    def __init__(self, store: Tensor, targets: Sequence[Sequence[int]], ring: int) -> None:
        self._store = store
        self._targets = targets
        self._ring = ring
        self._from = torch.empty(0, dtype=torch.int64)
        self._to = torch.empty(0, dtype=torch.int64)

    def arrange(self, order: Sequence[int]) -> None:
        """Learn in which order the pieces are packed; of a long piece the end is kept."""
        sources: list[int] = []
        targets: list[int] = []
        offset = 0
        for index in order:
            count = len(self._targets[index])
            kept = min(count, self._ring)
            sources.extend(range(offset + count - kept, offset + count))
            targets.extend(self._targets[index][count - kept :])
            offset += count
        places = upload(np.array([sources, targets], dtype=np.int64), self._store.device)
        self._from, self._to = places[0], places[1]

    def slots(self, num_tokens: int) -> list[int]:
        """See `QuerySink`; the last slot of the store is for padding."""
        slots = list(chain.from_iterable(self._targets))
        return slots + [self._store.shape[2] - 1] * (num_tokens - len(slots))

    def at(self, slots: Tensor) -> "_FixedSink":
        """See `QuerySink`."""
        return _FixedSink(self._store, slots)

    def store(self, layer: int, query: Tensor) -> None:
        """Keep the packed queries `[heads, tokens, key_dim]` of one layer."""
        self._store[layer].index_copy_(1, self._to, query.index_select(1, self._from))


class _FixedSink(_Sink):
    """Takes packed tokens one to one, to slots that are read on the device."""

    def __init__(self, store: Tensor, slots: Tensor) -> None:
        super().__init__(store, (), 0)
        self._to = slots

    def arrange(self, order: Sequence[int]) -> None:
        """Nothing to learn."""

    def store(self, layer: int, query: Tensor) -> None:
        """Keep the packed queries `[heads, tokens, key_dim]` of one layer."""
        self._store[layer].index_copy_(1, self._to, query)
