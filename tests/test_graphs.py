"""CUDA graphs: buckets, static inputs, capture and replay; a fake recorder stands for the GPU."""

import importlib.util
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from sdcontrol.controller import Controller
from sdcontrol.engine import graphs
from sdcontrol.engine.buckets import BucketLimits, Buckets, size_edges
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.graphs import uncapturable
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.packing import PageTable, Segment, pack
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.static_inputs import StaticInputs
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.estimators.uninformed import UninformedCost
from sdcontrol.integrations.transformers import SpeculativeDecoder
from sdcontrol.traces.header import read_header
from sdcontrol.traces.recorder import Recorder
from tests.engine_support import (
    ForcedPlanner,
    RandomPlanner,
    TextDrafter,
    noised,
    random_prompt,
    run_checked,
    submit_all,
    tiny_model,
)
from tests.graph_support import CPU, TorchBucketAttention, Waits, use_fake_graphs

PAGE = 16
LIMITS = BucketLimits(requests=12, query_tokens=9, pages=1000)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("Llama", seed=71)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


@pytest.fixture(autouse=True)
def plain_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events go to standard logging, whatever another test has configured."""
    monkeypatch.setattr(structlog, "is_configured", lambda: False)


# Buckets


@given(st.integers(1, 5000))
def test_sizes_ascend_to_the_largest_and_pad_by_a_quarter_at_most(most: int) -> None:
    edges = size_edges(most)
    assert edges[-1] == most
    assert all(a < b for a, b in itertools.pairwise(edges))
    below = [0, *edges]
    assert all(edge <= 1.25 * (last + 1) for last, edge in zip(below, edges, strict=False))


def segment(
    length: int, start: int, *, num_logits: int | None = None, tree: bool = False
) -> Segment:
    blocks = np.arange(1, 2 + (start + length) // PAGE)
    parents = tuple([-1] * (length - 1)) if tree and length > 1 else None
    kept = length if num_logits is None else num_logits
    slots = range(PAGE + start, PAGE + start + length)
    return Segment([3] * length, start, PageTable(blocks), slots, kept, parents)


SEGMENTS = st.lists(
    st.builds(segment, st.integers(1, 9), st.integers(0, 3000), tree=st.booleans()),
    min_size=1,
    max_size=12,
)


@given(SEGMENTS)
def test_a_bucket_is_the_smallest_that_holds_a_forward(segments: list[Segment]) -> None:
    buckets = Buckets(LIMITS, lambda longest: longest)
    bucket = buckets.bucket_of(segments, PAGE)
    tokens = sum(len(s.tokens) for s in segments)
    assert bucket.requests >= len(segments)
    assert bucket.tokens >= max(tokens, bucket.requests)
    assert bucket.rows >= tokens
    keys = max(s.start + len(s.tokens) for s in segments)
    assert bucket.pages * PAGE >= keys
    assert bucket.has_trees == any(s.parents is not None for s in segments)
    smaller = [edge for edge in buckets.token_edges if edge < bucket.tokens]
    assert all(edge < max(tokens, bucket.requests) for edge in smaller)
    requests = [edge for edge in size_edges(LIMITS.requests) if edge < bucket.requests]
    assert all(edge < len(segments) for edge in requests)


@pytest.mark.parametrize("most", [40, 64, 65, 1000])
def test_tables_of_every_kv_head_are_hardly_wider_than_what_is_read(most: int) -> None:
    """They take megabytes, which are sent before every draft."""
    limits = BucketLimits(requests=12, query_tokens=9, pages=most)
    buckets = Buckets(limits, lambda longest: longest)
    for count in range(1, most + 1):
        table = PageTable(np.zeros((4, 2, count), dtype=np.int64))
        of_heads = Segment([3], count * PAGE - 1, table, range(1), 1)
        pages = buckets.bucket_of([of_heads], PAGE).pages
        assert count <= pages <= max(1.25 * count, 64)


@pytest.mark.parametrize(
    "segments",
    [
        [segment(10, 0)],
        [segment(1, 5), segment(4, 0, num_logits=0)],
        [segment(1, 5)] * 13,
    ],
)
def test_prefill_and_what_is_beyond_the_limits_have_no_bucket(segments: list[Segment]) -> None:
    buckets = Buckets(LIMITS, lambda longest: longest)
    assert buckets.refusal(segments) == "prefill or catch-up"
    assert buckets.refusal([segment(9, 5), segment(3, 0, num_logits=1)]) is None


# Inputs


@given(st.lists(SEGMENTS, min_size=1, max_size=3))
def test_static_inputs_are_the_packed_ones_and_padding_goes_to_the_null_block(
    steps: list[list[Segment]],
) -> None:
    """Also after another step's inputs stood there."""
    buckets = Buckets(LIMITS, lambda longest: longest)
    largest = max(steps, key=lambda step: (sum(len(s.tokens) for s in step), len(step)))
    bucket = buckets.bucket_of(largest, PAGE)
    inputs = StaticInputs(bucket, TorchBucketAttention(bucket, PAGE), CPU)
    batch = inputs.batch
    for step in steps:
        first_rows = inputs.load(step)
        expected = [pack([s], PAGE, CPU) for s in step]
        tokens = sum(len(s.tokens) for s in step)
        for name in ("input_ids", "positions", "slots"):
            ours = getattr(batch, name).reshape(-1)
            assert torch.equal(
                ours[:tokens], torch.cat([getattr(e, name).reshape(-1) for e in expected])
            )
            assert not ours[tokens:].any()
        offsets = np.cumsum([0, *(len(s.tokens) for s in step)])[:-1]
        rows = [
            row + int(o) for e, o in zip(expected, offsets, strict=True) for row in e.logit_rows
        ]
        assert batch.logit_rows.tolist()[: len(rows)] == rows
        assert first_rows == np.cumsum([0, *(s.num_logits for s in step)])[:-1].tolist()


