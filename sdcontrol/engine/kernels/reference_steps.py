"""The small kernels in plain torch, with the kernels' signatures: what those are compared with.

Knows tensors alone. Attention has its twin in `reference`, what writes the cache in `KVCache`.
"""

import torch
from torch import Tensor

from sdcontrol.engine.gumbel_max import greedy_argmax, gumbel_argmax
from sdcontrol.engine.kv_cache import KVCache
from sdcontrol.engine.noise import TARGET

__all__ = ["TorchPageBounds", "sample_scores", "walk_drafts"]


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
    stands: Tensor | None = None,
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
            place = first_node + child
            sample = samples[first_row + 1 + node]
            does_stand = draft_tokens[place] == sample if stands is None else stands[place] != 0
            if int(parents[place]) == node and does_stand:
                path.append(child)
                node = child
        outcome = [len(path), int(samples[first_row + 1 + node]), *path]
        verdicts[request, : len(outcome)] = torch.tensor(outcome)


class TorchPageBounds:
    """See `page_kernels.TritonPageBounds`."""

    def __init__(self, cache: KVCache) -> None:
        kv_heads, _, dim = cache.keys[0].shape
        self.low = cache.keys[0].new_zeros((len(cache.keys), kv_heads, cache.num_blocks, dim))
        self.high = torch.zeros_like(self.low)
        self._cache = cache

    def summarise(self, blocks: Tensor) -> None:
        """Take in the keys that lie in `blocks` `[n]` now."""
        _, kv_heads, num_blocks, dim = self.low.shape
        for layer, keys in enumerate(self._cache.keys):
            paged = keys.view(kv_heads, num_blocks, self._cache.block_size, dim)
            self.low[layer, :, blocks], self.high[layer, :, blocks] = paged[:, blocks].aminmax(
                dim=2
            )

    def score(self, queries: Tensor, blocks: Tensor) -> Tensor:
        """Scores of the pages of one request, float32 `[layers, kv_heads, pages]`."""
        low = self.low[:, :, blocks].float().transpose(2, 3)  # [layers, kv_heads, dim, pages]
        high = self.high[:, :, blocks].float().transpose(2, 3)
        return (queries.clamp(min=0) @ high + queries.clamp(max=0) @ low).sum(dim=2)
