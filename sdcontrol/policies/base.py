"""What every policy is: a plan from a view and a belief, and a state that observations update.

Knows nothing of engines, estimators' insides or clocks: a policy sees values and returns values.
"""

import copy
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol, Self, runtime_checkable

from pydantic import ConfigDict

from sdcontrol.core import BatchView, Belief, Confidence, Observation, Plan
from sdcontrol.errors import ConfigError
from sdcontrol.plain_numbers import PlainNumbers

__all__ = ["Policy", "PolicyConfig", "Refiner"]


class Policy(ABC):
    """Decides, given a view and a belief; learns, given observations.

    Constructors only store. `plan` is a pure function of the state and its arguments; whatever a
    policy learns it learns in `update`. A policy that shortens drafts after drafting has the
    method of `Refiner` too.
    """

    drafts: ClassVar[bool] = True
    """Whether a plan may ever have drafts. Where none has, no drafter is even told of requests."""

    uses_belief: ClassVar[bool] = True
    """Whether `plan` looks at its belief. Where it does not, none is kept: that costs time."""

    refines_by_confidence: ClassVar[bool] = False
    """Whether `refine`, if there is one, has nothing to say where confidences say nothing new.

    It is not asked then about drafts of which a hint had said all before, as of n-gram drafts.
    """

    refines_between_rounds: ClassVar[bool] = True
    """Whether `refine` may have something to say before all is drafted; asking takes time."""

    @abstractmethod
    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """One choice per request of the view, within the limits of `Plan.check`."""

    def update(self, observation: Observation) -> None:  # noqa: B027  (nothing to learn is common)
        """Learn what came of a step. By default nothing."""

    def clone(self) -> Self:
        """An independent copy in the same state."""
        return copy.deepcopy(self)


@runtime_checkable
class Refiner(Protocol):
    """A policy that can shorten a plan once drafts and their confidences are known."""

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief) -> Plan:
        """The plan with suffixes dropped: never a longer draft, never another drafter."""
        ...


class PolicyConfig(PlainNumbers):
    """The settings of one policy. Subclasses add `kind`, a literal with the policy's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden: ClassVar[bool] = False  # not listed by `policies.names()`: cannot be built from a name
    example: ClassVar[str] = ""  # of a shorthand, for whoever gave the name alone

    def build(self) -> Policy:
        """The policy with these settings, in its initial state."""
        raise NotImplementedError(f"{type(self).__name__} has no build()")

    @classmethod
    def from_text(cls, text: str) -> dict[str, object]:
        """The settings meant by `text` in the shorthand "kind:text"; `ConfigError` if none."""
        raise ConfigError(
            f"shorthand {text!r} for {cls.__name__}: this policy has no shorthand settings; "
            'use a mapping {"kind": ..., ...}'
        )
