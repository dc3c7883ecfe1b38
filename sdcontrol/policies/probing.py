"""When to try an arm that is off, so that it is known when it would pay.

Knows nothing of how acceptance is estimated. An arm that drafts nothing earns an allowance, a
fixed share of the time that passes; a probe is bought from it. So all probes together cost at most
that share of the time, whatever the arms, the batch and the machine, and a probe depends on the
observations alone.
"""

from sdcontrol.core import (
    BatchView,
    Belief,
    Choice,
    Observation,
    Plan,
    RequestView,
    family_of,
)
from sdcontrol.estimators.price import round_kv_tokens
from sdcontrol.policies.problem import Problem

__all__ = ["Probing"]

_MOST_PATIENCE = 8
_SOME = 0.5  # of a probe's price at the arm's own KV, below which its family's cannot be


class Probing:
    """The allowances of arms that are off, in seconds.

    `share` of the time is divided among the arms. Each probe after which the arm stays off makes
    the next one dearer, up to 8 times: what was confirmed often is less uncertain. An arm that is
    observed in shadow needs no probes.
    """

    def __init__(self, share: float, num_draft_tokens: int) -> None:
        self.share = share
        self.num_draft_tokens = num_draft_tokens
        self._allowance: dict[str, float] = {}
        self._patience: dict[str, int] = {}
        self._shadowed: set[str] = set()

    def update(self, observation: Observation) -> None:
        """Let arms that are off earn; what was drafted spends."""
        self._shadowed.update(
            arm
            for arm, lengths in observation.shadow.items()
            if any(n is not None for n in lengths)
        )
        drafted = {choice.drafter for choice in observation.plan.choices}
        menus = {request.drafters for request in observation.view.requests}
        offered = {arm for menu in menus for arm in menu}
        probed = _probed(observation.plan)
        seconds = observation.timing.total_seconds
        earned = self.share * seconds / max(len(offered), 1) if 0.0 < seconds < 60.0 else 0.0
        for arm in sorted(offered):
            if arm not in drafted:
                self._allowance[arm] = self._allowance.get(arm, 0.0) + earned
                continue
            self._allowance[arm] = 0.0
            again = min(2 * self._patience.get(arm, 1), _MOST_PATIENCE)
            self._patience[arm] = again if arm == probed else 1

    def is_due(self, view: BatchView, plan: Plan, belief: Belief) -> bool:
        """Whether some arm's allowance might pay for a probe beside the plan of a lone request."""
        if not self.share or view.prefill_tokens:
            return False
        request, planned = view.requests[0], plan.choices[0].drafter
        for arm in belief.survival:
            allowance = self._allowance.get(arm)
            if not allowance or arm == planned or arm in self._shadowed:
                continue
            kv_tokens = float(round_kv_tokens(request, arm))
            seconds = float(belief.cost.draft_seconds(family_of(arm), 1.0, kv_tokens))
            least = _SOME * seconds * self.num_draft_tokens * self._patience.get(arm, 1)
            if allowance >= least:
                return True
        return False

    def probe(self, view: BatchView, plan: Plan, problem: Problem, rate: float) -> Plan:
        """`plan`, or where an arm's allowance pays for it, `plan` with one request trying it.

        `rate` is the plan's expected tokens per second: what a probe gives up is paid for too.
        """
        if view.prefill_tokens:
            return plan
        drafted = {choice.drafter for choice in plan.choices}
        for a, arm in enumerate(problem.arms):
            if arm in drafted or arm in self._shadowed or not self._allowance.get(arm):
                continue
            patience = self._patience.get(arm, 1)
            if patience * self._least_price(problem, a) > self._allowance[arm]:
                continue
            tried = self._try(view, plan, problem, a, rate)
            if tried is not None:
                return tried
        return plan

    def _least_price(self, problem: Problem, a: int) -> float:
        return float(problem.round[problem.family[a], 1]) * self.num_draft_tokens

    def _try(
        self, view: BatchView, plan: Plan, problem: Problem, a: int, rate: float
    ) -> Plan | None:
        """`plan` with the arm's probe, on a request that takes turns; None if it costs too much."""
        arm = problem.arms[a]
        r = self._whose_turn(view, plan, arm)
        if r is None:
            return None
        length = self._length(view.requests[r], arm)
        tokens = sum(choice.num_draft_tokens for choice in plan.choices)
        after = tokens - plan.choices[r].num_draft_tokens + length
        if after >= len(problem.verify):
            return None
        seconds = float(problem.round[problem.family[a], 1]) * length
        seconds += max(float(problem.verify[after] - problem.verify[tokens]), 0.0)
        seconds += _tokens_given_up(problem, plan.choices[r], r, a, length) / rate
        if problem.catch_up is not None:
            seconds += float(problem.catch_up[a, r])
        if self._patience.get(arm, 1) * seconds > self._allowance[arm]:
            return None
        choices = (*plan.choices[:r], Choice.of(arm, length), *plan.choices[r + 1 :])
        return Plan(choices, f"{plan.reason}; {_MARK}{arm}")

    def _whose_turn(self, view: BatchView, plan: Plan, arm: str) -> int | None:
        """The next request that may try `arm`, one without a drafter before others."""
        batch, busy = len(view.requests), None
        for turn in range(view.step, view.step + batch):
            r = turn % batch
            if self._length(view.requests[r], arm):
                if plan.choices[r].drafter is None:
                    return r
                busy = r if busy is None else busy
        return busy

    def _length(self, request: RequestView, arm: str) -> int:
        """Tokens that a probe of `arm` may draft for `request`; 0 where it may not."""
        if arm not in request.drafters:
            return 0
        hint = request.hints.get(arm)
        bound = self.num_draft_tokens if hint is None else hint.max_draft_tokens
        most = self.num_draft_tokens if bound is None else bound
        return max(min(self.num_draft_tokens, most, request.remaining_tokens - 1), 0)


def _tokens_given_up(problem: Problem, planned: Choice, r: int, a: int, length: int) -> float:
    """What request `r` is expected to lose by `length` tokens of arm `a` in place of the plan."""
    if planned.drafter is None:
        return 0.0
    expected = problem.gain[problem.arms.index(planned.drafter), planned.num_draft_tokens, r]
    return max(float(expected - problem.gain[a, length, r]), 0.0)


_MARK = "probes "


def _probed(plan: Plan) -> str | None:
    """The arm that `plan` probes, if any."""
    _, mark, arm = plan.reason.rpartition(_MARK)
    return arm if mark else None
