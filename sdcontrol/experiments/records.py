"""One finished block: what every arm did in it. Blocks are all that a comparison is made of.

Knows counts, seconds and tokens; nothing of engines or statistics.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from sdcontrol.experiments.results import Difference, Record, Roofline, Setting, StepSample

__all__ = ["BlockRecord", "DraftCounts", "Place", "RunRecord"]


class DraftCounts(Record):
    """What became of one drafter's tokens in a block."""

    steps: int = 0  # requests times steps in which a draft of it was verified
    drafted: int = 0
    proposed: int = 0
    accepted: int = 0
    by_position: tuple[tuple[int, int], ...] = ()  # (tested, accepted)


class RunRecord(Record):
    """One arm in one block."""

    arm: str
    is_repeat: bool = False
    failed: str = ""
    start_seconds: float  # on the run's clock
    seconds: float = 0.0
    tokens: int = 0
    num_requests: int = 0
    metrics: Mapping[str, float] = Field(default_factory=dict)
    lengths: Mapping[str, Mapping[str, int]] = Field(default_factory=dict)
    drafts: Mapping[str, DraftCounts] = Field(default_factory=dict)
    latencies: Mapping[str, tuple[float, ...]] = Field(default_factory=dict)  # one per request
    steps: StepSample = StepSample()


class BlockRecord(Record):
    """One block of all arms, in the order in which they ran."""

    version: Literal[1] = 1
    block: int
    is_warmup: bool
    runs: tuple[RunRecord, ...]
    num_texts: int = 0  # compared with the baseline's
    differences: tuple[Difference, ...] = ()

    def run(self, arm: str, *, is_repeat: bool = False) -> RunRecord | None:
        """What an arm did, unless it failed or did not take part."""
        same = (run for run in self.runs if (run.arm, run.is_repeat) == (arm, is_repeat))
        return next((run for run in same if not run.failed), None)


class Place(Record):
    """Where blocks are run, for the record."""

    is_simulated: bool
    setting: Setting
    roofline: Roofline | None = None
    later: tuple[Setting, ...] = ()  # where it went on after interruptions, unlike where it began

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All of them, the first one first."""
        return (self.setting, *self.later)

    def going_on(self, now: "Place") -> "Place":
        """This, and that it went on somewhere else."""
        return self.model_copy(update={"later": (*self.later, now.setting)})

    @property
    def notes(self) -> tuple[str, ...]:
        """What was unlike the beginning where it went on."""
        before = _facts(self.setting)
        return tuple(
            f"After an interruption it went on with {', '.join(_changes(before, _facts(now)))}."
            for now in self.later
        )


def _facts(setting: Setting) -> dict[str, object]:
    facts = setting.model_dump()
    versions = facts.pop("versions")
    return {**facts, **versions}


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [
        f"{name} {now.get(name)} in place of {before.get(name)}"
        for name in {**before, **now}
        if now.get(name) != before.get(name)
    ]
