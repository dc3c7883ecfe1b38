"""A table from batch size to one draft length for the batch.

As in vLLM's table of speculative tokens per batch size and TensorRT-LLM's draft length schedule:
written by hand or by a benchmark beforehand, blind to acceptance, context and hardware.
"""

from typing import Literal

from pydantic import Field, field_validator

from sdcontrol.core import BatchView, Belief, Plan
from sdcontrol.policies.rivals.one_drafter import OneDrafter, OneDrafterConfig

__all__ = ["ConcurrencySchedule", "ConcurrencyScheduleConfig"]


class ConcurrencyScheduleConfig(OneDrafterConfig):
    """`schedule` maps the largest batch of a row to its draft length; no drafts beyond the last."""

    kind: Literal["concurrency_schedule"] = "concurrency_schedule"
    schedule: dict[int, int] = Field(default={4: 4, 8: 3, 16: 2, 32: 1}, min_length=1)

    @field_validator("schedule")
    @classmethod
    def _is_positive(cls, schedule: dict[int, int]) -> dict[int, int]:
        if any(batch < 1 or tokens < 0 for batch, tokens in schedule.items()):
            raise ValueError("batch sizes are at least 1 and draft lengths at least 0")
        return dict(sorted(schedule.items()))

    def build(self) -> "ConcurrencySchedule":
        """The policy."""
        return ConcurrencySchedule(self.drafter, dict(self.schedule))


class ConcurrencySchedule(OneDrafter):
    """The row of the smallest batch that holds the current one. `schedule` is sorted by batch."""

    uses_belief = False

    def __init__(self, drafter: str | None, schedule: dict[int, int]) -> None:
        super().__init__(drafter)
        self.schedule = schedule

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The table's length for everyone."""
        batch = len(view.requests)
        tokens = next((tokens for most, tokens in self.schedule.items() if batch <= most), 0)
        return self.uniform(view, tokens, f"concurrency_schedule: {tokens} at batch {batch}")
