"""When to try an arm that is off, so that it is known when it would pay.

Knows nothing of how acceptance is estimated. Probes are paid from one allowance, a fixed share of
the time that passes, saved up for at most three steps' time. Half of that may be spent at once and
is paid back by half the income until then: with a share of 1 %, probes have cost at most 1.5 steps
more than 1 % of the time at the start, and from step 300 on never more than 1 % of all time. What
is spent is the price that the plan named, or the drafting that was measured where that was more.
"""

from dataclasses import dataclass

from sdcontrol.core import BatchView, Choice, Observation, Plan, family_of
from sdcontrol.policies.problem import Answer, Problem

__all__ = ["Probing"]

_SAVED_STEPS = 3.0  # steps' time that the allowance can hold
_LOAN = 0.5  # of that, at the start
_STEP_MEMORY = 0.95  # of the average step's seconds, per step
_TURN_MEMORY = 0.995  # of what each arm spent, per step
_SURE_PROBES = 8.0  # probes without effect that double the next one's price
_MOST_WEIGHT = 4.0
_LEAST_SHARE = 0.02  # of a plain step, that a probe counts for even where it is free
_LONGEST_SECONDS = 60.0  # that a step may have taken to count
_MARK, _PRICE = "; probes ", " for at most "


class Probing:
    """The allowance for trying arms that are off, in seconds.

    Each probe after which its arm stays off makes the arm's next one count for more, up to 4
    times: what was confirmed often is less uncertain. A family that was never drafted with comes
    first, with one token. An arm that is observed in shadow needs no probes.
    """

    def __init__(self, share: float, num_draft_tokens: int) -> None:
        self.share = share
        self.num_draft_tokens = num_draft_tokens
        self._allowance = 0.0
        self._step_seconds = 0.0
        self._steps = 0
        self._spent: dict[str, float] = {}  # by arm, not long ago
        self._confirmed: dict[str, int] = {}  # by arm, probes in a row after which it stayed off
        self._measured: set[str] = set()  # families
        self._shadowed: set[str] = set()  # arms

    def update(self, observation: Observation) -> None:
        """Earn from the time that passed; pay for what was probed."""
        for arm, lengths in observation.shadow.items():
            if arm not in self._shadowed and any(n is not None for n in lengths):
                self._shadowed.add(arm)
        timing = observation.timing
        seconds = timing.total_seconds
        probed, price = _probed(observation.plan)
        for drafter in {choice.drafter for choice in observation.plan.choices}:
            if drafter is not None:
                self._measured.add(family_of(drafter))
                if drafter != probed:
                    self._confirmed[drafter] = 0
        is_decode = bool(observation.view.requests) and not observation.view.prefill_tokens
        if is_decode and 0.0 < seconds < _LONGEST_SECONDS:  # a prompt's time is no measure
            self._earn(seconds)
        if probed is not None:
            measured = timing.draft_seconds.get(family_of(probed), 0.0)
            if 0.0 < measured < _LONGEST_SECONDS:
                price = max(price, measured)
            price *= self._weight(probed)
            self._allowance -= price
            self._spent[probed] = self._spent.get(probed, 0.0) + price
            self._confirmed[probed] = self._confirmed.get(probed, 0) + 1

    def probe(self, view: BatchView, plan: Plan, problem: Problem, answer: Answer) -> Plan:
        """`plan`, or where the allowance pays for it, `plan` with one request trying an arm."""
        if self._allowance <= 0.0 or view.prefill_tokens:
            return plan
        drafting = set(answer.arm[answer.length > 0].tolist())
        off = [
            (family_of(arm) in self._measured, self._spent.get(arm, 0.0), a)
            for a, arm in enumerate(problem.arms)
            if a not in drafting and arm not in self._shadowed
        ]
        for is_measured, _, a in sorted(off):  # whoever is due and can be paid once is waited for
            weight = self._weight(problem.arms[a])
            most_seconds = _SAVED_STEPS * self._step_seconds
            least = float(problem.rounds[problem.family[a], 1])
            if min(weight * least, most_seconds) > self._allowance:
                if least <= most_seconds:
                    return plan
                continue
            probe = _cheapest(view, problem, answer, a, self.num_draft_tokens if is_measured else 1)
            if probe is None or probe.seconds > most_seconds:
                continue
            if min(weight * probe.seconds, most_seconds) > self._allowance:
                return plan
            return _with(plan, problem.arms[a], probe)
        return plan

    def _earn(self, seconds: float) -> None:
        self._steps += 1
        if self._steps == 1:
            self._step_seconds = seconds
            self._allowance = _LOAN * _SAVED_STEPS * seconds if self.share else 0.0
        is_repaid = self._steps * self.share >= _SAVED_STEPS
        self._step_seconds = _STEP_MEMORY * self._step_seconds + (1.0 - _STEP_MEMORY) * seconds
        earned = self.share * seconds * (1.0 if is_repaid else 1.0 - _LOAN)
        self._allowance = min(self._allowance + earned, _SAVED_STEPS * self._step_seconds)
        for arm in self._spent:
            self._spent[arm] *= _TURN_MEMORY

    def _weight(self, arm: str) -> float:
        return min(1.0 + self._confirmed.get(arm, 0) / _SURE_PROBES, _MOST_WEIGHT)


