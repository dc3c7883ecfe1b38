"""What a recording could not write down is refused where it is made: else all of it would be lost at its end."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Belief, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.errors import ConfigError, ObservationError
from sdcontrol.policies.base import Policy
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder


class Saying(Policy):
    """Two tokens for everybody, for this reason."""

    def __init__(self, reason: Any) -> None:
        self.reason = reason

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        return Plan.uniform(view, "ngram", 2, self.reason)


def observation_of(view: BatchView, plan: Plan) -> Observation:
    counts = tuple(choice.num_draft_tokens for choice in plan.choices)
    return Observation(
        view, plan, counts, counts, (0,) * len(counts), (1,) * len(counts), Timing({}, 0.01)
    )


def view_of(step: int, **facts: Any) -> BatchView:
    request = RequestView("mine", 10 + step, step, 50 - step, drafters=("ngram",))
    return BatchView(step, (replace(request, **facts),), 100)


@pytest.mark.parametrize("reason", [None, 3, {"why": "so"}], ids=repr)
def test_a_policy_whose_reason_is_no_text_costs_plain_steps_and_no_recording(
    reason: Any, tmp_path: Path
) -> None:
    recorder = Recorder(Controller(Saying(reason)), tmp_path / "trace")
    for step in range(4):
        view = view_of(step)
        plan = recorder.plan(view)
        assert plan.is_off
        recorder.observe(observation_of(view, plan))
    recorder.close()
    told = list(Trace(tmp_path / "trace").observations())
    assert len(told) == 4
    assert "reason of the plan is" in told[0].faults[0]


class Wordless(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (Wordless(), "plan_raised: Wordless: "),
        (OSError(os.fsdecode(b"no file \xe9")), r"plan_raised: OSError: no file \udce9"),
    ],
    ids=["no words", "half a character"],
)
def test_a_policy_whose_error_cannot_be_told_costs_plain_steps_and_no_recording(
    error: Exception, says: str, tmp_path: Path
) -> None:
    class Raising(Policy):
        def plan(self, view: BatchView, belief: Belief) -> Plan:
            raise error

    controller = Controller(Raising())
    recorder = Recorder(controller, tmp_path / "trace")
    for step in range(4):
        view = view_of(step)
        recorder.observe(observation_of(view, recorder.plan(view)))
    recorder.close()
    assert controller.is_quarantined
    assert next(iter(Trace(tmp_path / "trace").observations())).faults == (says,)


@pytest.mark.parametrize("temperature", [None, "hot", [0.0, 1.0]], ids=repr)
def test_a_temperature_is_a_number(temperature: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"temperature of request 'mine' is .*; give a number, 0\.0"
    ):
        view_of(0, temperature=temperature)


@pytest.mark.parametrize("confidence", ["sure", [0.5, 0.5]], ids=repr)
def test_a_confidence_is_a_number(confidence: Any) -> None:
    with pytest.raises(ConfigError, match=r"confidence of Hint\(.*; give a number, or None"):
        Hint(confidence=confidence)


@pytest.mark.parametrize("number", [1, np.float32(1.0), np.int64(1), True], ids=repr)
def test_numbers_of_other_types_are_taken_as_floats(number: Any) -> None:
    told = (
        view_of(0, temperature=number).requests[0].temperature,
        Hint(confidence=number).confidence,
    )
    assert told == (1.0, 1.0)
    assert {*map(type, told)} == {float}
    assert math.isnan(view_of(0, temperature=math.nan).requests[0].temperature)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"plan": Plan(Plan.uniform(view_of(0), "ngram", 2).choices, None)}, "reason .* is None"),  # type: ignore[arg-type]
        ({"faults": "plan_raised"}, "faults are 'plan_raised'; give a tuple of strings"),
        ({"faults": (ValueError("no"),)}, "faults are .*; give a tuple of strings"),
    ],
    ids=["no reason", "a fault alone", "an error"],
)
def test_what_is_said_of_a_step_is_text(facts: dict[str, Any], says: str) -> None:
    view, controller = view_of(0), Controller("off", clock=None)
    right = observation_of(view, Plan.uniform(view, "ngram", 2))
    with pytest.raises(ObservationError, match=says):
        controller.observe(replace(right, **facts))
    controller.observe(replace(right, faults=("mine: of my own",)))
    assert controller.num_observed == 1
