"""What rivals share: one drafter for everyone, and one length for the batch.

Knows nothing of how the length is chosen.
"""

from typing import ClassVar

from pydantic import Field, field_validator

from sdcontrol.core import BatchView, Belief, Plan
from sdcontrol.policies.asking import survival_table
from sdcontrol.policies.base import Policy, PolicyConfig

__all__ = ["CandidatesConfig", "OneDrafter", "OneDrafterConfig"]


class OneDrafterConfig(PolicyConfig):
    """`drafter=None` means the first drafter that a view offers."""

    drafter: str | None = Field(default=None, min_length=1)


class CandidatesConfig(OneDrafterConfig):
    """`candidates` maps the largest batch to its lengths; the last row serves larger batches."""

    least_tokens: ClassVar[int] = 0
    candidates: dict[int, tuple[int, ...]] = Field(min_length=1)

    @field_validator("candidates")
    @classmethod
    def _is_sorted(cls, candidates: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        if any(
            batch < 1 or not row or min(row) < cls.least_tokens for batch, row in candidates.items()
        ):
            raise ValueError(
                f"batch sizes are at least 1, and each needs draft lengths of at least {cls.least_tokens}"
            )
        return {batch: tuple(sorted(set(row))) for batch, row in sorted(candidates.items())}


class OneDrafter(Policy):
    """A policy whose system runs one drafter, chosen at start-up."""

    def __init__(self, drafter: str | None) -> None:
        self.drafter = drafter

    def drafter_for(self, view: BatchView) -> str | None:
        """The drafter: the configured one, else the first that any request of the view may use."""
        if self.drafter is not None:
            return self.drafter
        return next((r.drafters[0] for r in view.requests if r.drafters), None)

    def uniform(self, view: BatchView, num_draft_tokens: int, why: str) -> Plan:
        """The same length for everyone, within the view's limits."""
        drafter = self.drafter_for(view)
        if drafter is None or num_draft_tokens <= 0:
            return Plan.off(view, why)
        return Plan.uniform(view, drafter, num_draft_tokens, why)

    def longest(self, view: BatchView, belief: Belief) -> int:
        """The most draft tokens that the belief speaks of for the drafter; 0 without one."""
        drafter = self.drafter_for(view)
        if drafter is None or drafter not in belief.survival:
            return 0
        return int(survival_table(belief.survival, drafter, len(view.requests)).shape[1])
