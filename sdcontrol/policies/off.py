"""No speculation, ever. Knows nothing and learns nothing."""

from typing import Literal

from sdcontrol.core import BatchView, Belief, Plan
from sdcontrol.policies.base import Policy, PolicyConfig

__all__ = ["Off", "OffConfig"]


class OffConfig(PolicyConfig):
    """No settings."""

    kind: Literal["off"] = "off"

    def build(self) -> "Off":
        """The policy."""
        return Off()


class Off(Policy):
    """Decodes everyone without drafts."""

    drafts = False
    uses_belief = False

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """No drafts for anyone."""
        return Plan.off(view, "off")
