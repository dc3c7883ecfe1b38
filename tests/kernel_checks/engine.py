"""The kernels and twins against the parts of the engine whose work they take over."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sdcontrol.engine.kernels.reference import TorchAttention
from sdcontrol.engine.kernels.triton_attention import IS_INTERPRETED, TritonAttention
from sdcontrol.engine.packing import PageTable, Segment
from sdcontrol.engine.runner import ModelRunner
from tests.engine_support import random_prompt, tiny_model

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
