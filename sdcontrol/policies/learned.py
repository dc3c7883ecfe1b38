"""`goodput` with acceptance and step time learnt offline, where the step is like those learnt from.

Knows neither training nor files: a `LearnedModel` comes in. Out of its distribution the online
belief stands, so that it is never worse informed than `goodput`.
"""

from pathlib import Path
from typing import Literal

from sdcontrol.core import BatchView, Belief, Confidence, Observation, Plan
from sdcontrol.policies.base import Policy, PolicyConfig
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.learned_model import LearnedModel, load

__all__ = ["Learned", "LearnedConfig"]


class LearnedConfig(PolicyConfig):
    """`model` is a skops file; shorthand: "learned:PATH"."""

    kind: Literal["learned"] = "learned"
    model: Path

    def build(self) -> "Learned":
        """The policy. Raises `ConfigError` where the file is no learned model."""
        return Learned(load(self.model))

    @classmethod
    def from_text(cls, text: str) -> dict[str, object]:
        """The text is the path."""
        return {"model": text}


class Learned(Policy):
    """Maximises goodput under the learned belief; under the given one for steps unlike any seen."""

    def __init__(self, model: LearnedModel) -> None:
        self.model = model
        self._goodput = Goodput()

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The best plan; its reason says which belief it rests on."""
        if not self.model.knows(view):
            plan = self._goodput.plan(view, belief)
            return Plan(plan.choices, f"unlike the training data: {plan.reason}")
        learned = Belief(self.model.survival(view, belief), self.model.cost)
        plan = self._goodput.plan(view, learned)
        return Plan(plan.choices, f"learned: {plan.reason}")

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief) -> Plan:
        """As `goodput`, with the learned step time where the step is like those seen."""
        cost = self.model.cost if self.model.knows(view) else belief.cost
        return self._goodput.refine(view, plan, confidence, Belief(belief.survival, cost))

    def update(self, observation: Observation) -> None:
        """Learn what `goodput` learns: what probes may cost."""
        self._goodput.update(observation)
