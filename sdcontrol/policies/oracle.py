"""Sees what every drafter would have accepted, and plans with it: the yardstick for regret.

Knows the future of acceptance, from a table that a replay or a benchmark supplies, and nothing else
that `goodput` does not: what steps take it is told by the belief, as by a replay, whose own prices that has.
It is the best plan of each step, not of a whole run, so it is close to a bound and none itself.
"""

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import ConfigDict, Field

from sdcontrol.core import BatchView, Belief, FloatArray, Plan
from sdcontrol.policies.asking import survival_table
from sdcontrol.policies.base import Policy, PolicyConfig
from sdcontrol.policies.goodput import Goodput

__all__ = ["Foresight", "Oracle", "OracleConfig"]


@runtime_checkable
class Foresight(Protocol):
    """What would be accepted, known beforehand."""

    def accepted_tokens(self, request_id: str, generated_tokens: int, drafter: str) -> int:
        """Draft tokens of `drafter` that would be accepted after `generated_tokens` of output."""
        ...


class OracleConfig(PolicyConfig):
    """`foresight` has `accepted_tokens(request_id, generated_tokens, drafter)`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    kind: Literal["oracle"] = "oracle"
    foresight: Foresight = Field(exclude=True)

    def build(self) -> "Oracle":
        """The policy."""
        return Oracle(self.foresight)


class Oracle(Policy):
    """`goodput` with survival of 1 up to the accepted length and 0 beyond. Shares `foresight`."""

    def __init__(self, foresight: Foresight) -> None:
        self.foresight = foresight
        self._goodput = Goodput(probe_share=0.0)

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The best plan of this step."""
        survival = {
            drafter: self._survival(view, drafter, belief.survival) for drafter in belief.survival
        }
        plan = self._goodput.plan(view, Belief(survival, belief.cost))
        return Plan(plan.choices, "oracle")

    def clone(self) -> "Oracle":
        """A copy that reads the same foresight, which nobody changes."""
        return Oracle(self.foresight)

    def _survival(
        self, view: BatchView, drafter: str, believed: Mapping[str, FloatArray]
    ) -> FloatArray:
        depth = survival_table(believed, drafter, len(view.requests)).shape[1]
        lengths = [
            self.foresight.accepted_tokens(request.id, request.generated_tokens, drafter)
            if drafter in request.drafters
            else 0
            for request in view.requests
        ]
        known = np.array(lengths, dtype=np.int64).reshape(-1, 1)
        return (np.arange(depth) < known).astype(np.float64)