@dataclass(frozen=True, slots=True)
class _Probe:
    """One request's try of an arm."""

    request: int
    length: int
    seconds: float  # what it costs: drafting, verification, and the tokens of the plan given up


def _cheapest(
    view: BatchView, problem: Problem, answer: Answer, a: int, most_tokens: int
) -> _Probe | None:
    """Of most expected outcomes per second, for the request whose turn it is; None: nobody can."""
    r = _whose_turn(view.step, problem, answer, a)
    held = int(answer.length[r])
    tokens = int(answer.length.sum()) - held
    most = min(int(problem.limit[a, r]), most_tokens, len(problem.verify) - 1 - tokens)
    best, most_outcomes = None, 0.0
    gains = problem.gain[a, r].tolist()
    expected = float(problem.gain[answer.arm[r], r, held])
    for n in range(1, most + 1):
        seconds = float(problem.rounds[problem.family[a], 1]) * n
        seconds += max(float(problem.verify[tokens + n] - problem.verify[tokens + held]), 0.0)
        seconds += max(expected - gains[n], 0.0) / answer.rate + float(problem.catch_up[a, r])
        seconds = max(seconds, _LEAST_SHARE * float(problem.verify[0]))
        outcomes = (1.0 + gains[n - 1]) / seconds  # a token counts where those before it were right
        if outcomes > most_outcomes:
            best, most_outcomes = _Probe(r, n, seconds), outcomes
    return best


def _whose_turn(step: int, problem: Problem, answer: Answer, a: int) -> int:
    """The next request that may try arm `a`, one without drafts before others."""
    batch, busy = problem.batch, step % problem.batch
    limit = problem.limit[a].tolist()
    for turn in range(step, step + batch):
        r = turn % batch
        if limit[r]:
            if not answer.length[r]:
                return r
            busy = busy if limit[busy] else r
    return busy


def _with(plan: Plan, arm: str, probe: _Probe) -> Plan:
    r = probe.request
    choices = (*plan.choices[:r], Choice.of(arm, probe.length), *plan.choices[r + 1 :])
    return Plan(choices, f"{plan.reason}{_MARK}{arm}{_PRICE}{probe.seconds:.3g} s")


def _probed(plan: Plan) -> tuple[str | None, float]:
    """The arm that `plan` probes, if any, and the seconds that it was expected to cost."""
    _, mark, probe = plan.reason.rpartition(_MARK)
    arm, _, price = probe.rpartition(_PRICE)
    try:
        return (arm, float(price.removesuffix(" s"))) if mark else (None, 0.0)
    except ValueError:  # another policy's words
        return None, 0.0
