"""The engine on a GPU: the first thing to run on one, after the kernels' own tests.

Every test skips where there is no CUDA device. Weights are random and float32 unless said.
"""

import copy
import gc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

from sdcontrol.core import Planner
from sdcontrol.engine.buckets import size_edges
from sdcontrol.engine.ceilings import ceilings_of, measure_ceilings, seconds_of
from sdcontrol.engine.clock import StepClock, marks_of
from sdcontrol.engine.config import EngineConfig, free_bytes_of
from sdcontrol.engine.copies import on_its_way
from sdcontrol.engine.graph_recorder import CudaRecorder, recording_errors
from sdcontrol.engine.graphs import uncapturable
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.packing import PageTable, Segment
from sdcontrol.engine.sampling import Row, RowSampler, process_rows, sample_rows
from sdcontrol.engine.walk import take_rows
from sdcontrol.errors import ConfigError
from tests.engine_support import (
    COMPARISON,
    ForcedPlanner,
    RandomPlanner,
    RecordingPlanner,
    TextDrafter,
    generate_alone,
    noised,
    random_prompt,
    run_checked,
    submit_all,
    tiny_model,
)

pytestmark = pytest.mark.gpu

PAGE = 16
CUDA = torch.device("cuda")
PROMPTS = [random_prompt(length, seed=length) for length in (5, 60, 33, 70, 21, 50)]
CONFIG: dict[str, object] = {"kv_tokens": 8192, "max_prefill_tokens": 40, "max_batch_size": 5}
SHAPE = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def on_cpu() -> PreTrainedModel:
    return tiny_model("Llama", seed=81, **SHAPE)


