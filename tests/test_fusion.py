"""Projections computed at once and layers compiled while graphs are recorded; on the CPU, by a fake recorder."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from torch import Tensor, fx, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sdcontrol.engine import fusion, merging
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.merging import merge, merged, same_inputs
from sdcontrol.engine.runner import ModelRunner
from tests.engine_support import (
    RandomPlanner,
    noised,
    random_prompt,
    run_checked,
    submit_all,
    tiny_model,
)
from tests.graph_support import FakeRecorder, use_fake_graphs

IDS = torch.tensor([[5, 9, 2, 7, 30]])


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("Llama", seed=72)


@pytest.fixture
def recorder() -> Iterator[FakeRecorder]:
    with pytest.MonkeyPatch.context() as patch:
        yield use_fake_graphs(patch)


@pytest.fixture(autouse=True)
def plain_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events go to standard logging, whatever another test has configured."""
    monkeypatch.setattr(structlog, "is_configured", lambda: False)


def groups_of(model: PreTrainedModel) -> list[list[nn.Linear]]:
    return same_inputs(model, ModelRunner(model).probe)


def names_of(model: PreTrainedModel) -> list[list[str]]:
    names = {id(module): name for name, module in model.named_modules()}
    return [[names[id(layer)].rsplit(".", 1)[1] for layer in layers] for layers in groups_of(model)]


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS).logits
    return logits


def texts_of(model: PreTrainedModel, **settings: object) -> tuple[list[list[int]], Engine]:
    """Of requests with drafts of every kind, some of whose forwards have one token only."""
    config = EngineConfig.model_validate(
        {"kv_tokens": 4096, "max_prefill_tokens": 40, "max_batch_size": 4, **settings}
    )
    drafters = ("ngram", "sparse_kv:48", noised(copy.deepcopy(model)))
    engine = Engine(model, drafters=drafters, planner=RandomPlanner(1), config=config)
    names: list[str] = []
    for seed, length in enumerate((5, 60, 33, 70)):
        options = {"max_new_tokens": 16 + 8 * seed, "seed": seed, "do_sample": seed % 2 == 1}
        names += submit_all(engine, [random_prompt(length, seed=length)], **options)
    with engine:
        finished = run_checked(engine)
    return [finished[name].output for name in names], engine


# Which layers, and their weights


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Llama", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]] * 2),
        ("Qwen2", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]] * 2),
        ("Mixtral", [["q_proj", "k_proj", "v_proj"]] * 2),
        ("Phi3", []),  # its own weights are merged already
    ],
)
def test_layers_of_one_input_are_found_by_what_they_are_given(
    architecture: str, expected: list[list[str]]
) -> None:
    assert names_of(tiny_model(architecture, seed=73)) == expected


def test_layers_that_somebody_has_changed_or_shares_are_left_alone(model: PreTrainedModel) -> None:
    first, second = model.model.layers
    first.self_attn.k_proj.register_forward_hook(lambda *_: None)
    first.mlp.up_proj.weight = first.mlp.gate_proj.weight
    second.self_attn.v_proj.half()
    second.mlp.gate_proj.compile(backend="eager")
    second.mlp.up_proj.forward = second.mlp.up_proj.forward
    calls = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    found = same_inputs(model, lambda: [_call(each) for each in (first.mlp, *calls)])
    assert found == []


def test_a_tensor_that_is_changed_in_place_between_two_layers_is_not_the_same_any_more() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.middle, self.right = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, given: Tensor) -> Tensor:
            first = self.left(given) + self.middle(given)
            return first + self.right(given.mul_(2.0))

    model = Changing()
    with torch.no_grad():
        found = same_inputs(model, lambda: model(torch.ones(1, 4)))  # type: ignore[arg-type]  # any module
    assert found == [[model.left, model.middle]]


def _call(module: nn.Module) -> None:
    like = next(module.parameters())
    module(torch.zeros(1, 2, like.shape[1], dtype=like.dtype))


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])
def test_merging_changes_no_value_and_no_name(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture, seed=74)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    expected = logits_of(model)
    groups = [merge(layers) for layers in groups_of(model)]
    assert all(group.is_whole for group in groups)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameters[name] is value for name, value in model.named_parameters())
    assert torch.equal(logits_of(model), expected)
    with merged(groups):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in before.items())


