"""`goodput` with acceptance and step time learnt offline, where the step is like those learnt from.

Knows neither training nor files: a `LearnedModel` comes in. What it learnt stands on top of the online
belief, and out of its distribution the online belief stands alone, so that it is not worse informed
than `goodput`: batches, contexts and prompts beyond the trained ones, and machines whose steps follow
another shape, are out; within a step, arms that were not trained and requests unlike any trained on. It
is a head start: after enough steps of about as many requests a run's own say more, and cost no correction.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from sdcontrol.core import BatchView, Belief, Confidence, Cost, FloatArray, Observation, Plan
from sdcontrol.policies.base import Policy, PolicyConfig
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.learned_acceptance import Corrector
from sdcontrol.policies.learned_model import LearnedModel, load

__all__ = ["Learned", "LearnedConfig"]

_RARE = 16  # steps from one that tells the machine's speed to the next, where nobody asks for it
_OWN_STEPS = 96  # of about as many requests, after which they say more than other runs
_UNLIKE = "unlike the training data"  # said of a plan that does not rest on it
_OWN = "by its own steps"  # no more, the same


class LearnedConfig(PolicyConfig):
    """`model` is a skops file; shorthand: "learned:PATH"."""

    example: ClassVar[str] = "learned:policy.skops, of a file that `sdcontrol train` wrote"

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

    refines_by_confidence = True

    def __init__(self, model: LearnedModel) -> None:
        self.model = model
        self.speeds = model.speeds()
        self._goodput = Goodput()
        self._corrector = Corrector(model.acceptance)
        self._steps = 0
        self._steps_like: Counter[int] = Counter()  # by bits of the number of requests

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The best plan; its reason says which belief it rests on."""
        if not self._leads(view):  # as most steps: asked first, since it takes less
            return _said(_OWN, self._goodput.plan(view, belief))
        if not self.model.knows(view):
            return _said(_UNLIKE, self._goodput.plan(view, belief))
        cost = self._priced(view, belief.cost)
        words = "learned, but not the times" if cost is belief.cost else "learned"
        survival = self._corrector.corrected(view, belief.survival)
        return _said(words, self._goodput.plan(view, Belief(survival, cost)))

    def may_repeat(self, plan: Plan) -> bool:
        """Whether `plan` may stand for another step."""
        return self._goodput.may_repeat(plan)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief) -> Plan:
        """As `goodput`, with the learned step time where the step is like those seen."""
        cost = self._priced(view, belief.cost) if _is_learned(plan) else belief.cost
        return self._goodput.refine(view, plan, confidence, Belief(belief.survival, cost))

    def update(self, observation: Observation) -> None:
        """Learn what `goodput` learns, what probes may cost, and how fast the machine is now."""
        self._goodput.update(observation)
        is_due = self._leads(observation.view) or self._steps % _RARE == 0
        if is_due and self.model.knows(observation.view):
            self.speeds.update(observation)
        self._steps += 1
        self._steps_like[len(observation.view.requests).bit_length()] += 1

    def survival(
        self, view: BatchView, online: Mapping[str, FloatArray]
    ) -> Mapping[str, FloatArray]:
        """`online` corrected by what was learnt, where the step is like those seen."""
        is_ours = self.model.knows(view) and self._leads(view)
        return self._corrector.corrected(view, online) if is_ours else online

    def cost(self, view: BatchView, online: Cost) -> Cost:
        """`online` beside what was learnt, where the step is like those seen."""
        return self._priced(view, online) if self.model.knows(view) else online

    def _priced(self, view: BatchView, online: Cost) -> Cost:
        is_known = self.speeds.is_measured or not self._steps
        is_ours = self.model.prices and is_known and not self.speeds.is_strange
        return self.speeds.with_online(online, view) if is_ours and self._leads(view) else online

    def _leads(self, view: BatchView) -> bool:
        """Whether what was learnt offline says more than steps of about as many requests did so far."""
        return self._steps_like[len(view.requests).bit_length()] < _OWN_STEPS


def _is_learned(plan: Plan) -> bool:
    """Whether the plan was made for a step like those seen, of which it says nothing else."""
    return _UNLIKE not in plan.reason


def _said(words: str, plan: Plan) -> Plan:
    return Plan(plan.choices, f"{words}: {plan.reason}")