@pytest.fixture(scope="module")
def model(on_cpu: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(on_cpu).to(CUDA)


def engine_of(
    model: PreTrainedModel,
    drafters: Sequence[object] = (),
    planner: Planner | None = None,
    **settings: object,
) -> Engine:
    config = EngineConfig.model_validate({**CONFIG, **settings})
    return Engine(model, drafters=drafters, planner=planner, config=config)  # type: ignore[arg-type]


def texts_of(engine: Engine, *, do_sample: bool = False) -> list[list[int]]:
    with engine:
        names: list[str] = []
        for seed, prompt in enumerate(PROMPTS):
            options = {"max_new_tokens": 24, "seed": seed, "do_sample": do_sample}
            names.extend(submit_all(engine, [prompt], **options))
        finished = run_checked(engine)
        return [finished[name].output for name in names]


def on_same_device(model: PreTrainedModel) -> PreTrainedModel:
    """A draft model; its noise is drawn on the CPU."""
    return noised(copy.deepcopy(model).cpu()).to(model.device)


# Settings


def test_kernels_and_graphs_are_what_an_engine_uses(model: PreTrainedModel) -> None:
    with engine_of(model) as engine:
        assert type(engine.runner.backend).__name__ == "TritonAttention"
        assert engine.token_edges == size_edges(engine.config.most_decoding_tokens)


def test_a_cache_that_does_not_fit_is_refused_before_it_is_made(model: PreTrainedModel) -> None:
    engine_of(model).close()  # with the first one libraries take their workspaces, for good
    gc.collect()
    before = torch.cuda.memory_allocated()
    with pytest.raises(ConfigError, match="the KV cache does not fit: bytes per token target"):
        engine_of(model, kv_tokens=2 * free_bytes_of(CUDA) // 100)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


# Texts


def test_the_text_is_that_of_generate(on_cpu: PreTrainedModel, model: PreTrainedModel) -> None:
    engine = engine_of(model, ("ngram", "sparse_kv:48"), RandomPlanner(1))
    for prompt, text in zip(PROMPTS, texts_of(engine), strict=True):
        reference = generate_alone(on_cpu, prompt, max_new_tokens=24, do_sample=False)
        COMPARISON.check(reference, text, f"CUDA, prompt of {len(prompt)}")


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_text_is_the_same_with_graphs_kernels_and_drafts_of_every_kind(
    model: PreTrainedModel, do_sample: bool
) -> None:
    """Against plain decoding by the torch backend, whose verification is torch's too."""
    plain = engine_of(model, attention_backend="torch")
    known = texts_of(plain, do_sample=do_sample)
    assert plain.stats.graphs.replayed == 0
    told = {tuple(prompt): text for prompt, text in zip(PROMPTS, known, strict=True)}
    trees = TextDrafter(told, wrong_every=4, as_tree=True)
    drafters = ("ngram", "sparse_kv:64:scored", on_same_device(model), trees)
    for cuda_graphs, overlap, compiles in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ):
        settings = {"cuda_graphs": cuda_graphs, "overlap": overlap, "compile_layers": compiles}
        engine = engine_of(model, drafters, RandomPlanner(2), **settings)
        assert texts_of(engine, do_sample=do_sample) == known
        stats = engine.stats.graphs
        assert (stats.replayed > stats.captured > 0) == cuda_graphs
        assert stats.tried == stats.captured
        assert (stats.reserved_bytes > 0) == cuda_graphs
        assert set(stats.eager) <= {"prefill or catch-up"}
        assert engine.stats.faults == []


def test_processors_that_look_at_the_prompt_find_it_on_the_device(
    on_cpu: PreTrainedModel, model: PreTrainedModel
) -> None:
    options = {
        "max_new_tokens": 16,
        "encoder_repetition_penalty": 1.5,
        "encoder_no_repeat_ngram_size": 3,
        "repetition_penalty": 1.3,
    }
    with engine_of(model, ("ngram",), ForcedPlanner()) as engine:
        (name,) = submit_all(engine, PROMPTS[1:2], **options)
        text = run_checked(engine)[name].output
    reference = generate_alone(on_cpu, PROMPTS[1], do_sample=False, **options)
    COMPARISON.check(reference, text, "CUDA, processors of the prompt")


# Graphs


def test_a_capture_that_fails_leaves_the_device_as_it_was() -> None:
    recorder, before = CudaRecorder(CUDA), torch.cuda.current_stream()
    values = torch.ones(2, device=CUDA)

    def asks_the_host() -> None:
        values.add_(values[0].item())

    for _ in range(2):
        with pytest.raises(recording_errors()):
            recorder.capture(asks_the_host)
        assert torch.cuda.current_stream() == before
        assert torch.randn(4, device=CUDA).isfinite().all()
    replay = recorder.capture(lambda: values.copy_(values * 2))
    values.fill_(1.0)
    replay()
    assert values.tolist() == [2.0, 2.0]
    torch.cuda.empty_cache()  # refuses while a capture is believed to be under way


def test_an_error_that_is_not_the_devices_leaves_it_as_it_was() -> None:
    """What was allocated meanwhile is given back, and the recorder takes another pool."""
    recorder, calls = CudaRecorder(CUDA), []

    def fails_when_captured() -> None:
        calls.append(torch.ones(1 << 20, device=CUDA) * 2)
        if len(calls) == 3:
            calls.clear()
            raise KeyError("of ours")

    with pytest.raises(KeyError):
        recorder.capture(fails_when_captured)
    values = torch.ones(2, device=CUDA)
    recorder.capture(lambda: values.mul_(3.0))()
    assert values[0].item() == 3.0**3  # two warm-ups, and the replay


def test_a_graph_goes_on_where_somebody_clears_the_workspaces_of_libraries() -> None:
    """As `torch.compile` does around its own graphs: what was freed is somebody else's then."""
    left = torch.randn(8, 14336, device=CUDA, dtype=torch.bfloat16)
    right = torch.randn(14336, 4096, device=CUDA, dtype=torch.bfloat16)  # cut along the 14336
    product = left.new_empty(8, 4096)
    replay = CudaRecorder(CUDA).capture(lambda: torch.mm(left, right, out=product))  # type: ignore[arg-type]
    replay()
    expected = product.clone()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 24,), 7.0, device=CUDA) for _ in range(16)]
    product.zero_()
    replay()
    torch.cuda.synchronize()
    assert torch.equal(product, expected)
    assert all(bool((other == 7.0).all()) for other in others)


def test_room_for_all_graphs_is_taken_with_the_first() -> None:
    values = torch.zeros(1 << 20, device=CUDA)
    recorder = CudaRecorder(CUDA, room_bytes=1 << 28)
    before = recorder.reserved_bytes()
    first = recorder.capture(lambda: values.add_(values.new_ones(1 << 20)))  # type: ignore[arg-type]
    taken = recorder.reserved_bytes() - before
    assert (1 << 28) <= taken < (1 << 28) + (1 << 26)
    wider = recorder.capture(lambda: values.add_(values.new_ones(1 << 25)[: 1 << 20]))  # type: ignore[arg-type]
    assert recorder.reserved_bytes() - before == taken
    values.zero_()
    first()
    wider()
    assert bool((values == 2.0).all())


