"""Backends chosen at run time, memory that is measured first, and the clock of a device."""

import logging
import sys
from dataclasses import replace

import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdcontrol.engine import config as engine_settings
from sdcontrol.engine import graphs
from sdcontrol.engine.backends import backend_of, cache_class_of, page_bounds_of
from sdcontrol.engine.clock import StepClock
from sdcontrol.engine.config import EngineConfig, Memory, cache_blocks
from sdcontrol.engine.drafters import host
from sdcontrol.engine.drafters.host import CATCH_UP_TOKENS
from sdcontrol.engine.drafters.pages import PageScorer
from sdcontrol.engine.graphs import forward_bytes, graph_bytes, largest_forward_bytes
from sdcontrol.engine.kernels.reference import TorchAttention
from sdcontrol.engine.kernels.reference_steps import TorchPageBounds
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.errors import ConfigError, UnsupportedModel
from tests.engine_support import noised, tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = LayerShape(8, 2, 64, 64, torch.bfloat16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of compute capability 9.0, as far as the choice of a backend asks."""
    triton_attention = pytest.importorskip("sdcontrol.engine.kernels.triton_attention")
    monkeypatch.setattr(triton_attention, "gpu_of", lambda device: (90, 132))


@pytest.fixture(autouse=True)
def plain_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events go to standard logging, whatever another test has configured."""
    monkeypatch.setattr(structlog, "is_configured", lambda: False)


# Backends


def test_torch_computes_off_cuda() -> None:
    backend = backend_of("auto", [PLAIN], CPU)
    assert isinstance(backend, TorchAttention)
    assert cache_class_of(backend) is KVCache
    assert backend_of(backend, [PLAIN], CUDA) is backend


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["auto", "triton"])
def test_triton_computes_on_cuda_and_writes_the_cache(name: str) -> None:
    backend = backend_of(name, [PLAIN], CUDA)  # type: ignore[arg-type]
    assert type(backend).__name__ == "TritonAttention"
    assert cache_class_of(backend).__name__ == "TritonKVCache"
    assert isinstance(backend_of("torch", [PLAIN], CUDA), TorchAttention)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (LayerShape(8, 2, 512, 512, torch.bfloat16), "512 and 512 dimensions"),
        (LayerShape(71, 1, 64, 64, torch.bfloat16), "71 query heads share a KV head"),
        (LayerShape(8, 2, 64, 64, torch.float64), "torch.float64"),
    ],
)
def test_layers_beyond_the_kernel_fall_back_aloud_unless_triton_is_asked_for(
    layer: LayerShape, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(backend_of("auto", [PLAIN, layer], CUDA), TorchAttention)
    assert "triton_attention_left_out" in caplog.text
    assert reason in caplog.text
    with pytest.raises(UnsupportedModel, match=reason):
        backend_of("triton", [PLAIN, layer], CUDA)


@pytest.mark.usefixtures("hopper")
def test_a_gpu_of_another_maker_is_computed_on_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch calls it "cuda", too, and Triton knows no `maxnreg` there: every launch would raise."""
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    with caplog.at_level(logging.WARNING):
        assert isinstance(backend_of("auto", [PLAIN], CUDA), TorchAttention)
    assert "ROCm 6.4.2" in caplog.text
    with pytest.raises(ConfigError, match=r"'triton' on ROCm 6\.4\.2: .* use 'torch'"):
        backend_of("triton", [PLAIN], CUDA)


def test_a_gpu_that_is_too_old_for_the_kernels_is_computed_on_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tile for prompts, with heads of 256, takes 96 KB of a T4's 64: its first launch would raise."""
    triton_attention = pytest.importorskip("sdcontrol.engine.kernels.triton_attention")
    monkeypatch.setattr(triton_attention, "gpu_of", lambda device: (75, 40))
    with caplog.at_level(logging.WARNING):
        assert isinstance(backend_of("auto", [PLAIN], CUDA), TorchAttention)
    assert "compute capability 7.5" in caplog.text
    with pytest.raises(ConfigError, match=r"capability 7\.5: .* 8\.0 and later; use 'torch'"):
        backend_of("triton", [PLAIN], CUDA)
    monkeypatch.setattr(triton_attention, "gpu_of", lambda device: (80, 108))
    assert type(backend_of("auto", [PLAIN], CUDA)).__name__ == "TritonAttention"


def test_triton_without_cuda_is_refused_in_one_line() -> None:
    triton_attention = pytest.importorskip("sdcontrol.engine.kernels.triton_attention")
    if triton_attention.IS_INTERPRETED:
        pytest.skip("kernels are interpreted in this process")
    config = EngineConfig(kv_tokens=64, attention_backend="triton")
    with pytest.raises(ConfigError, match="'triton' on cpu: it runs on CUDA; use 'torch'"):
        Engine(tiny_model(), config=config)


def test_a_machine_without_triton_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sdcontrol.engine.kernels.triton_attention", None)
    monkeypatch.delattr("sdcontrol.engine.kernels.triton_attention", raising=False)
    with pytest.raises(ConfigError, match=r"needs triton .*; install it, or use 'torch'"):
        backend_of("triton", [PLAIN], CUDA)
    assert isinstance(backend_of("auto", [PLAIN], CUDA), TorchAttention)


# Memory


@given(
    free=st.integers(1 << 22, 1 << 36),
    fraction=st.sampled_from([0.1, 0.5, 0.95]),
    sizes=st.lists(st.integers(1, 1 << 12), min_size=1, max_size=3),
    once=st.lists(st.integers(0, 1 << 16), max_size=2),
)
def test_all_caches_together_take_their_share_of_what_is_free(
    free: int, fraction: float, sizes: list[int], once: list[int]
) -> None:
    config = EngineConfig(memory_fraction=fraction)
    memory = Memory(
        {f"model {index}": size for index, size in enumerate(sizes)},
        {f"once {index}": size for index, size in enumerate(once)},
    )
    blocks = cache_blocks(config, memory, CUDA, lambda device: free)
    page, left = config.block_size * sum(sizes), fraction * free - sum(once)
    assert (blocks - 2) * page <= left < (blocks + 1) * page


def test_a_draft_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    alone = Memory({"target": 131072})
    both = Memory({"target": 131072, "drafter 'small'": 32768})
    config = EngineConfig(kv_tokens=10_000)
    assert cache_blocks(config, alone, CUDA, lambda device: 1_500_000_000) == 626
    with pytest.raises(ConfigError) as refused:
        cache_blocks(config, both, CUDA, lambda device: 1_500_000_000)
    assert str(refused.value) == (
        "the KV cache does not fit: bytes per token target 131072, drafter 'small' 32768; "
        "1500000000 bytes are free; 10000 tokens are asked for; lower kv_tokens, or leave out "
        "drafter 'small'"
    )
    with pytest.raises(
        ConfigError, match=r"memory_fraction 0\.5 of that holds 15 tokens; raise memory_fraction"
    ):
        cache_blocks(EngineConfig(), both, CUDA, lambda device: 5_000_000)


def test_what_is_taken_once_counts_against_tokens_that_are_asked_for() -> None:
    memory = Memory(
        {"target": 131072, "scored pages": 8192}, {"scored pages": 10**9, "CUDA graphs": 10**8}
    )
    config = EngineConfig(kv_tokens=10_000)
    needed = 10_000 * (131072 + 8192) + 10**9 + 10**8
    assert cache_blocks(config, memory, CUDA, lambda device: needed) == 626
    with pytest.raises(ConfigError) as refused:
        cache_blocks(config, memory, CUDA, lambda device: needed - 1)
    assert str(refused.value) == (
        "the KV cache does not fit: bytes per token target 131072, scored pages 8192; once scored "
        f"pages 1000000000, CUDA graphs 100000000; {needed - 1} bytes are free; 10000 tokens are "
        "asked for; lower kv_tokens, or leave out scored pages and CUDA graphs"
    )


def test_a_step_finds_room_beside_the_cache() -> None:
    """However much of the memory the cache may take, and where its size is asked for."""
    memory = Memory({"target": 131072}, {"CUDA graphs": 10**8}, step_bytes=10**9)
    needed = 10_000 * 131072 + 10**8 + 10**9
    config = EngineConfig(kv_tokens=10_000)
    assert cache_blocks(config, memory, CUDA, lambda device: needed) == 626
    with pytest.raises(ConfigError, match=r"in a step 1000000000; .* 10000 tokens are asked for"):
        cache_blocks(config, memory, CUDA, lambda device: needed - 1)
    for settings in (config, EngineConfig()):
        with pytest.raises(ConfigError, match="they leave nothing for it; lower max_batch_size, "):
            cache_blocks(settings, memory, CUDA, lambda device: 10**9 + 10**8)
    most = EngineConfig(memory_fraction=0.95)
    assert cache_blocks(most, memory, CUDA, lambda device: needed) == 626


def test_an_engine_counts_the_draft_models_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings, "free_bytes_of", lambda device: 1 << 20)
    model = tiny_model()
    with Engine(model) as alone, Engine(model, drafters=[noised(model)]) as both:
        assert both.pool.num_blocks - 1 == (alone.pool.num_blocks - 1) // 2
    monkeypatch.setattr(engine_settings, "free_bytes_of", lambda device: 1 << 12)
    with pytest.raises(ConfigError, match="target 256, drafter 'draft_model' 256; 4096 bytes"):
        Engine(model, drafters=[noised(model)])


