"""What a trace is made of: its header, its steps, its requests, and how large each may be.

Values and limits only; knows nothing of files, compression or controllers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from sdcontrol.core import Confidence, Observation, Plan
from sdcontrol.errors import TraceError
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.estimators.shapes import ModelShape

__all__ = [
    "LATER_COLUMNS",
    "LAUNCHED_AHEAD",
    "OTHERS_WAIT",
    "SCHEMA_VERSION",
    "SEEN_STEPS",
    "ControllerFacts",
    "FileFacts",
    "RecordedStep",
    "Refinement",
    "RequestRecord",
    "TraceFacts",
    "TraceHeader",
    "check_rows",
]

SCHEMA_VERSION: Literal[1] = 1
OTHERS_WAIT, SEEN_STEPS, LAUNCHED_AHEAD = "others_wait", "seen_steps", "launched_ahead"
LATER_COLUMNS = OTHERS_WAIT, SEEN_STEPS, LAUNCHED_AHEAD
"""Of steps, in the order in which they came: traces from before they were recorded lack them."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ControllerFacts(_Record):
    """How the controller was made, beside its policy."""

    seed: int
    max_draft_tokens: int = Field(ge=1)
    plan_budget_seconds: float = Field(gt=0)
    token_edges: tuple[int, ...] = Field((), description="what the engine pads forwards to")
    machine: KnownMachine | None = Field(
        None, description="what it knew of device and models, if anything"
    )
    may_go_ahead: bool = Field(False, description="steps may be launched ahead of their tokens")
    has_own_estimates: bool = Field(False, description="its cost or acceptance was given to it")
    steps_before: int = Field(0, ge=0, description="observed before the recording began")


class FileFacts(_Record):
    """One file of the trace, as it was when it was finished."""

    sha256: str
    size_bytes: int = Field(ge=0)
    rows: int = Field(0, ge=0, description="of a table")


class TraceFacts(_Record):
    """What was run: the part of the header that whoever records knows."""

    source: Literal["recorded", "simulated", "imported"] = "recorded"
    note: str = ""
    models: Mapping[str, ModelShape] = Field({}, description="by role: target, draft_model")
    hardware: Mapping[str, JsonValue] = {}
    drafters: tuple[str, ...] = Field((), description="every arm that was configured")
    verification: str = ""
    engine: Mapping[str, JsonValue] = Field({}, description="the engine's settings")
    policy: Mapping[str, JsonValue] | None = Field(None, description="its config; None: unknown")
    controller: ControllerFacts | None = Field(None, description="None: another planner")


class TraceHeader(TraceFacts):
    """`trace.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    trace_id: str
    created: str  # ISO 8601, with its zone
    versions: Mapping[str, str]  # of sdcontrol, Python and what computes
    is_complete: bool
    files: Mapping[str, FileFacts] = Field({}, description="by path within the trace")


@dataclass(frozen=True, slots=True)
class Refinement:
    """One call of `refine`. Tuples follow the requests of the view."""

    confidence: Confidence  # as it was passed
    given_tokens: tuple[int, ...]  # draft tokens of the plan that was passed
    kept_tokens: tuple[int, ...]  # of the plan that came back


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step: what came of it, and what was asked of the planner on the way."""

    observation: Observation
    start_seconds: float = 0.0  # since the trace began
    planned: Plan | None = None  # what `plan` answered; None: it was not asked
    plan_faults: tuple[str, ...] = ()  # those that arose in `plan`
    refinements: tuple[Refinement, ...] = ()
    seen_steps: int | None = (
        None  # of the trace, observed before `plan` was asked; None: all before
    )


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Seconds count from the trace's beginning, `ttft_seconds` from the arrival."""

    id: str
    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    temperature: float = 0.0
    max_new_tokens: int | None = None  # None: not known
    seed: int | None = None  # None: not known
    finish_reason: str | None = None  # None: it had not ended, or nobody said
    ttft_seconds: float | None = None  # to the first token; None: there was none, or nobody said
    end_seconds: float | None = None  # None: it had not ended, or nobody said
    prompt_ids: tuple[int, ...] | None = None  # None: not kept
    output_ids: tuple[int, ...] | None = None  # None: not kept


def check_rows(step: RecordedStep) -> None:
    """Raise `TraceError` where the tuples of an observation do not follow its view."""
    observation = step.observation
    rows = len(observation.view.requests)
    plans = (observation.plan,) if step.planned is None else (observation.plan, step.planned)
    columns: list[tuple[object, ...]] = [
        observation.drafted,
        observation.proposed,
        observation.accepted,
        observation.emitted,
        *(plan.choices for plan in plans),
        *(refinement.given_tokens for refinement in step.refinements),
        *(refinement.kept_tokens for refinement in step.refinements),
    ]
    if any(len(column) != rows for column in columns):
        raise TraceError(
            f"step {observation.view.step} has {rows} requests, but "
            f"{[len(column) for column in columns]} entries of choices, drafted, proposed, "
            "accepted and emitted tokens; give one per request of the view"
        )
