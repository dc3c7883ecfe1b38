"""An engine over the kernels: the text of the torch backend's, with and without graphs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)

from sdcontrol.engine.buckets import Bucket
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.device_step import verify_of, verify_on_device
from sdcontrol.engine.drafters.base import Draft
from sdcontrol.engine.kernels.bucket_attention import TritonBucketAttention, query_tile
from sdcontrol.engine.kernels.triton_attention import IS_INTERPRETED
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.sampling import RowSampler
from sdcontrol.engine.verify import CoupledVerifier, SyntheticVerifier, VerifyTask
from tests.engine_support import (
    VOCAB,
    RandomPlanner,
    TextDrafter,
    random_prompt,
    run_checked,
    tiny_model,
)
from tests.graph_support import use_fake_graphs

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
PROMPTS = [random_prompt(length, seed=length) for length in (5, 50)]
SETTINGS = {"kv_tokens": 1024, "max_prefill_tokens": 30, "max_draft_tokens": 5}


def attention(bucket: Bucket, runner: ModelRunner, page: int) -> TritonBucketAttention:
    return TritonBucketAttention(bucket, runner.layers, block_size=page, device=runner.device)


def texts(
    model: PreTrainedModel, drafters: "list[object]", **settings: object
) -> tuple[list[list[int]], Engine]:
    """One greedy request and one sampled."""
    config = EngineConfig.model_validate({**SETTINGS, **settings})
    with Engine(model, drafters=drafters, planner=RandomPlanner(1), config=config) as engine:  # type: ignore[arg-type]
        options = [{"do_sample": False}, {"do_sample": True, "top_k": 9, "seed": 1}]
        names = [
            engine.submit(prompt, max_new_tokens=8, **own)  # type: ignore[arg-type]
            for prompt, own in zip(PROMPTS, options, strict=True)
        ]
        finished = run_checked(engine)
        return [finished[name].output for name in names], engine


def test_the_text_is_that_of_the_torch_backend() -> None:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model("Mistral", seed=3, **shape).to(DEVICE)
    known, _ = texts(model, [], attention_backend="torch", cuda_graphs=False)
    told = {tuple(prompt): text for prompt, text in zip(PROMPTS, known, strict=True)}
    drafters = [TextDrafter(told, wrong_every=3, as_tree=True), "sparse_kv:48"]
    eager, engine = texts(model, drafters, attention_backend="triton", cuda_graphs=False)
    assert eager == known
    assert engine.stats.graphs.captured == 0
    with pytest.MonkeyPatch.context() as patch:
        recorder = use_fake_graphs(
            patch,
            attention=attention,
            query_tile=lambda runner, longest: query_tile(runner.layers, longest, runner.device),
        )
        graphed, _ = texts(model, drafters, attention_backend="triton")
    assert graphed == known
    assert recorder.replays >= recorder.captures > 2
    assert any(bucket.has_trees for bucket in recorder.buckets)


@settings(max_examples=10)
@given(seed=st.integers(0, 9999))
def test_verdicts_are_the_verifiers_in_whatever_order_requests_were_packed(seed: int) -> None:
    """Greedy, sampled, and sampled through processors; trees that are often right."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, 4)
    logits = torch.randn(counts.sum() + 4, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, :3] += 6.0  # most of the weight: drafts made of these tokens are often right
    first_rows = dict(
        zip(order := rng.permutation(4), np.cumsum([0, *counts[order] + 1])[:4], strict=True)
    )
    tasks = []
    for index, count in enumerate(counts.tolist()):
        parents = tuple(int(rng.integers(-1, node)) for node in range(count))
        draft = Draft(tuple(rng.integers(0, 3, count).tolist()), parents)
        processors = LogitsProcessorList([TopKLogitsWarper(2)] if index == 3 else [])
        sampler = RowSampler(do_sample=index > 1, seed=seed + index, processors=processors)
        tasks.append(VerifyTask(sampler, [1] * (index + 4), draft, int(first_rows[index])))
    expected = CoupledVerifier().verify(logits, tasks)
    assert verify_on_device(logits.to(DEVICE), tasks) == expected


def test_requests_whose_processors_look_back_are_verified_as_before() -> None:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    task = VerifyTask(RowSampler(processors=processors), [1, 2], Draft.chain((3, 4)), 0)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    verify = verify_of(CoupledVerifier(), has_kernels=True)
    assert verify(logits, [task]) == CoupledVerifier().verify(logits, [task])
    synthetic = SyntheticVerifier(0.5)
    assert verify_of(synthetic, has_kernels=True) == synthetic.verify
