"""The example of a decode loop that is not ours: what it writes, and what it may use."""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel

from sdcontrol import BatchView, Controller, Observation, Plan
from sdcontrol.core import Confidence
from tests.engine_support import tiny_model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "own_loop.py"
Run = Callable[[list[str], Path], str]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


PROMPTS = ([5, 6, 7, 8, 9] * 4, [3, 1, 4, 1, 5, 9, 2, 6], [7] * 12)


class Recording:
    """A controller that remembers what it was told."""

    def __init__(self, policy: str) -> None:
        self.controller = Controller(policy)
        self.observations: list[Observation] = []

    def plan(self, view: BatchView) -> Plan:
        return self.controller.plan(view)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        return self.controller.refine(view, plan, confidence)

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)
        self.controller.observe(observation)

    def take_faults(self) -> tuple[str, ...]:
        return self.controller.take_faults()


def generated(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("policy", ["off", "static:ngram:4", "goodput"])
def test_the_loop_writes_what_generate_writes(
    example: ModuleType, model: PreTrainedModel, policy: str
) -> None:
    for prompt in PROMPTS:
        written = example.decode(model, list(prompt), 40, Controller(policy))
        assert written == generated(model, list(prompt), 40)


def test_drafts_are_made_accepted_and_told(example: ModuleType, model: PreTrainedModel) -> None:
    controller = Recording("static:ngram:4")
    written = example.decode(model, [5, 6, 7, 8, 9] * 4, 60, controller)
    told = controller.observations
    assert sum(sum(observation.emitted) for observation in told) == len(written) == 60
    assert sum(sum(observation.accepted) for observation in told) > 0
    assert any(observation.accepted < observation.proposed for observation in told)
    assert len(told) < 60
    first, *others = told
    assert first.view.prefill_tokens == 19
    assert {observation.view.prefill_tokens for observation in others} == {0}
    assert all(observation.timing.verify_seconds > 0 for observation in told)
    assert [observation.view.step for observation in told] == list(range(len(told)))


def test_the_loop_uses_the_controller_and_values_only(example: ModuleType) -> None:
    loop = ast.parse(inspect.getsource(example.decode))
    names = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
    ours = {
        name
        for name in names
        if str(getattr(getattr(example, name, None), "__module__", "")).startswith("sdcontrol")
    }
    assert ours == {"BatchView", "Controller", "Hint", "Observation", "RequestView", "Timing"}


def test_the_document_shows_the_loop_of_the_example() -> None:
    document = (ROOT / "docs" / "own_loop.md").read_text("utf-8")
    block = document.partition("```python\n")[2].partition("```")[0]
    assert block.strip()
    assert block in EXAMPLE.read_text("utf-8")


def test_the_example_runs_as_printed(run: Run) -> None:
    printed = run([sys.executable, str(EXAMPLE)], ROOT)
    speeds = [line for line in printed.splitlines() if line.endswith("tokens/s")]
    assert [line.partition(":")[0] for line in speeds] == ["off", "goodput"]
