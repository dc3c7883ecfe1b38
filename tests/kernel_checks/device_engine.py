"""An engine over the kernels: the text of the torch backend's, with and without graphs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)

from sdcontrol.engine.buckets import Bucket
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.device_step import verify_of
from sdcontrol.engine.drafters.base import Draft
from sdcontrol.engine.kernels.bucket_attention import TritonBucketAttention, query_tile
from sdcontrol.engine.kernels.triton_attention import IS_INTERPRETED
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.sampling import RowSampler
from sdcontrol.engine.verify import (
    CoupledVerifier,
    RejectionVerifier,
    SyntheticVerifier,
    VerifyTask,
)
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
    with Engine(model, drafters=drafters, planner=RandomPlanner(2), config=config) as engine:  # type: ignore[arg-type]
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
    drafters = [TextDrafter(told, wrong_every=3, as_tree=True), "sparse_kv:48:scored"]
    eager, engine = texts(model, drafters, attention_backend="triton", cuda_graphs=False)
    assert eager == known
    assert engine.stats.drafters["sparse_kv:48:scored"].accepted
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


def random_step(seed: int) -> tuple[Tensor, list[VerifyTask]]:
    """Greedy, sampled, and sampled through processors; trees that are often right.

    Requests are packed in any order.
    """
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
        first_row, arm = int(first_rows[index]), ("ngram", "sparse_kv:64")[index % 2]
        tasks.append(VerifyTask(sampler, [1] * (index + 4), draft, first_row, arm))
    return logits, tasks


def own_rates(task: VerifyTask) -> tuple[float, float]:
    return (0.9, 0.2) if task.sampler.seed % 2 else (0.4, 0.8)


@settings(max_examples=5)
@given(seed=st.integers(0, 9999))
@pytest.mark.parametrize(
    "verifier",
    [
        CoupledVerifier(),
        SyntheticVerifier({"ngram": 0.5, "sparse_kv": (0.9, 0.6)}),
        SyntheticVerifier(own_rates, shares_luck=True),
    ],
    ids=["coupled", "synthetic", "synthetic by request"],
)
def test_verdicts_on_the_device_are_the_verifiers(verifier: CoupledVerifier, seed: int) -> None:
    logits, tasks = random_step(seed)
    expected = verifier.verify(logits, tasks)
    asked = verify_of(verifier, has_kernels=True)(logits.to(DEVICE), tasks)
    assert asked.read() == expected
    assert asked.tokens is not None
    assert asked.tokens.tolist() == [verdict.next_token for verdict in expected]


def test_rules_and_requests_that_no_kernel_knows_are_verified_as_before() -> None:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    task = VerifyTask(RowSampler(processors=processors), [1, 2], Draft.chain((3, 4)), 0)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for verifier in (CoupledVerifier(), SyntheticVerifier(0.5)):
        verify = verify_of(verifier, has_kernels=True)
        asked = verify(logits, [task])
        assert asked.tokens is None
        assert asked.read() == verifier.verify(logits, [task])

    class Own(SyntheticVerifier):
        """Whoever changes the rule keeps it."""

    plain = task._replace(sampler=RowSampler())
    for other in (RejectionVerifier(), Own(0.5)):
        asked = verify_of(other, has_kernels=True)(logits, [plain])
        assert asked.tokens is None
        assert asked.read() == other.verify(logits, [plain])