def test_an_engine_on_a_gpu_counts_its_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt beside decoding, or a draft model that catches up: whichever takes more."""
    model, config = (
        tiny_model(),
        EngineConfig(kv_tokens=512, max_batch_size=4, max_prefill_tokens=64),
    )
    with Engine(model, config=config) as alone, Engine(model, drafters=[noised(model)]) as both:
        assert alone._host.memory.step_bytes == 0  # a CPU's memory can be swapped
        monkeypatch.setattr(ModelRunner, "device", property(lambda runner: CUDA))
        most = config.most_decoding_tokens
        prompts = forward_bytes(alone.runner, 64 + most, 4 + most)
        assert alone._host.memory.step_bytes == prompts > 0
        host = replace(both._host, config=config)
        catching_up = forward_bytes(host.runners["draft_model"], CATCH_UP_TOKENS, 4)
        assert host.memory.step_bytes == catching_up > prompts


def test_an_engine_counts_what_scored_pages_really_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that were made are as large as was counted before; recent pages take nothing."""
    monkeypatch.setattr(engine_settings, "free_bytes_of", lambda device: 1 << 24)
    model, config = tiny_model(), EngineConfig(max_batch_size=4)
    with Engine(model, drafters=["sparse_kv:64"], config=config) as recent:
        assert set(recent._host.memory.per_token) == {"target"}
        assert recent._host.memory.fixed == {}
    with Engine(model, drafters=["sparse_kv:64:scored"], config=config) as engine:
        memory, scorer = engine._host.memory, engine._host.scorer
        assert isinstance(scorer, PageScorer)
        assert memory.fixed == {"scored pages": scorer._store().nbytes}
        bounds = page_bounds_of(engine.runner.cache)  # type: ignore[arg-type]
        assert isinstance(bounds, TorchPageBounds)
        counted = memory.per_token["scored pages"] * engine.pool.num_blocks * config.block_size
        assert bounds.low.nbytes + bounds.high.nbytes == counted
        free = (1 << 24) * config.memory_fraction - memory.fixed_bytes
        assert engine.pool.num_blocks - 1 == -(-(free // memory.token_bytes) // config.block_size)


def test_memory_for_graphs_is_set_aside_where_there_will_be_some_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the largest bucket: 4 requests of 1 + 3 tokens; two rows of logits, four of a layer, and
    parts of contexts, with a weight each.
    """
    model, config = tiny_model(), EngineConfig(max_batch_size=4, max_draft_tokens=3)
    sizes = model.config
    outputs = sizes.num_attention_heads * (sizes.head_dim + 1)
    layer = 4 * (sizes.hidden_size + sizes.intermediate_size)
    expected = 16 * 4 * (2 * sizes.vocab_size + layer) + 8192 * 4 * outputs
    monkeypatch.setattr(engine_settings, "free_bytes_of", lambda device: 1 << 22)
    with Engine(model, config=config) as eager:
        assert eager.stats.graphs.expected_bytes == graph_bytes(eager.runner, config) == 0
        assert largest_forward_bytes(eager.runner, 16) == expected
    monkeypatch.setattr(graphs, "_are_wanted", lambda device, settings: settings.cuda_graphs)
    monkeypatch.setattr(ModelRunner, "has_kernels", True)
    monkeypatch.setattr(host, "attach_graphs", lambda runner, settings, stats: None)
    with Engine(model, config=config) as engine:
        assert engine.stats.graphs.expected_bytes == expected
        tokens = ((1 << 22) * config.memory_fraction - expected) // engine.runner.bytes_per_token
        assert engine.pool.num_blocks - 1 == -(-tokens // config.block_size)
        assert engine.pool.num_blocks < eager.pool.num_blocks
    without = config.model_copy(update={"cuda_graphs": False})
    assert graph_bytes(eager.runner, without) == 0


# The clock


class FakeMarks:
    """A device whose queue runs behind the host's: `reached` are the times of its marks."""

    def __init__(self, reached: list[float]) -> None:
        self._reached = reached
        self.added: list[float] = []

    def add(self) -> None:
        self.added.append(self._reached[len(self.added)])

    def seconds(self) -> float:
        return self.added[-1] - self.added[-2]


def test_a_forward_is_timed_on_the_device_and_the_whole_step_by_the_host() -> None:
    now = iter([0.0, 1.0, 1.5, 4.0, 14.0, 15.0])
    clock = StepClock(FakeMarks([4.0, 13.0]), lambda: next(now))
    for phase in ("overhead", "controller", "draft", "verify", "overhead"):
        clock.lap(phase)
    timing = clock.timing({"draft_model": 2.0}, 0.25)
    assert timing.verify_seconds == pytest.approx(9.0)
    assert timing.controller_seconds == pytest.approx(0.75)
    assert timing.overhead_seconds == pytest.approx(1.0 + 0.5 + 1.0 + 1.0)
    assert timing.total_seconds == pytest.approx(15.25)


def test_without_a_device_the_host_times_everything() -> None:
    now = iter([0.0, 1.0, 2.0, 4.0, 14.0])
    clock = StepClock(now=lambda: next(now))
    for phase in ("overhead", "controller", "draft", "verify"):
        clock.lap(phase)
    timing = clock.timing({}, 0.0)
    assert timing.verify_seconds == pytest.approx(10.0)
    assert timing.overhead_seconds == pytest.approx(3.0)
