"""The small kernels against their torch twins: cache, page scores, sampling, the walk."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdcontrol.engine.gumbel_max import INVALID
from sdcontrol.engine.kernels import cache_kernels, coupled_kernels
from sdcontrol.engine.kernels import reference_steps as twins
from sdcontrol.engine.kernels.page_kernels import TritonPageBounds
from sdcontrol.engine.kernels.triton_attention import IS_INTERPRETED
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.noise import DRAFT, TARGET

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_cache(
    seed: int, dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (24, 40), page: int = 16
) -> KVCache:
    layer = LayerShape(4, 2, *dims, dtype)
    cache = KVCache([layer] * 3, num_blocks=9, block_size=page, device=DEVICE)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def int64(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device=DEVICE)


def assert_same_cache(cache: KVCache, other: KVCache) -> None:
    pairs = zip((*cache.keys, *cache.values), (*other.keys, *other.values), strict=True)
    for tensor, expected in pairs:
        assert torch.equal(tensor, expected)


# Cache


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_keys_and_values_are_written_where_they_belong(dtype: torch.dtype) -> None:
    """From strided tensors, as models give them; nothing else is touched."""
    cache, twin = random_cache(0, dtype), random_cache(0, dtype)
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(11, 2, 24, generator=generator).to(DEVICE, dtype).transpose(0, 1)
    values = torch.randn(11, 2, 40, generator=generator).to(DEVICE, dtype).transpose(0, 1)
    slots = int64(np.random.default_rng(0).permutation(9 * 16)[:11])
    cache_kernels.write_tokens(cache.keys[1], cache.values[1], slots, keys, values)
    twin.write(1, slots, keys, values)
    assert_same_cache(cache, twin)


@settings(max_examples=15)
@given(seed=st.integers(0, 999), dtype=st.sampled_from(TYPES), dim=st.sampled_from([24, 32]))
def test_accepted_paths_are_compacted_in_every_layer(
    seed: int, dtype: torch.dtype, dim: int
) -> None:
    """Of several requests at once, more tokens than a tile; targets may be sources further on."""
    rng = np.random.default_rng(seed)
    cache, twin = random_cache(seed, dtype, (24, dim)), random_cache(seed, dtype, (24, dim))
    sources, targets = [], []
    for slots in rng.permutation(9 * 16).reshape(3, -1):
        path = np.sort(rng.permutation(len(slots))[: rng.integers(0, 30)])
        sources += [slots[node] for depth, node in enumerate(path) if node != depth]
        targets += [slots[depth] for depth, node in enumerate(path) if node != depth]
    cache_kernels.CacheTensors((*cache.keys, *cache.values)).move(int64(sources), int64(targets))
    twin.move(int64(sources), int64(targets))
    assert_same_cache(cache, twin)


# Pages


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("page", [16, 24])
def test_pages_are_summed_up_and_scored_as_their_twin_does(dtype: torch.dtype, page: int) -> None:
    cache = random_cache(2, dtype, page=page)
    kernel, twin = TritonPageBounds(cache), twins.TorchPageBounds(cache)
    blocks = int64([7, 2, 5, 1])
    queries = torch.randn(3, 2, 2, 24, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for bounds in (kernel, twin):
        bounds.summarise(blocks)
    assert torch.equal(kernel.low, twin.low)
    assert torch.equal(kernel.high, twin.high)
    assert kernel.low.dtype == dtype
    for some in (blocks, blocks[:1], int64([])):
        scores = kernel.score(queries, some)
        torch.testing.assert_close(scores, twin.score(queries, some), rtol=1e-5, atol=1e-5)


def test_scores_of_pages_are_float32_whatever_torch_makes_by_default() -> None:
    bounds = TritonPageBounds(random_cache(2))
    queries = torch.randn(3, 2, 2, 24).to(DEVICE)
    expected = bounds.score(queries, int64([1, 2]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        scores = bounds.score(queries, int64([1, 2]))
        torch.testing.assert_close(scores, expected, rtol=0, atol=0)  # of the same type
    finally:
        torch.set_default_dtype(torch.float32)


@settings(max_examples=15)
@given(seed=st.integers(0, 999))
def test_no_key_of_a_page_beats_its_score(seed: int) -> None:
    cache = random_cache(seed)
    bounds = TritonPageBounds(cache)
    bounds.summarise(int64([4, 6]))
    queries = torch.randn(3, 2, 1, 24, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    scores = bounds.score(queries, int64([4, 6]))
    for layer, keys in enumerate(cache.keys):
        paged = keys.view(2, 9, 16, 24)[:, [4, 6]]
        best = torch.einsum("hgd,hptd->hpt", queries[layer], paged).amax(dim=2)
        assert (best <= scores[layer] + 1e-4).all()


# Sampling


def check_samples(scores: Tensor, seed: int, stream: int = TARGET) -> Tensor:
    rng = np.random.default_rng(seed)
    rows = len(scores)
    seeds = int64(rng.integers(-(1 << 63), 1 << 63, rows))
    positions = int64(rng.integers(0, 1 << 17, rows))
    is_sampled = int64(rng.integers(0, 2, rows))
    ours = coupled_kernels.sample_scores(scores, seeds, positions, is_sampled, stream=stream)
    tokens, confidence = twins.sample_scores(scores, seeds, positions, is_sampled, stream=stream)
    assert torch.equal(ours.tokens, tokens)
    torch.testing.assert_close(ours.confidence, confidence, rtol=1e-4, atol=1e-6)
    return ours.tokens.masked_fill(is_sampled == 0, 0)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    vocab_size=st.sampled_from([1, 50, 1024, 2500, 5000]),
    spread=st.sampled_from([0.0, 1.0, 8.0]),
    dtype=st.sampled_from(TYPES),
)
def test_samples_are_those_of_the_twin(
    seed: int, vocab_size: int, spread: float, dtype: torch.dtype
) -> None:
    """Greedy and sampled rows beside each other, for any seed, ties included."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, vocab_size, generator=generator) * spread
    scores[1, vocab_size // 3 :] = -math.inf
    scores[2] = scores[2].round()
    check_samples(scores.to(DEVICE, dtype), seed, DRAFT if seed % 2 else TARGET)


def test_long_parts_give_what_short_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupled_kernels, "_ENOUGH_PROGRAMS", 0)
    scores = torch.randn(4, 9000, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    check_samples(scores, 4)


def test_what_cannot_be_sampled_is_told_and_argmax_is_torchs() -> None:
    scores = torch.randn(5, 1500, generator=torch.Generator().manual_seed(5))
    scores[0, 1100] = math.nan
    scores[1, [3, 1300]] = math.inf
    scores[2] = -math.inf
    scores[3, 7], scores[3, 1200] = math.inf, math.nan
    for seed in range(6):
        check_samples(scores.to(DEVICE), seed)
    every = torch.ones(5, dtype=torch.int64, device=DEVICE)
    tokens = coupled_kernels.sample_scores(scores.to(DEVICE), every, every, every).tokens
    assert (tokens[:4] == INVALID).all()
    assert tokens[4] != INVALID


# The walk


@settings(max_examples=40)
@given(st.integers(0, 9999))
def test_drafts_are_walked_as_their_twin_does(seed: int) -> None:
    """Chains and trees, siblings with the same token, no draft at all, rows in any order.

    With acceptances given or not.
    """
    rng = np.random.default_rng(seed)
    num_nodes = rng.integers(0, 9, 4)
    first_nodes = np.cumsum([0, *num_nodes[:-1]])
    first_rows = np.cumsum([0, *(num_nodes[:0:-1] + 1)])[::-1].copy()
    parents = [
        node - 1 if chain else int(rng.integers(-1, node))
        for count, chain in zip(num_nodes, rng.random(4) < 0.3, strict=True)
        for node in range(count)
    ]
    tokens = int64(rng.integers(0, 3, num_nodes.sum()))
    samples = int64(rng.integers(-1, 3, (num_nodes + 1).sum()))
    stands = int64(rng.integers(0, 2, num_nodes.sum())) if seed % 2 else None
    ours, expected = int64(np.zeros((4, 11))), int64(np.zeros((4, 11)))
    for walk, verdicts in ((coupled_kernels.walk_drafts, ours), (twins.walk_drafts, expected)):
        walk(
            samples,
            tokens,
            int64(parents),
            stands,
            first_rows=int64(first_rows),
            first_nodes=int64(first_nodes),
            num_nodes=int64(num_nodes),
            verdicts=verdicts,
        )
    assert torch.equal(ours, expected)
