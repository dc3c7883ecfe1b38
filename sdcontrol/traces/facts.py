"""What a trace says of the planner that it is of, so that the planner can be made again.

Knows controllers and their policies' settings; nothing of steps.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from sdcontrol.controller import Controller
from sdcontrol.core import Planner
from sdcontrol.policies import PolicyConfig
from sdcontrol.traces.parts import digest_of
from sdcontrol.traces.schema import ControllerFacts, TraceFacts

__all__ = ["controller_facts", "controller_in", "facts_of"]


def facts_of(planner: Planner) -> tuple[TraceFacts, dict[str, Path]]:
    """What is to be known to make `planner` again, and the files that it reads, by kept name."""
    controller = controller_in(planner)
    if controller is None:
        return TraceFacts(), {}
    policy, files = _kept(controller.policy_config)
    return TraceFacts(controller=controller_facts(controller), policy=policy), files


def controller_in(planner: object) -> Controller | None:
    """The controller that decides behind whatever is `wrapped` around it; None for other planners."""
    while planner is not None and not isinstance(planner, Controller):
        planner = getattr(planner, "wrapped", None)
    return planner


def controller_facts(planner: Controller) -> ControllerFacts:
    """How it was made, and what an engine has told it so far."""
    return ControllerFacts(
        seed=planner.seed,
        max_draft_tokens=planner.max_draft_tokens,
        token_edges=planner.token_edges,
        machine=planner.machine,
        may_go_ahead=planner.outlook is not None,
        plan_budget_seconds=planner.plan_budget_seconds,
        has_own_estimates=planner.has_own_estimates,
        steps_before=planner.num_observed,
    )


def _kept(config: PolicyConfig | None) -> tuple[Mapping[str, JsonValue] | None, dict[str, Path]]:
    """The settings of a policy, its files named as they are kept with the trace."""
    if config is None:
        return None, {}
    settings: dict[str, JsonValue] = config.model_dump(mode="json")
    files: dict[str, Path] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Path):
            kept = f"models/{digest_of(value).sha256}{value.suffix}"
            settings[name], files[kept] = kept, value
    return settings, files
