"""What was measured on one machine, as a file: its ceilings, and what models' steps took there.

Knows nothing of how it was measured. A profile is JSON; `advise` reads it in place of a name from the
hardware table, and anything else that needs to know what a step costs on that machine can, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sdcontrol.errors import ConfigError
from sdcontrol.estimators.calibration import PlainStep, fit
from sdcontrol.estimators.hardware import Hardware
from sdcontrol.estimators.roofline import Calibration, Forward
from sdcontrol.estimators.shapes import ModelShape

__all__ = [
    "MachineProfile",
    "ModelTimes",
    "StepTime",
    "calibrate",
    "read_profile",
    "relative_errors",
]

SCHEMA_VERSION: Literal[1] = 1
_REACHED = Calibration(bandwidth_efficiency=0.9, compute_efficiency=0.9)
"""Of measured ceilings; 0.8 and 0.7 are for a vendor's."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class StepTime(_Record):
    """One forward: so many tokens for each of `batch_size` requests of the same context."""

    batch_size: int = Field(ge=1)
    tokens_per_request: int = Field(ge=1, description="1 is a plain step; more verify drafts")
    context_tokens: int = Field(ge=1, description="of each request, as a RequestView counts it")
    seconds: float = Field(gt=0, description="median over the repeats")


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
        path.write_text(self.model_dump_json(indent=1) + "\n", "utf-8")

    def times(self, role: str) -> ModelTimes | None:
        """Of the model measured in this role, if any was."""
        return next((model for model in self.models if model.role == role), None)

    def steps(self, shape: ModelShape) -> tuple[StepTime, ...]:
        """Those of the model of this shape; none where it was not measured."""
        same = (model for model in self.models if replace(model.shape, name=shape.name) == shape)
        return next((model.steps for model in same), ())

    def calibration(self, shape: ModelShape) -> Calibration:
        """Fitted on the steps of the model of this shape; without any, that of measured ceilings."""
        steps = self.steps(shape)
        if not steps:
            return _REACHED
        return calibrate(Forward(shape, self.hardware, calibration=_REACHED), steps)


def read_profile(path: Path) -> MachineProfile:
    """The profile in a file. Raises `ConfigError` where there is none."""
    try:
        return MachineProfile.model_validate_json(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error.reason}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{path} is no machine profile: {where}: {first['msg']}; make one with sdcontrol profile"
        ) from error


def calibrate(forward: Forward, steps: Sequence[StepTime]) -> Calibration:
    """The calibration under which `forward` explains `steps` best, in relative squares.

    Bandwidth efficiency and overheads come from the plain steps alone, compute efficiency from all.
    Raises `ConfigError` for fewer than three plain steps.
    """
    plain = [
        PlainStep(step.batch_size, step.context_tokens, step.seconds)
        for step in steps
        if step.tokens_per_request == 1
    ]
    fits = [
        fit(
            replace(forward, calibration=replace(forward.calibration, compute_efficiency=share)),
            plain,
        )
        for share in np.geomspace(0.02, 1.0, 18).tolist()
    ]
    return min(fits, key=lambda found: _squared_error(replace(forward, calibration=found), steps))


def relative_errors(forward: Forward, steps: Sequence[StepTime]) -> list[float]:
    """Predicted over measured time, less one, of every step."""
    batch = np.array([step.batch_size for step in steps], dtype=float)
    tokens = batch * np.array([step.tokens_per_request for step in steps], dtype=float)
    kv_tokens = batch * np.array([step.context_tokens for step in steps], dtype=float)
    seconds = np.array([step.seconds for step in steps])
    errors: list[float] = (forward.seconds(tokens, kv_tokens, batch) / seconds - 1.0).tolist()
    return errors


def _squared_error(forward: Forward, steps: Sequence[StepTime]) -> float:
    return sum(error**2 for error in relative_errors(forward, steps))