def test_what_was_merged_is_merged_again_without_a_copy(model: PreTrainedModel) -> None:
    first, again = ([merge(layers) for layers in groups_of(model)] for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one.weight.data_ptr() == other.weight.data_ptr()
        assert torch.equal(one.weight, other.weight)


def test_merged_layers_compute_once_and_keep_nothing(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [merge(layers) for layers in groups_of(model)]
    widths: list[int] = []
    linear = nn.functional.linear

    def counting(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        widths.append(len(weight))
        return linear(given, weight, bias)

    monkeypatch.setattr(merging.functional, "linear", counting)
    with merged(groups):
        logits_of(model)
        assert all(group.computed is None for group in groups)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    both = sum(len(layer.weight) for layer in (mlp.gate_proj, mlp.up_proj))
    three = sum(len(getattr(attention, f"{name}_proj").weight) for name in "qkv")
    assert widths.count(three) == widths.count(both) == 2
    assert (
        len(widths) == 2 * (4 + 3) + 1 - 2 * 3
    )  # of two layers and the head: three calls fewer each


def test_a_layer_that_is_given_another_tensor_computes_on_that(model: PreTrainedModel) -> None:
    layers = groups_of(model)[0]
    groups = [merge(layers)]
    query, key, _ = layers
    one, other = torch.randn(2, 3, query.in_features).unbind()
    expected = query(one), key(other), key(one)
    with merged(groups):
        seen = query(one), key(other), key(one)
    for mine, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_after_the_block_layers_are_what_they_were(model: PreTrainedModel) -> None:
    groups = [merge(layers) for layers in groups_of(model)]
    keys = {name: set(module.__dict__) for name, module in model.named_modules()}
    with merged(groups):
        assert type(groups[0].layers[0]) is not nn.Linear
    assert all(type(layer) is nn.Linear for group in groups for layer in group.layers)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == keys


def test_a_layer_that_was_given_other_weights_computes_with_those(model: PreTrainedModel) -> None:
    groups = [merge(layers) for layers in groups_of(model)]
    key = groups[0].layers[1]
    key.weight.data = torch.randn_like(key.weight)
    expected = logits_of(model)
    assert not groups[0].is_whole
    with merged(groups):
        assert type(key) is nn.Linear
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)
    key.weight.data.mul_(2.0)  # in place, of a group that is whole again
    groups = [merge(layers) for layers in groups_of(model)]
    key.weight.data.mul_(0.5)
    with merged(groups):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)


# In an engine


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3", "Mixtral"])
def test_the_text_is_the_same_with_merged_projections(
    architecture: str, recorder: FakeRecorder
) -> None:
    model = tiny_model(architecture, seed=75)
    known, _ = texts_of(model, merge_projections=False)
    assert all(layer.weight.untyped_storage().nbytes() == layer.weight.nbytes
               for layer in model.modules() if isinstance(layer, nn.Linear))  # fmt: skip
    texts, engine = texts_of(model)
    assert texts == known
    assert engine.stats.graphs.captured > 0
    assert recorder.replays > 0
    assert all(type(module) is not merging._Part for module in model.modules())


def test_without_graphs_no_weight_is_moved(model: PreTrainedModel) -> None:
    places = [parameter.data_ptr() for parameter in model.parameters()]
    texts_of(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_one_compilation_serves_all_layers_and_sizes(
    model: PreTrainedModel, recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each of two models four pieces, around attention; once more for forwards of one token."""
    known, _ = texts_of(model)
    pieces: list[list[str]] = []

    def seen(graph: fx.GraphModule, _: object) -> object:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        pieces.append([getattr(node.target, "__name__", "") for node in nodes])
        return graph.forward

    use_backend(monkeypatch, seen)
    texts, engine = texts_of(model, compile_layers=True)
    assert texts == known
    assert engine.stats.graphs.captured > 8
    assert 8 <= len(pieces) <= 16
    products = [piece.count("linear") for piece in pieces]
    assert sorted(set(products)) == [0, 1, 2]  # q k v; out; gate and up, down
    layers = model.model.layers
    assert all("_compiled_call_impl" not in layer.__dict__ for layer in layers)


def test_another_engine_compiles_nothing_more(
    model: PreTrainedModel, recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[object] = []

    def seen(graph: fx.GraphModule, _: object) -> object:
        pieces.append(graph)
        return graph.forward

    use_backend(monkeypatch, seen)
    known, _ = texts_of(model, compile_layers=True)
    first = len(pieces)
    assert first > 0
    texts, _ = texts_of(model, compile_layers=True)
    assert texts == known
    assert len(pieces) == first


def test_layers_that_cannot_be_compiled_are_said_once_and_captured_as_they_are(
    model: PreTrainedModel,
    recorder: FakeRecorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuses(*_: object) -> object:
        raise RuntimeError("no compiler here")

    known, _ = texts_of(model)
    use_backend(monkeypatch, refuses)
    with caplog.at_level(logging.WARNING):
        texts, engine = texts_of(model, compile_layers=True)
    assert texts == known
    assert engine.stats.graphs.eager.keys() <= {"prefill or catch-up"}
    said = [record for record in caplog.records if "layers_not_compiled" in record.getMessage()]
    assert len(said) == 2  # the target and the draft model, each once
    assert "no compiler here" in said[0].getMessage()


def test_layers_that_the_user_has_compiled_stay_theirs(
    model: PreTrainedModel, recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, _ = texts_of(model)
    calls: list[object] = []
    layer = model.model.layers[0]
    layer._compiled_call_impl = lambda *given, **more: (
        calls.append(layer), layer._call_impl(*given, **more))[1]  # fmt: skip
    own = layer._compiled_call_impl
    use_backend(monkeypatch, lambda graph, _: graph.forward)
    texts, _ = texts_of(model, compile_layers=True)
    assert texts == known
    assert calls
    assert layer._compiled_call_impl is own


def test_weights_that_find_no_room_side_by_side_stay_where_they_are(
    model: PreTrainedModel,
    recorder: FakeRecorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known, _ = texts_of(model, merge_projections=False)
    side_by_side = merging._side_by_side
    asked: list[object] = []

    def is_full(parameters: list[nn.Parameter]) -> nn.Parameter:
        asked.append(parameters)
        if len(asked) > 2:
            raise torch.OutOfMemoryError("no room")
        return side_by_side(parameters)

    monkeypatch.setattr(merging, "_side_by_side", is_full)
    with caplog.at_level(logging.WARNING):
        texts, _ = texts_of(model)
    assert texts == known
    said = [record for record in caplog.records if "projections_left_apart" in record.getMessage()]
    assert "merged=2" in said[0].getMessage()
    assert "of=4" in said[0].getMessage()


def use_backend(patch: pytest.MonkeyPatch, backend: object) -> None:
    """`torch.compile` with this backend instead of inductor, which has a minute's work on a CPU."""
    torch.compiler.reset()
    patch.setattr(
        fusion,
        "_compiled",
        lambda layer: torch.compile(layer._call_impl, dynamic=True, backend=backend),  # type: ignore[arg-type]
    )