def test_recorders_keep_no_workspaces_of_libraries() -> None:
    left = torch.randn(512, 512, device=CUDA)
    product = torch.empty_like(left)
    first = CudaRecorder(CUDA).capture(lambda: torch.mm(left, left, out=product))  # type: ignore[arg-type]
    before = torch.cuda.memory_allocated()
    again = CudaRecorder(CUDA).capture(lambda: torch.mm(left, left, out=product))  # type: ignore[arg-type]
    assert torch.cuda.memory_allocated() - before < 1 << 20
    for replay in (first, again):
        product.zero_()
        replay()
        torch.testing.assert_close(product, left @ left, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float32, "grouped_mm"),
        (torch.float32, "batched_mm"),
        (torch.bfloat16, "grouped_mm"),
        (torch.bfloat16, "batched_mm"),
    ],
)
def test_experts_are_captured_where_nothing_says_why_not(dtype: torch.dtype, how: str) -> None:
    experts = tiny_model("Mixtral", seed=82, **SHAPE).to(CUDA, dtype)  # type: ignore[call-arg]
    experts.config._experts_implementation = how
    reason = uncapturable(experts)
    engine = engine_of(experts, ("ngram",), ForcedPlanner())
    texts_of(engine)
    stats = engine.stats.graphs
    assert (stats.captured > 0) == (reason is None)
    assert stats.tried == stats.captured
    if how == "batched_mm":
        assert reason is None


class Told(RecordingPlanner):
    """Never drafts; is told late, and asked before tokens are known."""

    allows_late_observations = True
    plans_ahead = True


# Rounds that do not ask the host


class InFull(ForcedPlanner):
    """Never refines; learns late."""

    refines = False
    allows_late_observations = True


