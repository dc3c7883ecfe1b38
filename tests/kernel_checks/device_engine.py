"""An engine over the kernels: the text of the torch backend's, with and without graphs."""

import pytest
import torch
from transformers import PreTrainedModel

from sdcontrol.engine.buckets import Bucket
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.kernels.bucket_attention import TritonBucketAttention, query_tile
from sdcontrol.engine.kernels.triton_attention import IS_INTERPRETED
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import ModelRunner
from tests.engine_support import RandomPlanner, TextDrafter, random_prompt, run_checked, tiny_model
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