def test_static_inputs_are_filled_on_the_host_whatever_torchs_default_device_is() -> None:
    segments = [segment(3, 40), segment(2, 17)]
    bucket = Buckets(LIMITS, lambda longest: longest).bucket_of(segments, PAGE)
    with torch.device("meta"):
        inputs = StaticInputs(bucket, TorchBucketAttention(bucket, PAGE), CPU)
        inputs.load(segments)
    sent = inputs.batch.positions.reshape(-1)[:5].tolist()
    assert sent == [
        p for s in segments for p in pack([s], PAGE, CPU).positions.reshape(-1).tolist()
    ]


# Engines


ARMS = ("ngram", "sparse_kv:48")
PROMPTS = [random_prompt(length, seed=length) for length in (5, 60, 33, 70, 21, 50)]


def texts(
    model: PreTrainedModel,
    planner: object,
    *,
    drafters: Sequence[object] = ARMS,
    config: EngineConfig | None = None,
    do_sample: bool = False,
) -> tuple[list[list[int]], Engine]:
    config = config or EngineConfig(kv_tokens=4096, max_prefill_tokens=40, max_batch_size=5)
    with Engine(model, drafters=drafters, planner=planner, config=config) as engine:  # type: ignore[arg-type]
        names = []
        for seed, prompt in enumerate(PROMPTS):
            options = {"max_new_tokens": 12 + seed, "seed": seed, "do_sample": do_sample}
            names.extend(submit_all(engine, [prompt], **options))
        finished = run_checked(engine)
        return [finished[name].output for name in names], engine


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_text_is_the_same_with_graphs(
    model: PreTrainedModel, patch: pytest.MonkeyPatch, do_sample: bool
) -> None:
    """Mixed batches: chunks of prompts beside chains, trees, sparse rounds and a draft model."""
    known, _ = texts(model, ForcedPlanner(num_draft_tokens=0), do_sample=do_sample)
    told = {tuple(prompt): text for prompt, text in zip(PROMPTS, known, strict=True)}
    trees = TextDrafter(told, wrong_every=4, as_tree=True)
    specs = (*ARMS, noised(model), trees)
    expected, plain = texts(model, RandomPlanner(3), drafters=specs, do_sample=do_sample)
    assert expected == known
    assert plain.stats.graphs.captured == 0
    recorder = use_fake_graphs(patch)
    ours, engine = texts(model, RandomPlanner(3), drafters=specs, do_sample=do_sample)
    assert ours == expected
    stats = engine.stats.graphs
    assert recorder.captures == stats.captured > 10
    assert recorder.replays == stats.replayed > stats.captured
    assert stats.reserved_bytes == 1000 * stats.captured
    assert stats.capture_seconds > 0
    assert set(stats.eager) == {"prefill or catch-up"}
    assert any(bucket.has_trees for bucket in recorder.buckets)


