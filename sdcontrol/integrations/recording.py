"""A recorder for a run with our engine, and what its trace says of the run.

Knows engines, models and machines; nothing of how a trace is written.
"""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from transformers import PreTrainedModel

from sdcontrol.core import Planner
from sdcontrol.engine.backends import device_name
from sdcontrol.engine.coupled import CoupledVerifier
from sdcontrol.engine.drafters.base import Drafter
from sdcontrol.engine.drafters.build import DrafterSpecs, named_drafters
from sdcontrol.engine.drafters.draft_model import DraftModelDrafter
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.engine.runner import unwrap
from sdcontrol.engine.verify import Verifier, verifier_of
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.shapes import ModelShape, from_config
from sdcontrol.extras import needed
from sdcontrol.integrations.settings import arms_of
from sdcontrol.logs import EventLog
from sdcontrol.traces.schema import TraceFacts

if TYPE_CHECKING:
    from sdcontrol.traces.recorder import Recorder

__all__ = ["RunTable", "check_recording", "facts_of_run", "models_of", "recorder_of"]

_log = EventLog(__name__)


def check_recording(
    record: Path | str | None,
    verification: str | Verifier,
    *,
    keep_token_ids: bool,
    acceptance_table: bool,
) -> None:
    """Raise `ConfigError` for parts of a recording without one, and for a table that no text would bear out."""
    if record is None and (keep_token_ids or acceptance_table):
        name = "acceptance_table" if acceptance_table else "keep_token_ids"
        raise ConfigError(f"{name} is part of a recording; give a new folder as record, too")
    if acceptance_table and type(verifier_of(verification)) is not CoupledVerifier:
        raise ConfigError(
            f"acceptance_table under {verification!r} verification: it is exact where the text does not "
            "depend on what was drafted; leave verification at coupled"
        )


class RunTable:
    """The acceptance table of a decoder's run, computed at its end. Keeps every request until then."""

    def __init__(self, engine: Engine, drafters: DrafterSpecs, folder: Path | str) -> None:
        self._engine, self._drafters, self._folder = engine, drafters, Path(folder)
        self._requests: list[Request] = []

    @classmethod
    def of(cls, engine: Engine, drafters: DrafterSpecs, folder: Path | str | None) -> Self | None:
        """None without a folder."""
        return None if folder is None else cls(engine, drafters, folder)

    def keep(self, request_id: str) -> str:
        """Keep a request that has just been submitted; its id again."""
        request = self._engine.requests.get(request_id)
        if request is not None:
            self._requests.append(request)
        return request_id

    def add(self) -> None:
        """Compute the table and add it to the trace, which is closed. Raises `TraceError`, `ConfigError`."""
        from sdcontrol.integrations.acceptance import add_acceptance_table

        engine, requests = self._engine, self._requests
        add_acceptance_table(
            self._folder, engine.model, self._drafters, requests, config=engine.config
        )


def recorder_of(
    planner: Planner, path: Path | str | None, *, keep_token_ids: bool = False
) -> "Recorder | None":
    """A recorder around `planner`; None without a path. Warns where exact replay will need help.

    Raises `ConfigError` where pyarrow is missing, `TraceError` where nothing can be written.
    """
    if path is None:
        return None
    with needed():
        from sdcontrol.traces.facts import controller_in
        from sdcontrol.traces.recorder import Recorder

    recorder = Recorder(planner, path, keep_token_ids=keep_token_ids)
    controller = controller_in(planner)
    if controller is None or controller.policy_config is None:
        what = type(planner if controller is None else controller.policy).__name__
        _log.warning(
            "recorded_without_policy",
            path=str(path),
            reason=f"{what!r} does not say how it was made, and exact replay has to make it again",
            remedy="give a policy by its name or settings, or give replay_exactly the controller",
        )
    return recorder


def facts_of_run(engine: Engine, drafters: DrafterSpecs) -> TraceFacts:
    """The models, the machine and the settings of `engine`, made with these `drafters`."""
    verification = type(engine.verifier).__name__.removesuffix("Verifier").lower()
    return TraceFacts(
        models=dict(_shapes(engine, drafters)),
        hardware=_machine(engine.model.device),
        drafters=tuple(arms_of(drafters)),
        verification=verification,
        engine={
            **engine.config.model_dump(mode="json"),
            "kv_tokens": engine.pool.capacity_tokens,  # what it came to
            "dtype": str(engine.model.dtype).removeprefix("torch."),
        },
    )


def models_of(engine: Engine, drafters: DrafterSpecs) -> dict[str, PreTrainedModel]:
    """By role: the target and whatever drafts."""
    models = {"target": engine.model}
    for name, spec in named_drafters(drafters):
        if isinstance(spec, DraftModelDrafter):
            models[spec.name] = spec.model
        elif not isinstance(spec, (str, Drafter)):
            models[name or "draft_model"] = unwrap(spec)
    return models


def _shapes(engine: Engine, drafters: DrafterSpecs) -> Iterator[tuple[str, ModelShape]]:
    """By role; models of a layout that is not known are left out."""
    for role, model in models_of(engine, drafters).items():
        try:
            name = Path(model.config._name_or_path).name  # where it lies is nobody's business
            yield role, from_config(model.config.to_dict(), name or model.config.model_type)
        except ConfigError:
            continue


def _machine(device: torch.device) -> dict[str, str | int]:
    return {
        "device": device_name(device),
        "system": platform.system(),
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