@pytest.mark.parametrize("arm", ["draft_model", "sparse_kv:48", "sparse_kv:64:scored"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_are_the_same_with_and_without_the_host(
    model: PreTrainedModel, arm: str, do_sample: bool
) -> None:
    drafters = (arm,) if arm != "draft_model" else (on_same_device(model),)
    seen = []
    for planner in (ForcedPlanner(arm=arm), InFull(arm=arm), InFull(arm=arm)):
        settings = {"cuda_graphs": len(seen) != 1, "overlap": len(seen) == 2}
        engine = engine_of(model, drafters, planner, **settings)
        texts = texts_of(engine, do_sample=do_sample)
        assert engine.stats.faults == []
        assert set(engine.stats.graphs.eager) <= {"prefill or catch-up"}
        counts = [(o.drafted, o.accepted, o.emitted) for o in planner.observations]
        seen.append((texts, counts))
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert sum(sum(accepted) for _, accepted, _ in seen[0][1]) > 0


# One forward


def segments(num: int, tokens: int, context: int, *, trees: bool) -> list[Segment]:
    pages = -(-(context + tokens) // PAGE)
    made: list[Segment] = []
    for row in range(num):
        blocks = 1 + row * pages + np.random.default_rng(row).permutation(pages)
        length = max(tokens - row % 3, 1)  # ragged
        places = range(context, context + length)
        slots = [int(blocks[place // PAGE]) * PAGE + place % PAGE for place in places]
        parents = tuple([-1] * (length - 1)) if trees and length > 1 else None
        made.append(Segment([7] * length, context, PageTable(blocks), slots, length, parents))
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("trees", [False, True])
def test_a_graph_gives_the_logits_of_the_eager_forward(
    on_cpu: PreTrainedModel, dtype: torch.dtype, tolerance: float, trees: bool
) -> None:
    own = copy.deepcopy(on_cpu).to(CUDA, dtype)
    with engine_of(own) as engine:
        runner = engine.runner
        assert runner.cache is not None
        generator = torch.Generator(CUDA).manual_seed(1)
        for tensor in (*runner.cache.keys, *runner.cache.values):
            tensor.normal_(generator=generator)
        graphs = runner.graphs
        for context in (100, 700, 100):  # another number of pages, and back
            for num in (5, 3):
                step = segments(num, 4, context, trees=trees)
                replayed = runner.forward(step)[0].clone()
                runner.graphs = None
                eager = in_callers_order(engine, step)
                runner.graphs = graphs
                torch.testing.assert_close(replayed, eager, rtol=tolerance, atol=tolerance)
    assert engine.stats.graphs.replayed == 6


def in_callers_order(engine: Engine, step: Sequence[Segment]) -> Tensor:
    """An eager forward packs segments as it likes."""
    logits, first_rows = engine.runner.forward(step)
    rows = [logits[first : first + s.num_logits] for first, s in zip(first_rows, step, strict=True)]
    return torch.cat(rows)


# A step


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_rows_are_processed_and_sampled_without_waiting() -> None:
    """Greedy rows and rows of two settings."""
    heats = (LogitsProcessorList([TemperatureLogitsWarper(heat)]) for heat in (0.5, 2.0))
    samplers = [RowSampler(processors=each, do_sample=True, seed=3) for each in heats]
    rows = [Row(own, (1, 2), (3,)) for own in (*samplers, RowSampler()) for _ in range(5)]
    logits = torch.randn(len(rows), 100, device=CUDA)

    def tokens() -> Tensor:
        return sample_rows(process_rows(take_rows(logits, [*range(1, 15), 0]), rows), rows)

    expected = tokens()
    try:
        torch.cuda.set_sync_debug_mode("error")
        again = tokens()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, expected)


def test_a_gpu_copies_at_a_rate_that_the_hosts_clock_cannot_show() -> None:
    """The device's clock counts neither launch nor wait."""
    found = measure_ceilings(CUDA, torch.bfloat16)
    source = torch.randint(256, (1 << 30,), dtype=torch.uint8, device=CUDA)
    copy = torch.empty_like(source)
    seconds = min(seconds_of(lambda: copy.copy_(source), CUDA) for _ in range(10))
    assert 0.99 < found.bytes_per_second / (2.0 * (1 << 30) / seconds) < 1.5


def test_a_shorter_look_sees_about_the_same_ceilings() -> None:
    """What an engine takes for a GPU that no table knows."""
    short, long = ceilings_of(CUDA, torch.bfloat16), measure_ceilings(CUDA, torch.bfloat16)
    assert 0.7 < short.bytes_per_second / long.bytes_per_second < 1.4
    assert 0.5 < short.flops_per_second / long.flops_per_second < 1.4


def test_a_forward_is_timed_by_the_devices_own_clock() -> None:
    marks = marks_of(CUDA)
    assert marks is not None
    left = torch.randn(4096, 4096, device=CUDA)
    left @ left
    torch.cuda.synchronize()
    clock = StepClock(marks)
    clock.lap("draft")
    for _ in range(20):
        left @ left
    clock.lap("verify")  # long before the device is done
    timing = clock.timing({}, 0.0)
    flops = 20 * 2 * 4096**3
    assert 1e11 < flops / timing.verify_seconds < 1e16


def test_timings_of_steps_add_up(model: PreTrainedModel) -> None:
    planner = ForcedPlanner(arm="ngram")
    texts_of(engine_of(model, ("ngram",), planner))
    measured = [o.timing for o in planner.observations if o.timing.verify_seconds]
    assert measured  # steps that captured a graph have no time of verification
    for timing in measured:
        assert 0 < timing.verify_seconds < timing.total_seconds


def test_rejection_on_the_device_keeps_the_law_of_the_engine(model: PreTrainedModel) -> None:
    """Greedy requests give the model's text under rejection too, graphs included."""
    known = texts_of(engine_of(model))
    config = EngineConfig.model_validate(CONFIG)
    planner = ForcedPlanner(arm="draft_model")
    engine = Engine(
        model,
        drafters=[on_same_device(model)],
        planner=planner,
        verification="rejection",
        config=config,
    )
    assert texts_of(engine) == known
    assert planner.totals()[1] > 0


# Steps ahead of their tokens


def test_steps_ahead_give_the_same_text_and_end_where_it_ends(model: PreTrainedModel) -> None:
    """Greedy and sampled, with and without graphs; some end by a token that nobody foresaw."""
    for do_sample in (False, True):
        plain = texts_of(engine_of(model, overlap=False), do_sample=do_sample)
        for cuda_graphs in (False, True):
            engine = engine_of(model, cuda_graphs=cuda_graphs, overlap=True)
            assert texts_of(engine, do_sample=do_sample) == plain
            assert engine.stats.launched_ahead > engine.stats.steps // 2
    end = plain[0][5]
    ends = []
    for overlap in (False, True):
        with engine_of(model, overlap=overlap) as engine:
            for seed, prompt in enumerate(PROMPTS):
                engine.submit(
                    prompt, max_new_tokens=40, do_sample=True, seed=seed, eos_token_id=end
                )
            finished = engine.run()
            ends.append([(r.output, r.finish_reason) for r in finished.values()])
    assert sorted(ends[0]) == sorted(ends[1])
    assert "eos" in {reason for _, reason in ends[0]}


def test_a_read_does_not_wait_for_what_was_asked_for_later() -> None:
    """A copy behind a short product comes back long before the products that were queued behind it."""
    values, matrix = torch.arange(5, device=CUDA), torch.randn(8192, 8192, device=CUDA)
    matrix @ matrix
    torch.cuda.synchronize()
    read = on_its_way(values + 1)
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(20):
        matrix @ matrix
    done.record()
    assert read().tolist() == [1, 2, 3, 4, 5]
    assert not done.query()
    torch.cuda.synchronize()
    assert begun.elapsed_time(done) > 1.0


def test_the_device_hardly_waits_between_steps_ahead(model: PreTrainedModel) -> None:
    """Their time is the device's, and what it waited for the host."""
    planner = Told()
    with engine_of(model, (), planner, overlap=True) as engine:
        for seed, prompt in enumerate(PROMPTS[:4]):
            engine.submit(prompt, max_new_tokens=200, do_sample=False, seed=seed)
        engine.run()
        assert engine.stats.launched_ahead > 150
    measured = [o.timing for o in planner.observations if o.timing.verify_seconds]
    assert len(measured) > 150
    assert all(0 <= t.overhead_seconds < 1.0 and t.verify_seconds < 1.0 for t in measured)


# Under torch's profiler, last of all: it may hang where nobody may trace the device


def test_a_step_copies_to_the_host_once(model: PreTrainedModel) -> None:
    """Greedy and sampled requests, n-gram drafts: the verdicts are all that comes back."""
    with engine_of(model, ("ngram",), ForcedPlanner(arm="ngram")) as engine:
        for seed, prompt in enumerate(PROMPTS[:4]):
            engine.submit(prompt, max_new_tokens=200, seed=seed, do_sample=seed % 2 == 1)
        assert copies_of_steps(engine) == [1] * 5


def test_rounds_copy_to_the_host_once_for_all(model: PreTrainedModel) -> None:
    """A copy of the drafts, one of the verdicts; greedy, sampled and with processors."""
    drafters = (on_same_device(model),)
    options = ({}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_k": 30})
    with engine_of(model, drafters, InFull(arm="draft_model", num_draft_tokens=5)) as engine:
        for seed, own in enumerate(options):
            engine.submit(PROMPTS[1], max_new_tokens=300, seed=seed, **{"do_sample": False, **own})
        assert copies_of_steps(engine) == [2] * 5


def test_pages_are_chosen_for_all_requests_by_one_copy_more(model: PreTrainedModel) -> None:
    """In the steps in which somebody's page has become full."""
    arm = "sparse_kv:64:scored"
    with engine_of(model, (arm,), InFull(arm=arm, num_draft_tokens=3)) as engine:
        for seed, length in enumerate((90, 80, 100)):
            prompt = random_prompt(length, seed=length)
            engine.submit(prompt, max_new_tokens=300, seed=seed, do_sample=False)
        assert set(copies_of_steps(engine)) <= {2, 3}


def copies_of_steps(engine: Engine) -> list[int]:
    """How often each of five steps copies to the host, once all requests have begun."""
    while any(not request.output for request in engine.requests.values()):
        engine.step()
    for _ in range(12):  # capture
        engine.step()
    copies = []
    for _ in range(5):
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            engine.step()
            torch.cuda.synchronize()
        copies.append(sum("DtoH" in event.name for event in profile.events()))
    return copies
