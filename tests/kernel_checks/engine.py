"""The kernels and twins against the parts of the engine whose work they take over."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdcontrol.engine.drafters.base import Draft
from sdcontrol.engine.drafters.pages import PageScorer
from sdcontrol.engine.kernels import coupled_kernels
from sdcontrol.engine.kernels.page_kernels import PageBounds
from sdcontrol.engine.kernels.reference import TorchAttention
from sdcontrol.engine.kernels.triton_attention import IS_INTERPRETED, TritonAttention
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.packing import PageTable, Segment
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.sampling import RowSampler
from sdcontrol.engine.verify import CoupledVerifier, VerifyTask
from sdcontrol.scheduling.blocks import BlockPool
from tests.engine_support import VOCAB, random_prompt, tiny_model

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
PAGE = 16


# A model's forward


def segment(
    prompt: list[int], start: int, tokens: list[int], parents: tuple[int, ...] | None = None
) -> Segment:
    blocks = np.array([6, 2, 9, 4, 7]) + 10 * (len(prompt) % 3)  # out of order, each its own
    places = range(start, start + len(tokens))
    slots = [int(blocks[place // PAGE]) * PAGE + place % PAGE for place in places]
    return Segment(tokens, start, PageTable(blocks), slots, len(tokens), parents)


@pytest.mark.parametrize("architecture", ["Llama", "Mistral"])
def test_a_model_gives_the_same_logits_with_either_backend(architecture: str) -> None:
    """Two requests prefilled in chunks; then one decodes, and one verifies a tree."""
    prompts = [random_prompt(length, seed=length) for length in (37, 50)]
    steps = [
        [segment(prompts[0], 0, prompts[0]), segment(prompts[1], 0, prompts[1][:20])],
        [segment(prompts[0], 37, [5]), segment(prompts[1], 20, prompts[1][20:])],
        [segment(prompts[0], 38, [7]), segment(prompts[1], 50, [1, 2, 3, 4, 5], (-1, 0, -1, 2))],
    ]
    logits: list[list[Tensor]] = []
    for backend in (TorchAttention(), TritonAttention(num_splits=2)):
        runner = ModelRunner(tiny_model(architecture).to(DEVICE), backend)
        runner.allocate(32, PAGE)
        logits.append([runner.forward(step)[0] for step in steps])
    for expected, ours in zip(*logits, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


# Verification


@settings(max_examples=10)
@given(st.integers(0, 9999))
def test_device_verification_gives_the_verifiers_verdicts(seed: int) -> None:
    """Sampling and the walk together, on drafts that are often right."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, 3)
    logits = torch.randn(counts.sum() + 3, VOCAB, generator=torch.Generator().manual_seed(seed))
    # Most of the weight is on one of three tokens: drafts made of those are often right.
    logits[:, :3] += 6.0
    first_rows = np.cumsum([0, *(counts[:-1] + 1)])
    tasks, drafts = [], []
    for row, count in zip(first_rows.tolist(), counts.tolist(), strict=True):
        tokens = tuple(rng.integers(0, 3, count).tolist())
        parents = tuple(int(rng.integers(-1, node)) for node in range(count))
        drafts.append(Draft(tokens, parents))
        sampler = RowSampler(do_sample=row % 2 == 0, seed=seed + row)
        tasks.append(VerifyTask(sampler, [1] * (row + 4), drafts[-1], row))
    expected = CoupledVerifier().verify(logits, tasks)
    verdicts = device_verdicts(logits.to(DEVICE), tasks, counts)
    for verdict, row in zip(expected, verdicts.tolist(), strict=True):
        assert tuple(row[2 : 2 + row[0]]) == verdict.accepted_nodes
        assert row[1] == verdict.next_token


def device_verdicts(logits: Tensor, tasks: list[VerifyTask], counts: np.ndarray) -> Tensor:
    rows: list[tuple[int, int, int]] = []
    for task in tasks:
        assert task.draft is not None
        depths = [0]
        for parent in task.draft.parents:
            depths.append(depths[parent + 1] + 1)
        sampler = task.sampler
        rows += [(sampler.seed, len(task.tokens) + d, int(sampler.do_sample)) for d in depths]
    seeds, positions, is_sampled = torch.tensor(rows, device=DEVICE).unbind(1)
    samples = coupled_kernels.sample_scores(
        logits, seeds.contiguous(), positions.contiguous(), is_sampled.contiguous()
    ).tokens
    drafts = [task.draft for task in tasks if task.draft]
    verdicts = torch.zeros((len(tasks), 8), dtype=torch.int64, device=DEVICE)

    def int64(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=DEVICE)

    coupled_kernels.walk_drafts(
        samples,
        int64([token for draft in drafts for token in draft.tokens]),
        int64([parent for draft in drafts for parent in draft.parents]),
        first_rows=int64([task.first_row for task in tasks]),
        first_nodes=int64(np.cumsum([0, *counts[:-1]])),
        num_nodes=int64(counts),
        verdicts=verdicts,
    )
    return verdicts


# Page scores


def test_page_scores_are_those_of_the_scorer() -> None:
    layer = LayerShape(4, 2, 16, 16, torch.float32)
    cache = KVCache([layer] * 2, num_blocks=12, block_size=PAGE, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    for keys in cache.keys:
        keys.copy_(torch.randn(keys.shape, generator=generator))
    config = SimpleNamespace(block_size=PAGE, max_batch_size=2)
    target = SimpleNamespace(layers=[layer] * 2, cache=cache, device=DEVICE)
    pool = BlockPool(12, PAGE)
    scorer = PageScorer(cast(Any, SimpleNamespace(target=target, config=config, blocks=pool)))
    request = SimpleNamespace(id="a", scheduled=SimpleNamespace(cached_tokens=5 * PAGE + 3))
    scorer._store().copy_(torch.randn(scorer._store().shape, generator=generator))
    blocks = np.array([3, 7, 2, 9, 4, 1])
    expected = scorer._scores(cast(Any, request), blocks)
    bounds = PageBounds(cache)
    index = torch.from_numpy(blocks).to(DEVICE)
    bounds.summarise(index)
    counts = torch.tensor([len(blocks)], device=DEVICE)
    scores = bounds.score(scorer._window(cast(Any, request))[None], index[None], counts)
    torch.testing.assert_close(scores[0], expected, rtol=1e-5, atol=1e-5)
