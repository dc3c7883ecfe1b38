"""Drafting rounds without the host over the kernels: the drafts of rounds that ask it."""

import pytest
import torch
from transformers import PreTrainedModel

from sdcontrol.core import BatchView, Choice, Observation, Plan
from sdcontrol.engine.buckets import Bucket
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.kernels.bucket_attention import TritonBucketAttention, query_tile
from sdcontrol.engine.kernels.triton_attention import IS_INTERPRETED
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import ModelRunner
from tests.engine_support import RecordingPlanner, noised, random_prompt, run_checked, tiny_model
from tests.graph_support import use_fake_graphs

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
PROMPTS = [random_prompt(length, seed=length) for length in (6, 40, 45)]
OPTIONS = [{"do_sample": False}, {"do_sample": True}, {"do_sample": True, "top_k": 9}]


def attention(bucket: Bucket, runner: ModelRunner, page: int) -> TritonBucketAttention:
    return TritonBucketAttention(bucket, runner.layers, block_size=page, device=runner.device)


class Uneven(RecordingPlanner):
    """Lengths 4, 2 and 1 in turn."""

    def __init__(self, *, refines: bool) -> None:
        super().__init__()
        self.refines = refines

    def plan(self, view: BatchView) -> Plan:
        choices = []
        for row, request in enumerate(view.requests):
            length = min((4, 2, 1)[(view.step + row) % 3], request.remaining_tokens - 1)
            arms = request.drafters
            choices.append(Choice.of(arms[view.step % len(arms)], length) if arms else Choice.off())
        return Plan(tuple(choices))


def observed(
    models: tuple[PreTrainedModel, PreTrainedModel], *, refines: bool, backend: str
) -> tuple[list[Observation], list[list[int]]]:
    target, draft = models
    settings = {"kv_tokens": 512, "max_prefill_tokens": 60, "max_draft_tokens": 4}
    config = EngineConfig.model_validate({**settings, "attention_backend": backend})
    planner = Uneven(refines=refines)
    with Engine(target, drafters=["sparse_kv:48", draft], planner=planner, config=config) as engine:
        names = [
            engine.submit(prompt, max_new_tokens=9, seed=seed, **own)  # type: ignore[arg-type]
            for seed, (prompt, own) in enumerate(zip(PROMPTS, OPTIONS, strict=True))
        ]
        finished = run_checked(engine)
        assert engine.stats.faults == []
        return planner.observations, [finished[name].output for name in names]


def test_drafts_are_those_of_the_torch_backend() -> None:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny_model("Mistral", seed=5, **shape)
    draft = noised(target, noise=0.01)  # on the CPU, where its noise is drawn
    models = target.to(DEVICE), draft.to(DEVICE)
    expected, text = observed(models, refines=True, backend="torch")
    with pytest.MonkeyPatch.context() as patch:
        recorder = use_fake_graphs(
            patch,
            attention=attention,
            query_tile=lambda runner, longest: query_tile(runner.layers, longest, runner.device),
        )
        ours, same_text = observed(models, refines=False, backend="triton")
    assert same_text == text
    assert recorder.replays > 10
    for a, b in zip(ours, expected, strict=True):
        assert (a.plan, a.drafted, a.accepted, a.emitted) == (
            b.plan,
            b.drafted,
            b.accepted,
            b.emitted,
        )
        for mine, theirs in zip(a.confidence or (), b.confidence or (), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
    assert sum(sum(o.accepted) for o in ours) > 3
