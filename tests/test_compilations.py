"""Compilations are counted, and a step in which there was one is not measured."""

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from sdcontrol.engine.compilations import compilations
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.coupled import CoupledVerifier
from sdcontrol.engine.drafters.host import DraftHost
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import ModelRunner
from tests.engine_support import (
    ForcedPlanner,
    random_prompt,
    run_checked,
    submit_all,
    tiny_model,
)

KERNEL = (None, None, "kernel", {}, "its hash")  # what Triton says of one that it loads


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("Llama", seed=23)


@pytest.fixture
def load() -> Iterator[Callable[[], None]]:
    """Triton's announcement of a kernel; its listeners are afterwards those of before."""
    knobs = pytest.importorskip("triton.knobs")
    hooks = knobs.runtime.kernel_load_start_hook
    before = list(hooks.calls)
    yield lambda: hooks(*KERNEL)
    hooks.calls[:] = before


def unmeasured_steps(model: PreTrainedModel, *, overlap: bool = False) -> list[bool]:
    """Of the steps of a run with drafts: whether their phases have no times."""
    planner = ForcedPlanner()
    config = EngineConfig(kv_tokens=1024, overlap=overlap)
    with Engine(model, drafters=["ngram"], planner=planner, config=config) as engine:
        submit_all(engine, [random_prompt(40, seed=1)], max_new_tokens=24)
        run_checked(engine)
    timings = [observation.timing for observation in planner.observations]
    assert all(timing.verify_seconds or not timing.draft_seconds for timing in timings)
    return [not timing.verify_seconds for timing in timings]


# What is counted


def test_loading_a_kernel_is_counted_and_all_other_listeners_are_told(
    load: Callable[[], None],
) -> None:
    from triton import knobs

    told: list[str] = []
    earlier = lambda *_: told.append("earlier")  # noqa: E731
    later = lambda *_: told.append("later")  # noqa: E731
    knobs.runtime.kernel_load_start_hook.add(earlier)
    before = compilations()
    knobs.runtime.kernel_load_start_hook.add(later)
    load()
    assert compilations() == before + 1  # although it listens since long, and was asked twice
    assert told == ["earlier", "later"]


def test_triton_announces_a_kernel_that_it_loads(
    load: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is a fake; the code around it is Triton's."""
    from triton.compiler import compiler

    device = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: SimpleNamespace(warp_size=32),
        launcher_cls=lambda source, metadata: None,
        utils=SimpleNamespace(load_binary=lambda *_: ("module", "function", 16, 0, 1024)),
    )
    monkeypatch.setattr(compiler, "driver", SimpleNamespace(active=device))
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 1000)
    kernel = object.__new__(compiler.CompiledKernel)
    kernel.module = kernel.src = None
    kernel.metadata = SimpleNamespace(shared=0, num_warps=4)
    kernel.function, kernel.kernel = None, b""
    kernel.name, kernel.metadata_group, kernel.hash = "kernel", {}, "its hash"
    before = compilations()
    for _ in range(2):  # it is loaded once
        kernel._init_handles()
    assert compilations() == before + 1


def test_torch_compiling_anew_is_counted() -> None:
    twice = torch.compile(lambda values: 2 * values, backend="eager", dynamic=False)
    before = compilations()
    seen = []
    for size in (3, 3, 4, 4):
        twice(torch.zeros(size))
        seen.append(compilations() - before)
    assert seen == [1, 1, 2, 2]
    torch.compiler.reset()  # forgets its listeners as well
    before = compilations()
    twice(torch.zeros(3))
    assert compilations() == before + 1


def test_threads_lose_none(load: Callable[[], None]) -> None:
    before = compilations()
    threads = [
        threading.Thread(target=lambda: [load() for _ in range(200)] and None) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compilations() == before + 800


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_without_triton_and_with_one_that_says_nothing_nothing_is_counted(
    monkeypatch: pytest.MonkeyPatch, module: object
) -> None:
    for name in ("triton.knobs", "torch._dynamo"):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    assert compilations() == compilations()


# What it does to a step


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"), [(ModelRunner, "forward"), (CoupledVerifier, "ask"), (DraftHost, "move")]
)
def test_only_a_step_in_which_a_kernel_was_compiled_is_not_measured(
    model: PreTrainedModel,
    load: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    owner: type,
    name: str,
    overlap: bool,
) -> None:
    plain, calls = getattr(owner, name), []

    def work(self: object, *arguments: object) -> object:
        calls.append(name)
        if len(calls) == 4:
            load()
        return plain(self, *arguments)

    unmeasured_steps(model)  # whatever is compiled once, for all that follows
    assert not any(unmeasured_steps(model, overlap=overlap))
    monkeypatch.setattr(owner, name, work)
    missing = unmeasured_steps(model, overlap=overlap)
    assert len(missing) == len(calls) > 5
    assert [step for step, is_missing in enumerate(missing) if is_missing] == [3]


def test_engines_beside_each_other_all_hear_of_a_compilation(
    model: PreTrainedModel, load: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inner engine asks for the count as often as it steps, in the middle of an outer's step."""
    plain, inner = ModelRunner.forward, []

    def forward(self: ModelRunner, *arguments: object) -> object:
        if not inner:
            inner.append(True)
            load()
            inner[0] = any(unmeasured_steps(model))
        return plain(self, *arguments)  # type: ignore[arg-type]

    unmeasured_steps(model)
    monkeypatch.setattr(ModelRunner, "forward", forward)
    missing = unmeasured_steps(model)
    assert inner == [False]
    assert missing == [True, *[False] * (len(missing) - 1)]


def test_a_layer_that_is_compiled_anew_costs_the_steps_in_which_it_is() -> None:
    model = tiny_model("Llama", seed=29)
    mlp = next(module for name, module in model.named_modules() if name.endswith("mlp"))
    assert isinstance(mlp, nn.Module)
    mlp.compile(backend="eager", dynamic=False)
    first = unmeasured_steps(model)
    assert 1 < sum(first) < len(first)
    assert not any(unmeasured_steps(model))
