"""What a decoder's run taught, for the next one with the same models on the same machine.

Knows engines and controllers; nothing of how observations are kept.
"""

import atexit
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol.controller import Controller
from sdcontrol.core import Observation, Planner
from sdcontrol.engine.drafters.build import DrafterSpecs
from sdcontrol.engine.loop import Engine
from sdcontrol.errors import ConfigError
from sdcontrol.extras import needed
from sdcontrol.integrations.recording import facts_of_run, models_of
from sdcontrol.interrupts import raise_interrupt
from sdcontrol.logs import EventLog

if TYPE_CHECKING:
    from sdcontrol.traces.warm_start import WarmStart

__all__ = ["check_warm_start", "keep", "warm_start_of"]

_log = EventLog(__name__)
_SAME = {"models", "hardware", "drafters", "verification"}  # of a run's facts


def check_warm_start(folder: Path | str | None, planner: Planner) -> None:
    """Raise `ConfigError` where pyarrow is missing, there is no controller, or there can be no such folder."""
    if folder is None:
        return
    with needed():
        from sdcontrol.traces.facts import controller_in
        from sdcontrol.traces.warm_start import made_folder

    if controller_in(planner) is None:
        raise ConfigError(
            f"warm_start={str(folder)!r} is what a controller learnt, and {type(planner).__name__} is none; "
            "leave warm_start out, or give a policy"
        )
    made_folder(folder)


def warm_start_of(
    folder: Path | str | None, planner: Planner, engine: Engine, drafters: DrafterSpecs
) -> "WarmStart | None":
    """Tell the controller behind `planner` what earlier runs like this one observed; None without a folder.

    One that has observed steps already, of another decoder or told by its owner, has begun, and is told nothing.
    Written when the process ends, if it was not before.
    """
    if folder is None:
        return None
    from sdcontrol.traces.facts import controller_in
    from sdcontrol.traces.warm_start import WarmStart

    kept = WarmStart(folder, _setting(engine, drafters))
    controller = controller_in(planner)
    if controller is not None and not controller.num_observed:
        _tell(controller, kept.recall())
    atexit.register(kept.save)  # for those who forget to close
    return kept


def keep(kept: "WarmStart | None") -> None:
    """Write it, now that the run has ended."""
    if kept is not None:
        kept.save()
        atexit.unregister(kept.save)


def _tell(controller: Controller, steps: list[Observation]) -> None:
    """What estimators of a user's own make of steps may fail, as it may in any step: then the rest is left out."""
    try:
        controller.warm_start(steps)
    except Exception as error:
        raise_interrupt(error)
        _log.warning("warm_start_not_learnt", reason=repr(error), remedy="the rest is left out")


def _setting(engine: Engine, drafters: DrafterSpecs) -> dict[str, JsonValue]:
    """All that must be the same for what was learnt to hold."""
    model = engine.model
    facts: dict[str, JsonValue] = facts_of_run(engine, drafters).model_dump(
        mode="json", include=_SAME
    )
    return {
        **facts,
        "class": type(model).__name__,  # where its layout is not known, there is no more
        "dtype": str(model.dtype),
        "weights": {role: _digest(one) for role, one in models_of(engine, drafters).items()},
    }


def _digest(model: PreTrainedModel) -> str:
    """Of one number in the middle of every parameter: checkpoints of one shape, or under one name, differ there."""
    numbers = [_middle(weights) for weights in model.parameters()]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def _middle(weights: Tensor) -> tuple[int, float]:
    """How many there are, and the one in their middle; 0 where it cannot be read."""
    count = weights.numel()
    try:
        return count, float(weights.detach().flatten()[count // 2])
    except (RuntimeError, NotImplementedError, IndexError, TypeError):  # packed, offloaded or empty
        return count, 0.0
