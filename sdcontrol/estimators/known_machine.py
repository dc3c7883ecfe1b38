"""A device and models that are known by name and by size: what their steps cost before any is measured.

Knows nothing of measurements; `machine_profile` does. The vendor's figures and what is usually reached
of them say how a step's time depends on its tokens, on its context and on the drafter: a start, from
which measurements go on. Of a device that no table knows, ceilings that somebody measured say the same.
Where only the models are known, their sizes say how much less a draft model computes of a prompt than
the target.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.errors import ConfigError, UnknownName
from sdcontrol.estimators import hardware, shapes
from sdcontrol.estimators.calibration import OF_SEEN_CEILINGS
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.estimators.hardware import Ceilings, Hardware
from sdcontrol.estimators.roofline import Calibration, Forward, RooflineCost
from sdcontrol.estimators.shapes import ModelShape
from sdcontrol.estimators.uninformed import share_of

__all__ = ["KnownMachine", "find_known"]

_TARGET = "target"
_OF_VENDOR = Calibration()


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """Models on one device, None where that is not known. `draft_models` go by family.

    `calibration` is how far from the device's ceilings its steps are assumed to run.
    """

    hardware: Hardware | None
    target: ModelShape
    draft_models: Mapping[str, ModelShape] = field(default_factory=dict)
    calibration: Calibration = _OF_VENDOR

    def online_cost(self, token_edges: Sequence[int] = ()) -> OnlineCost:
        """For a controller to start from."""
        if self.hardware is not None:
            return OnlineCost(self.cost(), token_edges)
        of_target = self.target.parameters_per_token
        shares = {
            family: shape.parameters_per_token / of_target
            for family, shape in self.draft_models.items()
        }
        return OnlineCost(None, token_edges, shares)

    def cost(self) -> RooflineCost:
        """What steps cost by the roofline; `ConfigError` where the device is not known."""
        if self.hardware is None:
            raise ConfigError(
                "hardware is None, and a roofline needs it; take one from the table, or a profile"
            )
        drafting = {
            family: Forward(shape, self.hardware, calibration=self.calibration)
            for family, shape in self.draft_models.items()
        }
        return _Assumed(Forward(self.target, self.hardware, calibration=self.calibration), drafting)


def find_known(
    device: str,
    models: Mapping[str, Mapping[str, object]],
    ceilings: Callable[[], Ceilings] | None = None,
) -> KnownMachine | None:
    """What is known of models on `device`, by the name that its driver gives; None where that says nothing.

    `models` are parsed `config.json`s by role: "target", and families of draft models. `ceilings` measures
    the device's; it is asked only where the models are known and the device is not.
    """
    try:
        draft_models = {role: _shape(config) for role, config in models.items()}
        target = draft_models.pop(_TARGET)
    except (ConfigError, UnknownName, KeyError):
        return None
    try:
        return KnownMachine(hardware.by_name(device), target, draft_models)
    except UnknownName:
        if ceilings is not None:
            seen = Hardware.seen(device, ceilings())
            return KnownMachine(seen, target, draft_models, OF_SEEN_CEILINGS)
        # sizes alone say something of draft models
        return KnownMachine(None, target, draft_models) if draft_models else None


def _shape(config: Mapping[str, object]) -> ModelShape:
    """By the model's name alone: traces keep it, and where a model lies is nobody's business."""
    name = PurePath(str(config.get("_name_or_path") or "")).name
    return shapes.from_config(config, name or None)


class _Assumed(RooflineCost):
    """The roofline; of a drafter that is no model of known size, a share of the target's forward."""

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """See `Cost`."""
        share = 1.0 if family in self.draft_models else share_of(family)
        return np.asarray(share * super().draft_seconds(family, num_requests, kv_tokens))
