"""A comparison as its author describes it: models, arms, workload, rules.

Knows what may be said and what fits together; nothing of files, engines or statistics. Every
field's description ends an error message about it, and stands in the JSON schema for editors.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core.core_schema import ValidationInfo

from sdcontrol import policies
from sdcontrol.engine.config import EngineConfig
from sdcontrol.experiments.metrics import COMPARABLE, DEFAULT_METRICS
from sdcontrol.experiments.workload_settings import Settings, Workload, nearest
from sdcontrol.policies.base import PolicyConfig

__all__ = ["Arm", "ArmName", "Beginning", "Experiment"]

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._=-]{0,119}$"
_DRAFTER = re.compile(r"ngram|draft_model|sparse_kv:[1-9][0-9]{0,8}(:scored)?")
ArmName = Annotated[str, Field(pattern=_NAME, description="letters, digits and . _ = -")]
Seed = Annotated[int, Field(ge=0, le=2**31)]
Beginning = Literal["kept", "cold", "warm"]
"""What an arm's controller knows when a block begins: all since the run began, nothing, or what the last
steps of earlier blocks came to."""


def _policy_schema() -> dict[str, object]:
    """What `PolicySpec` accepts: a name, a shorthand, or one of the configs."""
    schemas: list[dict[str, object]] = [{"type": "string"}]
    for config in PolicyConfig.__subclasses__():
        kind = config.model_fields.get("kind")
        if kind is None or kind.default not in policies.names():
            continue
        try:
            schemas.append({**config.model_json_schema(), "required": ["kind"]})
        except PydanticInvalidForJsonSchema:  # such as the oracle: not to be had from a file
            continue
    names = ", ".join(policies.names())
    return {"description": f"one of {names}, static:DRAFTER:TOKENS, or a mapping", "anyOf": schemas}


Policy = Annotated[policies.PolicySpec, WithJsonSchema(_policy_schema())]


class Arm(Settings):
    """One of the things compared."""

    name: ArmName
    policy: Policy
    description: str = Field("", max_length=200, description="a few words for the report")
    drafters: tuple[str, ...] = Field(
        ("ngram",), description="a list of ngram, draft_model, sparse_kv:TOKENS"
    )
    verification: Literal["coupled", "rejection"] = "coupled"
    controller: Beginning = Field(
        "kept",
        description="kept (learns on from block to block, as a server does), cold (new in every block, as a "
        "script's that decodes one batch) or warm (new, told what the last steps of earlier blocks came to)",
    )
    engine: EngineConfig = Field(
        EngineConfig.model_validate({}), description="settings unlike those of the whole run"
    )

    @field_validator("drafters")
    @classmethod
    def _known(cls, drafters: tuple[str, ...]) -> tuple[str, ...]:
        for name in drafters:
            if not _DRAFTER.fullmatch(name):
                valid = ["ngram", "draft_model", "sparse_kv:512"]
                raise ValueError(f"no drafter is called {name!r}; {nearest(name, valid)}")
        if len(set(drafters)) < len(drafters):
            raise ValueError("a drafter comes twice; name each once")
        return drafters

    @model_validator(mode="after")
    def _can_draft(self) -> Self:
        drafter = getattr(self.policy, "drafter", None)
        if isinstance(drafter, str) and drafter not in self.drafters:
            valid = nearest(drafter, self.drafters)
            raise ValueError(f"the policy drafts with {drafter!r}, not among drafters; {valid}")
        return self


class Warmup(Settings):
    """Blocks dropped by rule; see `experiments.schedule`."""

    min_blocks: int = Field(1, ge=0, le=100, description="dropped whatever they look like")
    max_blocks: int = Field(3, ge=0, le=100, description="at most so many are dropped")
    tolerance: float = Field(
        0.1, gt=0, le=1, description="log ratio of two baseline runs that still counts as steady"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_blocks > self.max_blocks:
            raise ValueError(f"min_blocks {self.min_blocks} is above max_blocks {self.max_blocks}")
        return self


class Slo(Settings):
    """What a request must keep to count for goodput; unset: no limit."""

    ttft_seconds: float | None = Field(None, gt=0, description="seconds above 0")
    tpot_seconds: float | None = Field(None, gt=0, description="seconds above 0")


class Stopping(Settings):
    """When to look, and how often to be wrong at most."""

    alpha: float = Field(
        0.05, gt=0, lt=0.5, description="chance of any false claim in the whole run"
    )
    looks: int = Field(3, ge=1, le=20, description="times that the run may end, evenly spaced")
    early: bool = Field(True, description="end once every comparison shows a difference")


class Experiment(Settings):
    """A whole comparison."""

    name: ArmName
    title: str = Field("", max_length=200, description="a line for the report")
    backend: Literal["live", "trace"] = Field("live", description="live or trace")
    model: str = Field("bundled", min_length=1, description="bundled, a folder or a hub name")
    draft_model: str = Field(
        "auto", min_length=1, description="auto (bundled with bundled), none, a folder or hub name"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", min_length=1, description="auto, cpu, cuda, cuda:1, ...")
    profile: str | None = Field(None, min_length=1, description="a file of sdcontrol profile")
    engine: EngineConfig = Field(EngineConfig.model_validate({}), description="engine settings")
    arms: tuple[Arm, ...] = Field(min_length=1, max_length=64, description="a list of arms")
    baseline: str = Field("", description="the name of an arm; the first unless given")
    pairs: tuple[tuple[str, str], ...] = Field(
        (), max_length=64, description="further pairs of arms to compare, [arm, baseline]"
    )
    workload: Workload
    seed: Seed = Field(0, description="of prompts, arrivals, sampling and the order of arms")
    blocks: int = Field(12, ge=1, le=10000, description="counted blocks, at most")
    repeat_every: int = Field(
        2, ge=0, le=10000, description="A/A: run the baseline twice in every such block; 0: never"
    )
    warmup: Warmup = Warmup()
    metrics: tuple[str, ...] = Field(
        DEFAULT_METRICS, min_length=1, description="metrics to compare; all are reported"
    )
    slo: Slo = Slo()
    stopping: Stopping = Stopping()
    matrix: Mapping[str, tuple[JsonValue, ...]] = Field(
        default_factory=dict, description="key (a.b.c): list of values; one run for each"
    )

    @field_validator("arms")
    @classmethod
    def _distinct(cls, arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
        names = [arm.name for arm in arms]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two arms are called {twice[0]!r}; rename one")
        return arms

    @field_validator("workload")
    @classmethod
    def _fits(cls, workload: Workload, info: ValidationInfo) -> Workload:
        if info.data.get("backend") == "trace" and workload.trace is None:
            raise ValueError("backend is trace; give workload.trace, the folder of a recording")
        return workload

    @field_validator("baseline")
    @classmethod
    def _an_arm(cls, name: str, info: ValidationInfo) -> str:
        if name:
            _check_arm(name, info)
        return name

    @field_validator("pairs")
    @classmethod
    def _two_arms(
        cls, pairs: tuple[tuple[str, str], ...], info: ValidationInfo
    ) -> tuple[tuple[str, str], ...]:
        for arm, other in pairs:
            _check_arm(arm, info)
            _check_arm(other, info)
            if arm == other:
                raise ValueError(f"{arm!r} is compared with itself; A/A runs are repeat_every")
        return pairs

    @field_validator("metrics")
    @classmethod
    def _comparable(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        for name in metrics:
            if name not in COMPARABLE:
                raise ValueError(f"metric {name!r} cannot be compared; {nearest(name, COMPARABLE)}")
        if len(set(metrics)) < len(metrics):
            raise ValueError("a metric comes twice; name each once")
        return metrics

    @property
    def reference(self) -> str:
        """The name of the arm that others are compared with."""
        return self.baseline or self.arms[0].name

    @property
    def comparisons(self) -> tuple[tuple[str, str], ...]:
        """(arm, other arm): all with the baseline, then the named pairs."""
        with_baseline = [(a.name, self.reference) for a in self.arms if a.name != self.reference]
        return tuple(dict.fromkeys([*with_baseline, *self.pairs]))

    def engine_of(self, arm: Arm) -> EngineConfig:
        """The run's engine settings, with those that the arm sets for itself."""
        own = {name: getattr(arm.engine, name) for name in arm.engine.model_fields_set}
        return self.engine.model_copy(update=own)

    def resolved(self) -> dict[str, JsonValue]:
        """All settings as data, defaults included: reading them back gives this experiment."""
        data: dict[str, JsonValue] = self.model_dump(mode="json")
        arms = data["arms"]
        assert isinstance(arms, list)
        for arm, entry in zip(self.arms, arms, strict=True):
            assert isinstance(entry, dict)
            entry["engine"] = arm.engine.model_dump(mode="json", exclude_unset=True)
        return data


def _check_arm(name: str, info: ValidationInfo) -> None:
    names = tuple(arm.name for arm in info.data.get("arms", ()))
    if names and name not in names:  # without names, the arms' own error is what helps
        raise ValueError(f"no arm is called {name!r}; {nearest(name, names)}")
