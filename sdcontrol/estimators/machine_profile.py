"""What was measured on one machine, as a file: its ceilings, and what models' steps took there.

Knows nothing of how it was measured. A profile is JSON; `advise` reads it in place of a name from the
hardware table, and anything else that needs to know what a step costs on that machine can, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from sdcontrol.core import FloatArray
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.calibration import OF_SEEN_CEILINGS
from sdcontrol.estimators.config_numbers import MOST
from sdcontrol.estimators.hardware import Hardware
from sdcontrol.estimators.roofline import Calibration, Forward, RooflineCost
from sdcontrol.estimators.shapes import ModelShape
from sdcontrol.json_files import read_model
from sdcontrol.whole_files import write_whole

__all__ = [
    "LEAST_STEPS",
    "MachineProfile",
    "ModelTimes",
    "StepTime",
    "calibrate",
    "read_profile",
    "relative_errors",
]

SCHEMA_VERSION: Literal[1] = 1
LEAST_STEPS = 3
"""Of a model, that a calibration takes."""
_STORED = ("weight_bytes", "attention_bytes", "head_bytes", "kv_bytes")  # a dtype, to a shape


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class StepTime(_Record):
    """One forward: so many tokens for each of `batch_size` requests of the same context."""

    batch_size: int = Field(ge=1, le=MOST)
    tokens_per_request: int = Field(
        ge=1, le=MOST, description="1 is a plain step; more verify drafts"
    )
    context_tokens: int = Field(
        ge=1, le=MOST, description="of each request, as a RequestView counts it"
    )
    seconds: float = Field(ge=1e-9, allow_inf_nan=False, description="median over the repeats")


class ModelTimes(_Record):
    """What one model's forwards took."""

    role: Literal["target", "draft"]
    name: str
    dtype: str
    shape: ModelShape
    steps: tuple[StepTime, ...]


class MachineProfile(_Record):
    """Everything that was measured in one go."""

    schema_version: Literal[1] = SCHEMA_VERSION
    sdcontrol_version: str
    date: str  # ISO 8601, with its zone
    machine: Mapping[str, str | int]
    dtype: str = Field(description="of the matrices whose rate is in `hardware`")
    hardware: Hardware
    models: tuple[ModelTimes, ...] = ()

    def write(self, path: Path) -> None:
        """As indented JSON."""
        write_whole(path, (self.model_dump_json(indent=1) + "\n").encode())

    def times(self, role: str) -> ModelTimes | None:
        """Of the model measured in this role, if any was."""
        return next((model for model in self.models if model.role == role), None)

    def in_another_dtype(self, shape: ModelShape) -> ModelTimes | None:
        """Of the model of this shape, where it was measured, but stored otherwise."""
        stored = {name: getattr(shape, name) for name in _STORED}
        alike = (
            model
            for model in self.models
            if replace(model.shape, name=shape.name, **stored) == shape
        )
        return None if self.steps(shape) else next(alike, None)

    def steps(self, shape: ModelShape) -> tuple[StepTime, ...]:
        """Those of the model of this shape; none where it was not measured."""
        same = (model for model in self.models if replace(model.shape, name=shape.name) == shape)
        return next((model.steps for model in same), ())

    def calibration(self, shape: ModelShape) -> Calibration:
        """Fitted on the steps of the model of this shape; of measured ceilings where those are too few."""
        steps = self.steps(shape)
        if len(steps) < LEAST_STEPS:
            return OF_SEEN_CEILINGS
        return calibrate(Forward(shape, self.hardware, calibration=OF_SEEN_CEILINGS), steps)

    def cost(self) -> RooflineCost:
        """What steps of the measured models cost here: for a replay, or as `OnlineCost`'s prior.

        Raises `ConfigError` where no target was measured, or a model by too few steps.
        """
        for model in self.models:
            if 0 < len(model.steps) < LEAST_STEPS:
                raise ConfigError(
                    f"the profile of {self.hardware.name} has {len(model.steps)} steps of {model.name}, "
                    f"at least {LEAST_STEPS} are needed; profile it with more of --batch, --tokens or "
                    "--context"
                )
        forwards = {
            model.role: Forward(
                model.shape, self.hardware, calibration=self.calibration(model.shape)
            )
            for model in self.models
        }
        if "target" not in forwards:
            raise ConfigError(
                f"the profile of {self.hardware.name} has no model; profile it with --model"
            )
        draft_models = {"draft_model": forwards["draft"]} if "draft" in forwards else {}
        return RooflineCost(forwards["target"], draft_models)