def test_a_bucket_is_captured_once(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> None:
    recorder = use_fake_graphs(patch)
    texts(model, ForcedPlanner(arm="sparse_kv:48"))
    assert len(set(recorder.buckets)) == len(recorder.buckets) == recorder.captures
    with Engine(model, config=EngineConfig(kv_tokens=256, max_batch_size=5)) as engine:
        assert engine.token_edges == size_edges(5 * 17)
        assert all(bucket.tokens in engine.token_edges for bucket in recorder.buckets)


def test_a_step_that_captured_a_graph_has_no_time_of_verification(
    model: PreTrainedModel, patch: pytest.MonkeyPatch
) -> None:
    """It would teach a cost model what a capture takes."""
    use_fake_graphs(patch)
    planner = ForcedPlanner(arm="sparse_kv:48")
    _, engine = texts(model, planner)
    timings = [observation.timing for observation in planner.observations]
    captured = [timing for timing in timings if not timing.verify_seconds]
    assert 0 < len(captured) <= engine.stats.graphs.captured
    assert len(captured) < len(timings)
    for timing in captured:
        assert timing.total_seconds > timing.overhead_seconds > 0
        assert not timing.draft_seconds


def test_queries_for_page_scores_are_kept_by_graphs(
    model: PreTrainedModel, patch: pytest.MonkeyPatch
) -> None:
    """Pages are chosen by them, so that drafts and their acceptance are the same."""
    arms = ("sparse_kv:64:scored",)
    before, after = (ForcedPlanner(arm=arms[0]) for _ in range(2))
    expected, _ = texts(model, before, drafters=arms)
    recorder = use_fake_graphs(patch)
    ours, engine = texts(model, after, drafters=arms)
    assert ours == expected
    assert set(engine.stats.graphs.eager) == {"prefill or catch-up"}
    assert any(bucket.keeps_queries for bucket in recorder.buckets)
    assert any(bucket.page_layers > 1 for bucket in recorder.buckets)
    assert [o.accepted for o in after.observations] == [o.accepted for o in before.observations]
    assert after.totals()[1] > 0


def waits_of(model: PreTrainedModel) -> list[str]:
    """Of one padded forward; attention is left out, which has a kernel for it."""
    runner = ModelRunner(model, "torch")
    runner.allocate(20, PAGE)
    buckets = Buckets(LIMITS, lambda longest: longest)
    segments = [segment(3, 40), segment(2, 17)]
    bucket = buckets.bucket_of(segments, PAGE)
    attention = TorchBucketAttention(bucket, PAGE)
    inputs = StaticInputs(bucket, attention, CPU)
    inputs.load(segments)
    heads, value_dim = runner.layers[0].num_heads, runner.layers[0].value_dim
    with pytest.MonkeyPatch.context() as patch, Waits() as waits:
        patch.setattr(
            TorchBucketAttention,
            "attend",
            lambda self, layer, query, *_: query.new_zeros(query.shape[1], heads, value_dim),
        )
        runner.compute(inputs.batch, attention)
    return waits.seen


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Olmo2"])
def test_forwards_that_are_captured_never_wait_for_the_device(architecture: str) -> None:
    assert waits_of(tiny_model(architecture)) == []


def test_experts_in_one_batch_never_wait_for_the_device() -> None:
    model = tiny_model("Mixtral")
    model.config._experts_implementation = "batched_mm"
    assert waits_of(model) == []


def test_experts_picked_on_the_host_do_wait() -> None:
    """Or the test above could not fail."""
    model = tiny_model("Mixtral")
    model.config._experts_implementation = "eager"
    assert waits_of(model)


def failures() -> list[Exception]:
    """What torch raises, and what Triton does where a kernel does not fit the device."""
    known: list[Exception] = [RuntimeError("operation not permitted")]
    if importlib.util.find_spec("triton") is None:
        return known
    from triton.runtime.errors import OutOfResources

    return [*known, OutOfResources(300_000, 232_448, "operation not permitted")]


@pytest.mark.parametrize("failure", failures(), ids=lambda failure: type(failure).__name__)
def test_a_bucket_that_cannot_be_captured_is_said_once_and_computed_eagerly(
    model: PreTrainedModel,
    patch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
) -> None:
    expected, _ = texts(model, ForcedPlanner())
    planner = ForcedPlanner()
    recorder = use_fake_graphs(patch, failure=failure)
    with caplog.at_level(logging.WARNING):
        ours, engine = texts(model, planner)
    assert ours == expected
    said = [r.getMessage() for r in caplog.records if "graph_capture_failed" in r.getMessage()]
    assert len(said) == len(set(said)) == len(recorder.buckets)
    assert all("operation not permitted" in message for message in said)
    assert engine.stats.graphs.eager["capture failed"] > len(said)
    assert engine.stats.graphs.captured == engine.stats.graphs.replayed == 0
    assert engine.stats.graphs.tried == len(said)
    slow = [o for o in planner.observations if o.view.requests and not o.timing.verify_seconds]
    assert 0 < len(slow) <= len(said) < len(planner.observations)


def test_shapes_beyond_the_most_are_computed_eagerly_and_said_once(
    model: PreTrainedModel, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each graph takes memory for good."""
    expected, _ = texts(model, RandomPlanner(3))
    patch.setattr(graphs, "_MOST_SHAPES", 4)
    recorder = use_fake_graphs(patch)
    with caplog.at_level(logging.WARNING):
        ours, engine = texts(model, RandomPlanner(3))
    assert ours == expected
    stats = engine.stats.graphs
    assert recorder.captures == stats.captured == stats.tried == 4
    assert stats.eager["too many shapes"] > 0
    assert stats.replayed > 4
    assert caplog.text.count("graph_shapes_used_up") == 1


def test_without_graphs_nothing_is_padded(model: PreTrainedModel) -> None:
    with Engine(model, config=EngineConfig(kv_tokens=256)) as engine:
        assert engine.token_edges == ()


def test_whoever_prices_is_told_of_padding(tmp_path: Path) -> None:
    """Reduced precision on a CPU, without graphs: the engine says it to whatever plans for it."""
    model = tiny_model().to(torch.bfloat16)  # type: ignore[call-arg]
    with SpeculativeDecoder(model, kv_tokens=256, max_batch_size=3) as decoder:
        edges = decoder.engine.token_edges
        assert edges == (*range(1, 17), 24, 32, 40, 48, 56)  # 3 requests of 17 tokens, and padding
        assert decoder.planner.token_edges == edges  # type: ignore[attr-defined]
    controller = Controller("goodput")
    config = EngineConfig(kv_tokens=256, max_batch_size=3)
    recorder = Recorder(controller, tmp_path / "trace")
    with recorder, Engine(model, planner=recorder, config=config):
        prices = controller.cost.verify_seconds(np.array([17.0, 24.0, 25.0]), 0.0, 1)
    assert prices[0] == prices[1] < prices[2]
    with Engine(tiny_model(), planner=recorder, config=config):  # the trace is finished
        assert controller.token_edges == ()
    header = read_header(tmp_path / "trace")
    assert header.controller is not None
    assert header.controller.token_edges == edges


def test_models_that_wait_for_the_device_are_refused_graphs() -> None:
    experts = tiny_model("Mixtral")
    experts.config._experts_implementation = "eager"
    reason = uncapturable(experts)
    assert reason is not None
    assert "MixtralExperts picks its experts on the host" in reason
    experts.config._experts_implementation = "grouped_mm"
    assert uncapturable(experts) is None
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    growing = uncapturable(tiny_model("Llama", rope_parameters=rope))
    assert growing is not None
    assert "grows with the longest position" in growing
    assert uncapturable(tiny_model("Llama")) is None


@pytest.mark.parametrize(
    ("dtype", "capability", "groups"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 0), True),
        (torch.bfloat16, (8, 9), False),
        (torch.bfloat16, (12, 0), False),
        (torch.float16, (9, 0), False),
        (torch.float32, (9, 0), False),
    ],
)
def test_experts_are_grouped_on_the_device_by_few_kernels_only(
    patch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], groups: bool
) -> None:
    """ATen's other way copies to the host where groups end."""
    experts = tiny_model("Mixtral").to(dtype)  # type: ignore[call-arg]
    patch.setattr(type(experts), "device", torch.device("cuda"))
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for how, may_be in (("eager", False), ("grouped_mm", groups), ("batched_mm", True)):
        experts.config._experts_implementation = how
        reason = uncapturable(experts)
        assert (reason is None) == may_be
        if reason is not None:
            remedy = "grouped_mm" if groups else "batched_mm"
            assert f"load the model with experts_implementation='{remedy}'" in reason
            assert str(dtype) in reason


def test_refused_models_are_named_in_a_warning(
    patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = use_fake_graphs(patch)
    experts = tiny_model("Mixtral")
    experts.config._experts_implementation = "eager"
    with caplog.at_level(logging.WARNING):
        texts(experts, ForcedPlanner())
    assert "cuda_graphs_left_out" in caplog.text
    assert "MixtralForCausalLM" in caplog.text
    assert recorder.captures == 0


def test_our_cost_model_is_told_the_edges_and_another_is_left_alone() -> None:
    """Tokens up to the next edge cost nothing, whenever it was told."""
    controller, tokens = Controller("goodput"), np.array([3.0, 4.0, 5.0, 16.0])
    assert (np.diff(controller.cost.verify_seconds(tokens, 100.0, 1)) > 0.0).all()
    controller.pad_to((4, 16))
    seconds = controller.cost.verify_seconds(tokens, 100.0, 1)
    assert seconds[0] == seconds[1] < seconds[2] == seconds[3]
    own = Controller("goodput", cost=UninformedCost())
    before = own.cost.verify_seconds(tokens, 100.0, 1)
    own.pad_to((4, 16))
    assert (own.cost.verify_seconds(tokens, 100.0, 1) == before).all()


def test_a_controller_made_by_hand_plans_no_more_than_its_engine_drafts(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """It would count on tokens that the engine cuts, and choose by them; replays make it as it was then."""
    controller, config = Controller("goodput"), EngineConfig(kv_tokens=256, max_draft_tokens=3)
    recorder = Recorder(controller, tmp_path / "trace")
    with recorder, Engine(model, planner=recorder, config=config):
        assert controller.max_draft_tokens == 3
    recorded = read_header(tmp_path / "trace").controller
    assert recorded is not None
    assert recorded.max_draft_tokens == 3
    assert isinstance(controller.acceptance, AcceptanceEstimator)
    assert controller.acceptance.max_draft_tokens == 3
    controller.draft_at_most(5)
    assert controller.max_draft_tokens == 3


def test_a_planner_that_will_not_be_told_of_padding_still_plans(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Deaf(ForcedPlanner):
        def pad_to(self, token_edges: Sequence[int]) -> None:
            raise ValueError("too many")

    with caplog.at_level(logging.WARNING):
        text, _ = texts(model, Deaf())
    assert "too many" in caplog.text
    assert text == texts(model, ForcedPlanner())[0]
