"""The small kernels in plain torch, with the kernels' signatures: what those are compared with.

Knows tensors alone. Attention has its twin in `reference`.
"""

import torch
from torch import Tensor

from sdcontrol.engine.gumbel_max import greedy_argmax, gumbel_argmax
from sdcontrol.engine.kv_cache import KVCache
from sdcontrol.engine.noise import TARGET

__all__ = ["TorchPageBounds", "compact", "sample_scores", "walk_drafts", "write_tokens"]


def write_tokens(
    key_cache: Tensor, value_cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """See `cache_kernels.write_tokens`."""
    key_cache.index_copy_(1, slots, keys)
    value_cache.index_copy_(1, slots, values)


def compact(cache: KVCache, slots: Tensor, first_nodes: Tensor, verdicts: Tensor) -> None:
    """See `cache_kernels.CacheTensors.compact`."""
    for row, (count, _, *path) in enumerate(verdicts.tolist()):
        own = slots[int(first_nodes[row]) :]
        cache.move(own[torch.tensor(path[:count], dtype=torch.int64)], own[:count])


def sample_scores(
    scores: Tensor, seeds: Tensor, positions: Tensor, is_sampled: Tensor, *, stream: int = TARGET
) -> tuple[Tensor, Tensor]:
    """Tokens and confidence: see `coupled_kernels.sample_scores`."""
    scores = scores.float()
    sampled = gumbel_argmax(scores, seeds.tolist(), positions.tolist(), stream)
    largest = (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp()
    tokens = torch.where(is_sampled.bool(), sampled, greedy_argmax(scores))
    return tokens, largest.nan_to_num(0.0).clamp(max=1.0)


def walk_drafts(
    samples: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    *,
    first_rows: Tensor,
    first_nodes: Tensor,
    num_nodes: Tensor,
    verdicts: Tensor,
) -> None:
    """See `coupled_kernels.walk_drafts`."""
    tasks = torch.stack((first_rows, first_nodes, num_nodes), dim=1).tolist()
    for request, (first_row, first_node, count) in enumerate(tasks):
        path: list[int] = []
        node = -1
        for child in range(count):
            sample = samples[first_row + 1 + node]
            is_child = int(parents[first_node + child]) == node
            if is_child and draft_tokens[first_node + child] == sample:
                path.append(child)
                node = child
        outcome = [len(path), int(samples[first_row + 1 + node]), *path]
        verdicts[request, : len(outcome)] = torch.tensor(outcome)


class TorchPageBounds:
    """See `page_kernels.PageBounds`."""

    def __init__(self, cache: KVCache) -> None:
        kv_heads, _, dim = cache.keys[0].shape
        shape = (len(cache.keys), kv_heads, cache.num_blocks, dim)
        self.low = torch.zeros(shape, device=cache.keys[0].device)
        self.high = torch.zeros_like(self.low)
        self._cache = cache

    def summarise(self, blocks: Tensor) -> None:
        """Take in the keys that lie in `blocks` `[n]` now."""
        _, kv_heads, num_blocks, dim = self.low.shape
        for layer, keys in enumerate(self._cache.keys):
            paged = keys.view(kv_heads, num_blocks, self._cache.block_size, dim)
            low, high = paged[:, blocks].float().aminmax(dim=2)
            self.low[layer, :, blocks] = low
            self.high[layer, :, blocks] = high

    def score(self, queries: Tensor, blocks: Tensor, counts: Tensor) -> Tensor:
        """Scores of pages, float32 `[requests, layers, kv_heads, pages]`; -inf where is none."""
        scores: list[Tensor] = []
        for query, row, count in zip(queries, blocks, counts, strict=True):
            low = self.low[:, :, row].transpose(2, 3)  # [layers, kv_heads, dim, pages]
            high = self.high[:, :, row].transpose(2, 3)
            score = (query.clamp(min=0) @ high + query.clamp(max=0) @ low).sum(dim=2)
            absent = torch.arange(len(row), device=row.device) >= count
            scores.append(score.masked_fill(absent, float("-inf")))
        return torch.stack(scores)
