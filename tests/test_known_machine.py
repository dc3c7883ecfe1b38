"""A GPU from the table: the controller starts from what the roofline says, and so do replays."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from benchmarks.known_machine import CONTEXTS, MACHINE, Cell, rate_of
from benchmarks.simulated_regret import KINDS
from sdcontrol.controller import Controller
from sdcontrol.engine.ceilings import Ceilings
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.errors import ConfigError
from sdcontrol.estimators import hardware, shapes
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.estimators.hardware import Hardware
from sdcontrol.estimators.known_machine import KnownMachine, find_known
from sdcontrol.estimators.roofline import Forward
from sdcontrol.estimators.uninformed import UninformedCost
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.replay import controller_of, replay_exactly
from sdcontrol.traces.schema import ControllerFacts
from sdcontrol.traces.step_times import CostTimes, NoisyTimes, tell_engine
from tests.engine_support import tiny_model
from tests.plan_instances import observation_of, small_instance

H100 = "NVIDIA H100 80GB HBM3"
CONFIG: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "dtype": "torch.bfloat16",
}
TOKENS = np.array([1.0, 16.0, 64.0, 512.0])


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (H100, "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A40", "A40"),
    ],
)
def test_devices_are_known_by_the_names_that_drivers_give(device: str, name: str) -> None:
    found = find_known(device, {"target": CONFIG})
    assert found is not None
    assert found.hardware.name == name
    assert (found.cost().verify_seconds(TOKENS, 4096.0, 1) > 0.0).all()


@pytest.mark.parametrize(
    ("device", "models"),
    [
        ("x86_64", {"target": CONFIG}),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {"target": CONFIG}),  # a part of the device
        (H100, {"target": {"model_type": "mamba", "hidden_size": 768}}),
        (H100, {"target": CONFIG, "draft_model": {"model_type": "mamba"}}),
        (H100, {"draft_model": CONFIG}),
    ],
)
def test_what_is_not_known_changes_nothing(
    device: str, models: Mapping[str, Mapping[str, object]]
) -> None:
    assert find_known(device, models) is None
    controller = Controller("goodput")
    cost = controller.cost
    controller.runs_on(device, models)
    assert controller.machine is None
    assert controller.cost is cost


def test_of_a_device_that_no_table_knows_ceilings_are_measured_where_that_says_something() -> None:
    asked: list[str] = []

    def seen() -> Ceilings:
        asked.append("ceilings")
        return Ceilings(800e12, 4.25e12, 141e9)  # as an H200's were

    assert find_known("NVIDIA H200", {"target": CONFIG}, seen) == find_known(
        "NVIDIA H200", {"target": CONFIG}
    )
    assert find_known("NVIDIA H300", {"target": {"model_type": "mamba"}}, seen) is None
    assert asked == []
    controller = Controller("goodput")
    controller.runs_on("NVIDIA H300", {"target": CONFIG}, seen)
    assert asked == ["ceilings"]
    machine = controller.machine
    assert machine is not None
    assert machine.hardware == Hardware("NVIDIA H300", 800e12, 4.25e12, 141e9)
    known = find_known("NVIDIA H200", {"target": CONFIG})
    assert known is not None
    for tokens in TOKENS:  # what is reached of either is about the same
        start = float(controller.cost.verify_seconds(tokens, 4096.0, 1))
        assert start == pytest.approx(
            float(known.cost().verify_seconds(tokens, 4096.0, 1)), rel=0.05
        )


def test_a_device_whose_ceilings_cannot_be_measured_is_as_before() -> None:
    def fail() -> Ceilings:
        raise RuntimeError("out of memory")

    controller = Controller("goodput")
    cost = controller.cost
    with pytest.raises(RuntimeError, match="out of memory"):
        controller.runs_on("NVIDIA H300", {"target": CONFIG}, fail)
    assert controller.cost is cost
    assert controller.machine is None


def test_drafters_that_are_no_model_of_known_size_take_the_share_that_is_assumed_elsewhere() -> (
    None
):
    cost = MACHINE.cost()
    target = Forward(MACHINE.target, MACHINE.hardware)
    small = Forward(MACHINE.draft_models["draft_model"], MACHINE.hardware)
    plain = float(target.seconds(8.0, 8e3, 8.0))
    assert float(cost.draft_seconds("ngram", 8.0, 8e3)) == 0.0
    assert float(cost.draft_seconds("sparse_kv", 8.0, 8e3)) == pytest.approx(plain)
    assert float(cost.draft_seconds("draft_model", 8.0, 8e3)) == float(small.seconds(8.0, 8e3, 8.0))
    assert float(cost.draft_seconds("of_my_own", 8.0, 8e3)) == pytest.approx(0.2 * plain)


@pytest.mark.parametrize("pads_first", [True, False])
def test_a_controller_starts_from_the_roofline_whatever_it_is_told_first(pads_first: bool) -> None:
    controller = Controller("goodput")
    tell = [lambda: controller.pad_to((64,)), lambda: controller.price_by(MACHINE)]
    for one in tell if pads_first else reversed(tell):
        one()
    seconds = controller.cost.verify_seconds(TOKENS, 65536.0, 16)
    padded = np.maximum(TOKENS, 64.0) * (TOKENS <= 64.0) + TOKENS * (TOKENS > 64.0)
    assert seconds == pytest.approx(MACHINE.cost().verify_seconds(padded, 65536.0, 16), rel=0.02)


def test_a_cost_that_was_given_or_measured_stays() -> None:
    own = Controller("goodput", cost=UninformedCost())
    own.price_by(MACHINE)
    assert isinstance(own.cost, UninformedCost)
    assert own.machine is None
    learnt = Controller("goodput", clock=None)
    view, _ = small_instance(np.random.default_rng(0), 0)
    learnt.observe(observation_of(view, learnt.plan(view), 0.01))
    cost = learnt.cost
    learnt.price_by(MACHINE)
    assert learnt.cost is cost
    assert learnt.machine is None


def test_where_a_model_lies_is_not_kept() -> None:
    found = find_known(H100, {"target": {**CONFIG, "_name_or_path": "/home/me/models/my-llama"}})
    assert found is not None
    assert found.target.name == "my-llama"


def test_what_is_known_is_read_as_it_was_written() -> None:
    """To the last bit: a replay starts from it."""
    facts = ControllerFacts(seed=0, max_draft_tokens=4, plan_budget_seconds=0.5, machine=MACHINE)
    read = ControllerFacts.model_validate_json(facts.model_dump_json()).machine
    assert read == MACHINE
    assert (
        read.cost().verify_seconds(TOKENS, 4096.0, 2)
        == MACHINE.cost().verify_seconds(TOKENS, 4096.0, 2)
    ).all()


def test_an_engine_says_what_runs_where_and_a_recording_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdcontrol.engine.parts.device_name", lambda device: H100)
    target, draft = tiny_model(), tiny_model(num_hidden_layers=1)
    controller = Controller("goodput")
    with Recorder(controller, tmp_path / "trace") as recorder:
        _decode(target, draft, recorder)
    assert controller.machine is not None
    assert controller.machine.hardware == hardware.by_name("H100-SXM")
    assert controller.machine.target.weight_bytes == 4.0  # what was loaded, float32
    assert controller.machine.draft_models["draft_model"].num_layers == 1
    trace = Trace(tmp_path / "trace")
    assert trace.machine == controller.machine
    assert controller_of(trace).machine == controller.machine
    assert replay_exactly(trace).is_exact
    bare = Controller("goodput", max_draft_tokens=controller.max_draft_tokens, clock=None)
    assert type(bare.cost) is OnlineCost
    assert not replay_exactly(trace, bare).is_exact  # it matters


def test_an_engine_measures_a_gpu_that_no_table_knows_and_a_recording_keeps_what_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Ceilings(8e12, 4e11, 8e9)
    monkeypatch.setattr("sdcontrol.engine.parts.device_name", lambda device: "NVIDIA H300")
    monkeypatch.setattr("sdcontrol.engine.parts.to_measure", lambda device, dtype: lambda: seen)
    controller = Controller("goodput")
    with Recorder(controller, tmp_path / "trace") as recorder:
        _decode(tiny_model(), tiny_model(num_hidden_layers=1), recorder)
    machine = controller.machine
    assert machine is not None
    assert machine.hardware == Hardware("NVIDIA H300", 8e12, 4e11, 8e9)
    assert machine.draft_models["draft_model"].num_layers == 1
    assert Trace(tmp_path / "trace").machine == machine
    assert replay_exactly(tmp_path / "trace").is_exact


def test_on_a_device_that_is_not_known_sizes_say_what_a_catch_up_takes(tmp_path: Path) -> None:
    """A CPU: a layer of two is half of what a token of a prompt passes. All else is assumed as ever."""
    controller = Controller("goodput")
    with Recorder(controller, tmp_path / "trace") as recorder:
        _decode(tiny_model(), tiny_model(num_hidden_layers=1), recorder)
    machine = controller.machine
    assert machine is not None
    assert machine.hardware is None
    with pytest.raises(ConfigError, match="a roofline needs it"):
        machine.cost()
    known, nothing = machine.online_cost((8, 16)), OnlineCost(None, (8, 16))
    late = nothing.catch_up_seconds("draft_model", 500)
    assert known.catch_up_seconds("draft_model", 500) == pytest.approx(0.5 / 0.1 * late)
    assert known.catch_up_seconds("ngram", 500) == 0.0
    for price in (known.draft_seconds, nothing.draft_seconds):
        assert price("draft_model", 4.0, 1e3) == nothing.draft_seconds("draft_model", 4.0, 1e3)
    assert (
        known.verify_seconds(TOKENS, 4096.0, 1) == nothing.verify_seconds(TOKENS, 4096.0, 1)
    ).all()
    assert Trace(tmp_path / "trace").machine == machine
    assert replay_exactly(tmp_path / "trace").is_exact


def test_a_head_is_no_part_of_a_catch_up_and_experts_that_a_token_skips_are_none() -> None:
    shares = {
        name: shapes.by_name(name).parameters_per_token
        / shapes.by_name("llama-3.1-8b").parameters_per_token
        for name in ("llama-3.2-1b", "qwen3-30b-a3b", "llama-3.1-8b")
    }
    assert shares["llama-3.1-8b"] == 1.0
    assert shares["llama-3.2-1b"] == pytest.approx(
        0.973e9 / 6.98e9, rel=0.01
    )  # 1.24e9, 8.03e9 with tables
    assert shares["qwen3-30b-a3b"] == pytest.approx(
        2.73e9 / 6.98e9, rel=0.02
    )  # 3.3e9 active with tables


def _decode(
    target: PreTrainedModel, draft: PreTrainedModel, planner: Controller | Recorder
) -> None:
    config = EngineConfig(kv_tokens=1024)
    with Engine(target, drafters=["ngram", draft], planner=planner, config=config) as engine:
        for prompt in ([1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8, 5, 6]):
            engine.submit(prompt, max_new_tokens=24, do_sample=False)
        engine.run()


def test_a_simulation_tells_its_planner_of_the_machine(tmp_path: Path) -> None:
    class Known(CostTimes):
        machine: KnownMachine = MACHINE

    for times in (Known(MACHINE.cost()), NoisyTimes(Known(MACHINE.cost()), relative_noise=0.1)):
        controller = Controller("goodput", clock=None)
        tell_engine(times, controller)
        assert controller.machine == MACHINE
    controller = Controller("goodput", clock=None)
    with Recorder(controller, tmp_path / "trace") as recorder:  # which passes it on, and keeps it
        tell_engine(Known(MACHINE.cost()), recorder)
    assert controller.machine == MACHINE
    assert Trace(tmp_path / "trace").machine == MACHINE


def test_what_is_known_of_a_machine_pays_in_the_first_steps() -> None:
    """Simulated, seeds fixed, 40 steps: a controller that knows it beside one that does not."""
    ratios = []
    for choice in product(("good", "bad"), (*KINDS, "mixed"), CONTEXTS, range(3)):
        engine, kind, context, seed = choice
        cell, knowing = Cell(engine, kind, 8, context), Controller("goodput")
        knowing.price_by(MACHINE)
        told, untold = (rate_of(one, cell, 40, seed) for one in (knowing, Controller("goodput")))
        ratios.append(told / untold)
    assert np.mean(ratios) > 1.02
    assert min(ratios) > 0.9