def read_profile(path: Path | str) -> MachineProfile:
    """The profile in a file. Raises `ConfigError` where there is none."""
    remedy = "make one with sdcontrol profile"
    return read_model(Path(path), MachineProfile, what="machine profile", remedy=remedy)


def calibrate(forward: Forward, steps: Sequence[StepTime]) -> Calibration:
    """The calibration under which `forward` explains `steps` best, in relative squares.

    Efficiencies are searched; the overheads per layer and per token follow by non-negative least
    squares. Unlike `calibration.fit` it wants steps of several tokens per request too: plain steps
    alone cannot tell what a request costs from what a token costs. Raises `ConfigError` for fewer
    than three steps.
    """
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"{len(steps)} measured steps; give at least {LEAST_STEPS}")
    efficiencies = product(np.linspace(0.25, 1.0, 76), np.geomspace(0.02, 1.0, 24))
    fits = [_fit_at(forward, steps, float(memory), float(peak)) for memory, peak in efficiencies]
    return min(fits, key=lambda found: found[0])[1]


def relative_errors(forward: Forward, steps: Sequence[StepTime]) -> list[float]:
    """Predicted over measured time, less one, of every step."""
    tokens, kv_tokens, batch, seconds = _columns(steps)
    errors: list[float] = (forward.seconds(tokens, kv_tokens, batch) / seconds - 1.0).tolist()
    return errors


def _fit_at(
    forward: Forward, steps: Sequence[StepTime], memory: float, peak: float
) -> tuple[float, Calibration]:
    """(squared error, calibration) for these efficiencies."""
    bare = Calibration(memory, peak, layer_overhead_seconds=0.0, token_overhead_seconds=0.0)
    tokens, kv_tokens, batch, seconds = _columns(steps)
    base = replace(forward, calibration=bare).seconds(tokens, kv_tokens, batch)
    left = 1.0 - base / seconds
    features = forward.shape.num_layers * np.stack([np.ones_like(tokens), tokens]) / seconds
    per_layer, per_token = _non_negative_pair(features, left)
    error = np.sum((per_layer * features[0] + per_token * features[1] - left) ** 2)
    return float(error), replace(
        bare, layer_overhead_seconds=per_layer, token_overhead_seconds=per_token
    )


def _non_negative_pair(features: FloatArray, target: FloatArray) -> tuple[float, float]:
    """Least squares with two unknowns, `features` `[2, steps]`: of the free solution, else of one."""
    gram, moment = features @ features.T, features @ target
    determinant = gram[0, 0] * gram[1, 1] - gram[0, 1] ** 2
    if determinant > 1e-12 * gram[0, 0] * gram[1, 1]:
        first = (gram[1, 1] * moment[0] - gram[0, 1] * moment[1]) / determinant
        second = (gram[0, 0] * moment[1] - gram[0, 1] * moment[0]) / determinant
        if first >= 0.0 and second >= 0.0:
            return float(first), float(second)
    alone = [max(float(moment[i] / gram[i, i]), 0.0) for i in range(2)]
    gains = [alone[i] * float(moment[i]) for i in range(2)]
    return (alone[0], 0.0) if gains[0] >= gains[1] else (0.0, alone[1])


def _columns(steps: Sequence[StepTime]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Tokens, KV tokens, requests and seconds, each `[steps]`."""
    batch = np.array([step.batch_size for step in steps], dtype=float)
    tokens = batch * np.array([step.tokens_per_request for step in steps], dtype=float)
    kv_tokens = batch * np.array([step.context_tokens for step in steps], dtype=float)
    return tokens, kv_tokens, batch, np.array([step.seconds for step in steps])
