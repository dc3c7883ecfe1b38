"""The controller: believe, plan, refine, observe. And guard: no policy can break a decode.

Knows nothing of engines, tensors or files. Its state is a fold of `observe` over observations;
`plan` and `refine` change nothing but the list of faults that `take_faults` hands to whoever builds
the observation. A replay makes it with `clock=None`, so that no wall-clock guard is measured again,
and passes each recorded observation's faults to `plan`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sdcontrol.answers import check_confidence, check_plan, check_shorter, plain
from sdcontrol.core import BatchView, Belief, Confidence, Cost, FloatArray, Observation, Plan
from sdcontrol.errors import PlanError
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.estimators.hardware import Ceilings
from sdcontrol.estimators.known_machine import KnownMachine, find_known
from sdcontrol.estimators.survival import Survival, finite
from sdcontrol.lessons import Acceptance, Lessons
from sdcontrol.outcomes import DEPTH
from sdcontrol.outlook import Outlook
from sdcontrol.policy_faults import PLAN_FAULTS, PolicyFaults, checked_budget

if TYPE_CHECKING:
    from sdcontrol.policies.base import Policy, PolicyConfig

__all__ = ["Acceptance", "Controller"]


class Controller:
    """Decides at every step, for every request: which drafter and how many tokens, zero included.

    `policy` is a name, a mapping or config model that `sdcontrol.policies.build` takes, or a
    policy. `cost` and `acceptance` default to the online estimators; a `cost` with an `update`
    method learns from observations too. A policy that raises, plans the impossible or takes longer
    than `plan_budget_seconds` costs one step of plain decoding; after 3 faults in 200 steps plans
    are off until `reset`. Faults of `refine` and `update` count too; a late answer of `refine` is used.
    `seed` is for policies that draw; `token_edges` are the sizes to which forwards are padded, for our
    own cost: an engine says its own. Where steps are so short that its own time would weigh, learning
    may wait for some thirty of them and a few requests may keep their choices.
    """

    allows_late_observations = True  # a step may be planned before the last one is observed

    def __init__(
        self,
        policy: "Policy | PolicyConfig | str | Mapping[str, object]" = "goodput",
        cost: Cost | None = None,
        acceptance: Acceptance | None = None,
        *,
        seed: int = 0,
        plan_budget_seconds: float = 0.5,
        max_draft_tokens: int = DEPTH,
        token_edges: Sequence[int] = (),
        clock: Callable[[], float] | None = time.perf_counter,
    ) -> None:
        self.policy, self.policy_config = _built(policy)
        self._has_own_cost = cost is not None
        self.cost: Cost = cost if cost is not None else OnlineCost(token_edges=token_edges)
        self.acceptance: Acceptance = (
            acceptance if acceptance is not None else AcceptanceEstimator(max_draft_tokens)
        )
        self.seed = seed
        self.plan_budget_seconds = checked_budget(plan_budget_seconds)
        self.max_draft_tokens = max_draft_tokens
        self.token_edges = tuple(token_edges)
        self.machine: KnownMachine | None = None
        self.drafts: bool = getattr(self.policy, "drafts", True)
        self.refines: bool = hasattr(self.policy, "refine")
        self.has_own_estimates = cost is not None or acceptance is not None
        self.learns = self.has_own_estimates or getattr(self.policy, "uses_belief", True)
        self.num_observed = 0  # steps
        self.outlook: Outlook | None = None  # once an engine goes ahead
        self._faults = PolicyFaults(type(self.policy).__name__, clock)
        self._believed: tuple[BatchView, Belief] | None = None
        self._by_confidence: bool = getattr(self.policy, "refines_by_confidence", False)
        self.refines_between_rounds: bool = getattr(self.policy, "refines_between_rounds", True)
        self.refines_hinted = self.refines and not self._by_confidence
        self._may_repeat: Callable[[Plan], bool] | None = getattr(self.policy, "may_repeat", None)
        self._learn_anew()

    @property
    def faults(self) -> Counter[str]:
        """The policy's, by kind."""
        return self._faults.counts

    @property
    def is_quarantined(self) -> bool:
        """Whether the policy is replaced by `off`, until `reset`."""
        return self._faults.is_quarantined

    @property
    def plans_ahead(self) -> bool:
        """Whether to plan before the last step's tokens are known, drafts once they are: where those are rare."""
        gained: float = getattr(self.cost, "share_of_drafting", 0.0)
        return not self.drafts or (self.outlook is not None and self.outlook.is_quiet(gained))

    def pad_to(self, token_edges: Sequence[int]) -> None:
        """Price forwards as padded to these sizes; an engine says so of its own."""
        if isinstance(self.cost, OnlineCost):
            self.cost.pad_to(token_edges)
        self.token_edges = tuple(token_edges)

    def goes_ahead(self) -> None:
        """Steps without drafts are launched before the last one's tokens are known: an engine says so."""
        self.outlook = self.outlook or Outlook()
        if isinstance(self.cost, OnlineCost):
            self.cost.hide_plain_steps()

    def runs_on(
        self,
        device: str,
        models: Mapping[str, Mapping[str, object]],
        ceilings: Callable[[], Ceilings] | None = None,
    ) -> None:
        """Price as `price_by` says where device and models are known, or models alone; an engine says its own.

        `device` by its driver's name, `models` as parsed `config.json`s: "target", and draft models by family.
        `ceilings` measures a device's, and is asked where its name says nothing.
        """
        if (machine := find_known(device, models, ceilings)) is not None:
            self.price_by(machine)

    def price_by(self, machine: KnownMachine) -> None:
        """Start from what it says of costs, unless a cost was given or steps have been measured."""
        if self._has_own_cost or self.num_observed:
            return
        self.machine = machine
        self.cost = machine.online_cost(self.token_edges)
        if self.outlook is not None:
            self.cost.hide_plain_steps()
        self._learn_anew()

    def draft_at_most(self, max_draft_tokens: int) -> None:
        """Choose no more draft tokens than these, or than before if that is less; `ConfigError` below 1."""
        if max_draft_tokens >= self.max_draft_tokens:
            return
        estimator = AcceptanceEstimator(max_draft_tokens)
        if type(self.acceptance) is AcceptanceEstimator and not self.num_observed:
            self.acceptance = estimator
        self.max_draft_tokens = max_draft_tokens
        self._learn_anew()

    def _learn_anew(self) -> None:
        """Nothing waits to be learnt, and no choice stands."""
        most, may_rest = self.max_draft_tokens, self._may_repeat is not None
        self._lessons = Lessons(self.acceptance, self.cost, most, may_rest=may_rest)

    def belief(self, view: BatchView) -> Belief:
        """What is believed of `view` now: survival of drafts, and costs."""
        belief = self._belief(view)
        if isinstance(belief.survival, Survival):
            belief.survival.now()
        return belief

    def _belief(self, view: BatchView) -> Belief:
        """The same, whose numbers of ours are computed when they are asked for."""
        if self._believed is None or self._believed[0] is not view:
            survival: Mapping[str, FloatArray]
            if type(self.acceptance) is AcceptanceEstimator:  # whose numbers are finite
                survival = self.acceptance.believed(view, self.max_draft_tokens)
            else:
                survival = finite(self.acceptance.survival(view, self.max_draft_tokens))
            self._believed = view, Belief(survival, self.cost)
        return self._believed[1]

    def plan(self, view: BatchView, *, faults: tuple[str, ...] = ()) -> Plan:
        """Choose before drafting. `faults` are recorded ones, when a trace is replayed."""
        if self.is_quarantined:
            return Plan.off(view, "policy quarantined after repeated faults")
        for fault in faults:
            if fault.startswith(PLAN_FAULTS):
                return plain(view, fault)
        started = self._faults.now()
        try:
            plan = self._lessons.repeated(view)
            if plan is None:
                belief = self._belief(view) if self.learns else Belief({}, self.cost)
                plan = self.policy.plan(view, belief)
                check_plan(plan, view)
        except PlanError as error:
            return self._without(view, "plan_impossible", error)
        except Exception as error:
            return self._without(view, "plan_raised", error)
        if self._stalled(view, "plan_stalled", started):
            return plain(view, "plan_stalled")
        return plan

    def heeds(self, plan: Plan) -> bool:
        """Whether confidences could change `plan`: an engine need not stop between its rounds else."""
        if not self.refines or self.is_quarantined or plan.is_off:
            return False
        ours = self.acceptance if type(self.acceptance) is AcceptanceEstimator else None
        return not self._by_confidence or ours is None or ours.heeds(plan)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """Shorten after (a round of) drafting; never lengthens, only drops suffixes.

        The policy's `refine` sees survival given `confidence`; `PlanError` unless that has a row per request.
        """
        refine = getattr(self.policy, "refine", None)
        if refine is None or not self.heeds(plan):
            return plan
        check_confidence(confidence, plan, view)
        started = self._faults.now()
        try:
            belief = self._belief(view)
            survival = self.acceptance.condition(view, plan, confidence, belief.survival)
            given = Belief(finite(survival), belief.cost)
            shorter: Plan = refine(view, plan, confidence, given)
            check_shorter(shorter, plan)
        except PlanError as error:
            self._faults.note(view, "refine_impossible", error)
            return plan
        except Exception as error:
            self._faults.note(view, "refine_raised", error)
            return plan
        self._stalled(view, "refine_stalled", started)
        return shorter

    def observe(self, observation: Observation) -> None:
        """Learn what came of a step. Raises `ObservationError` for what cannot have: `Observation.check`."""
        observation.check()
        self.num_observed += 1
        if self.outlook is not None:
            self.outlook.note(observation.plan)
        self._faults.observe(observation)
        self._believed = None
        noted: Sequence[Observation] = (observation,)
        if self.learns:  # as much as there is time for, which may be nothing
            noted = self._lessons.observe(observation, may_repeat=self._may_stand(observation))
        for one in noted:
            self._update_policy(one)

    def warm_start(self, observations: Iterable[Observation]) -> None:
        """Learn what came of an earlier run's steps, in order; of the faults in them nothing.

        For requests of the same models on the same machine, whose ids this run does not use. What waits to be
        learnt waits no longer, and no choice stands. Raises as `observe` does.
        """
        is_trusted = not self.is_quarantined
        for observation in observations:
            self.observe(replace(observation, faults=()))
        for one in self._lessons.finish():
            self._update_policy(one)
        if is_trusted:  # also one whose `update` expects steps that it planned itself
            self.reset()

    def _may_stand(self, observation: Observation) -> bool:
        """Whether the policy lets what it chose stand for other steps."""
        if self._may_repeat is None or self.is_quarantined:
            return False
        try:
            return self._may_repeat(observation.plan)
        except Exception as error:
            self._faults.note(observation.view, "update_raised", error)
            return False

    def _update_policy(self, observation: Observation) -> None:
        if self.is_quarantined:
            return
        started = self._faults.now()
        try:
            self.policy.update(observation)
        except Exception as error:
            self._faults.note(observation.view, "update_raised", error)
        else:
            self._stalled(observation.view, "update_stalled", started)

    def take_faults(self) -> tuple[str, ...]:
        """The faults since the last call, for the `faults` of the observation being closed."""
        return self._faults.take()

    def reset(self) -> None:
        """Trust the policy again."""
        self._faults.forgive()

    def _stalled(self, view: BatchView, kind: str, started: float) -> bool:
        """Whether the policy took longer than it may, which is a fault."""
        return self._faults.stalled(view, kind, started, self.plan_budget_seconds)

    def _without(self, view: BatchView, kind: str, error: Exception) -> Plan:
        self._faults.note(view, kind, error)
        return plain(view, kind)


def _built(
    policy: "Policy | PolicyConfig | str | Mapping[str, object]",
) -> "tuple[Policy, PolicyConfig | None]":
    """The policy, and its settings where they are known."""
    from sdcontrol import policies  # only here: whoever imports a controller may bring a policy

    if isinstance(policy, policies.Policy):
        return policy, None
    config = policies.parse(policy)
    return config.build(), config
