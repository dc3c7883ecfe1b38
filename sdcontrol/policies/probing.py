"""When to try an arm that is off, so that it is known when it would pay.

Knows nothing of how acceptance is estimated. Two things must agree. The allowance says what probes may
cost: a fixed share of the time that passes, saved up for at most three steps' time. A quarter of
that may be spent at once and is paid back by a quarter of the income until then: with a share of
1 %, probes have cost at most 0.75 steps more than 1 % of the time at the start, and from step 300 on
never more than 1 % of all time. What is spent is the price that the plan named, or the drafting that
was measured where that was more. One request tries, or all at once where a round that they share
tells much more for its time; the price of that is what it loses beside the plan, by what is believed
of its tokens: where fewer are accepted, more is lost than is paid. And a probe must be worth it: the
more the arm could bring beside the plan of this very step (`upside`), the sooner it is tried, by all at
once sooner than by one. What is asked for falls as the allowance fills, so that nothing stays untried
for ever; but what could bring next to nothing, even if it turned out well, is only rechecked, at the
highest price that a probe may count for. Two sorts of tries need not be worth it: the first of a family, where it
costs little, and those that follow one that had to catch up (`follow_ups`), which are made on credit where
they cost little: for a while the share may be exceeded by that, and by what a catch-up took beyond its price.

The allowance also pays for other lengths than the best ones (`lengths`): where every step asks for as
many tokens, what more or fewer would take is never seen, and a wrong price keeps itself up.
"""

import math
from collections import Counter

from sdcontrol.controller_share import ControllerShare
from sdcontrol.core import BatchView, Observation, Plan, Timing, family_of
from sdcontrol.policies.follow_ups import FollowUps, of_caught_up
from sdcontrol.policies.lengths import Lengths, only
from sdcontrol.policies.problem import Answer, Problem
from sdcontrol.policies.stretches import Stretches
from sdcontrol.policies.tries import (
    FOLLOWS_UP,
    LENGTHS,
    PROBES,
    RECHECKS,
    Probe,
    Try,
    as_it_came,
    try_of,
    with_probe,
)
from sdcontrol.policies.upside import cheapest, together, upside

__all__ = ["Probing"]

_SAVED_STEPS = 3.0  # steps' time that the allowance can hold
_LOAN = 0.25  # of that, at the start
_LEAST_RETURN = 0.3  # share of the rate for a step's time of probing; less as the allowance fills
_LEAST_OF_ALL = 0.06  # the same where all try at once: one such probe mostly settles it
_HOPELESS = 0.01  # the same, under which a try is a recheck
_STEP_MEMORY = 0.95  # of the average step's seconds, per step
_TURN_MEMORY = 0.995  # of what each arm spent, per step
_SURE_PROBES = 8.0  # probes without effect that double the next one's price
_MOST_WEIGHT = 4.0
_LONGEST_SECONDS, _PAUSE = 60.0, 4.0  # that a step may take to count, or times the one before
_LASTING_VARIANCE = 0.5  # of an arm's log-odds of acceptance, however often it was seen
_FIRST_VARIANCE = 1.0  # on top of that, of one never seen
_KNOWN_TOKENS = 4.0  # verified tokens that halve the latter
_SEEN_MEMORY = 0.99  # of verified tokens, per step
_HOPED_ROUNDS = 0.5, 0.7, 0.85, 1.0  # what rounds measured so often may take, of what is believed
_EAGER_STEPS = 200  # each of which is looked at, before looks become rare: they take time
_FIRST_STEPS = 8  # the same where the controller's time weighs
_STEPS_PER_LOOK, _RARE = 4, 16  # the latter where it weighs
_QUIET_STEPS, _MOST_DOUBLED = 128, 2  # without a probe, after which looks become half as frequent
_MOST_NOTED = 16  # steps that may be counted late: several at once take less than one by one
_ON_CREDIT = 0.5  # of a step's time, for which a try is followed up whatever was saved
_ONCE = 0.4  # of a step's time, for which what was never tried is tried, whatever it may bring
_TOGETHER = 2.0  # times the outcomes per second of a lone try, for all to try at once


class Probing:
    """The allowance for trying arms that are off, in seconds.

    Each probe after which its arm stays off makes the arm's next one count for more, up to 4
    times: what was confirmed often is less uncertain. A family that was never drafted with comes
    first, with one token. An arm that is observed in shadow needs no probes. Plans spread a catch-up
    as `stretches` say; a probe pays all of it.
    """

    def __init__(
        self, share: float, num_draft_tokens: int, stretches: Stretches | None = None
    ) -> None:
        self.share = share
        self.num_draft_tokens = num_draft_tokens
        self.stretches = stretches or Stretches()
        self._allowance = 0.0
        self._step_seconds = 0.0
        self._longest = _LONGEST_SECONDS  # that counts, or else somebody paused
        self._steps = 0
        self._last_probe = 0  # the number of steps before it
        self._share = ControllerShare()
        self._num_observed = 0
        self._noted: list[Observation] = []  # observed, and not counted yet
        self._spent: dict[str, float] = {}  # by arm, not long ago
        self._confirmed: dict[str, int] = {}  # by arm, probes in a row after which it stayed off
        self._measured: Counter[str] = Counter()  # steps, by family
        self._shadowed: set[str] = set()  # arms
        self._seen: dict[str, float] = {}  # by arm, tokens verified not long ago
        self._lengths = Lengths()
        self._follow_ups = FollowUps()

    def update(self, observation: Observation) -> None:
        """Take note of a step; it is counted before the next look at what to probe."""
        self._num_observed += 1
        self._share.update(observation)
        self._follow_ups.update(observation)
        self._noted.append(observation)
        if len(self._noted) >= _MOST_NOTED:
            self._count()

    def _count(self) -> None:
        """Count what was noted: the same whenever it is done, since observations alone decide."""
        for observation in self._noted:
            self._count_step(observation)
        self._noted.clear()

    def _count_step(self, observation: Observation) -> None:
        """Earn from the time that passed; pay for what was probed."""
        for arm, lengths in observation.shadow.items():
            if arm not in self._shadowed and any(n is not None for n in lengths):
                self._shadowed.add(arm)
        self._count_seen(observation)
        seconds = observation.timing.total_seconds
        tried = try_of(observation.plan)
        probed = tried.arm if tried is not None else None
        used = {choice.drafter for choice in observation.plan.choices if choice.drafter is not None}
        self._measured.update(set(map(family_of, used)))
        self._confirmed.update(dict.fromkeys(used - {probed}, 0))
        is_decode = bool(observation.view.requests) and not observation.view.prefill_tokens
        if is_decode and 0.0 < seconds < self._longest:  # a prompt's time is no measure
            self._earn(seconds)
        self._lengths.update(observation)
        if tried is not None:
            self._pay(as_it_came(tried, observation), observation.timing)
        self._longest = max(_LONGEST_SECONDS, _PAUSE * seconds)

    def _pay(self, tried: Try, timing: Timing) -> None:
        """The price that was named; of an arm, with the drafting that was measured, and its weight."""
        arm, price = tried.arm, tried.seconds
        if tried.mark == LENGTHS:
            self._allowance -= price
            return
        self._last_probe = self._steps
        if 0.0 < (measured := timing.draft_seconds.get(family_of(arm), 0.0)) < self._longest:
            more = max(measured - tried.drafting, 0.0)
            price = price + more if tried.drafting else max(price, measured)
        price *= _MOST_WEIGHT if tried.mark == RECHECKS else self._weight(arm)
        self._allowance -= price
        self._spent[arm] = self._spent.get(arm, 0.0) + price
        self._confirmed[arm] = self._confirmed.get(arm, 0) + (tried.mark != FOLLOWS_UP)

    def looks(self, view: BatchView) -> bool:
        """Whether this step is one to look for something to try."""
        eager, interval = _EAGER_STEPS, _STEPS_PER_LOOK
        if self._share.weighs:
            quiet = (self._steps - self._last_probe) // _QUIET_STEPS
            eager, interval = _FIRST_STEPS, _RARE << min(quiet, _MOST_DOUBLED)
        is_due = self._num_observed <= eager or view.step % interval == 0
        if view.prefill_tokens or not (is_due or self._follow_ups.arm):
            return False
        self._count()
        return self._allowance > 0.0 or bool(self._follow_ups.arm)

    def probe(self, view: BatchView, plan: Plan, problem: Problem, answer: Answer) -> Plan:
        """`plan`, or where the allowance pays for it, `plan` with one request, or all, trying an arm;
        or the best plan of other lengths.

        To be asked in a step that `looks`.
        """
        again = self._again(view, problem, answer)
        if again is not None:
            return with_probe(plan, FOLLOWS_UP, *again)
        arms = list(enumerate(problem.arms))
        drafting = set(answer.arm[answer.length > 0].tolist())
        off = [
            (family_of(arm) in self._measured, self._spent.get(arm, 0.0), a)
            for a, arm in arms
            if a not in drafting and arm not in self._shadowed
        ]
        for is_measured, _, a in sorted(off):  # whoever is due and can be paid once is waited for
            weight = self._weight(problem.arms[a])
            most_seconds = _SAVED_STEPS * self._step_seconds
            probe = self._cheapest(view, problem, answer, a, is_measured=is_measured)
            if probe is None or probe.seconds > most_seconds:
                continue
            if not is_measured and probe.whole <= min(_ONCE * self._step_seconds, self._allowance):
                return with_probe(plan, PROBES, problem, a, probe)
            if min(weight * probe.seconds, most_seconds) > self._allowance:
                break
            unfilled = 1.0 - self._allowance / most_seconds
            hoped = self._return(view, problem, answer, (a, probe))
            least = _LEAST_OF_ALL if probe.by_all else _LEAST_RETURN
            if hoped >= max(least * unfilled, _HOPELESS):
                return with_probe(plan, PROBES, problem, a, probe)
            if unfilled <= 0.0:
                return with_probe(plan, RECHECKS, problem, a, probe)
        other = self._lengths.without(plan, problem, answer, self._allowance)
        if other is None and self._lengths.is_due(view.step):
            known = only(problem, drafting | {a for a, arm in arms if arm in self._shadowed})
            other = self._lengths.others(view.step, plan, known, answer, self._allowance)
        return other or plan

    def _again(
        self, view: BatchView, problem: Problem, answer: Answer
    ) -> tuple[Problem, int, Probe] | None:
        """The try that follows one that had to catch up, where it is due, and can be paid or costs little."""
        if self._follow_ups.arm not in problem.arms:
            return None
        a = problem.arms.index(self._follow_ups.arm)
        if (answer.arm[answer.length > 0] == a).any():  # it is no try any more
            return None
        caught_up = of_caught_up(view, problem, a)
        probe = self._cheapest(view, caught_up, answer, a, is_measured=True)
        most = max(self._allowance, _ON_CREDIT * self._step_seconds)
        if probe is None or self._weight(problem.arms[a]) * probe.seconds > most:
            return None
        return caught_up, a, probe

    def _cheapest(
        self, view: BatchView, problem: Problem, answer: Answer, a: int, *, is_measured: bool
    ) -> Probe | None:
        """Of most expected outcomes per second: by the request whose turn it is, or by all; None: nobody can.

        All of them where that costs little, and can be saved up: they share the rounds, and what they accept counts.
        """
        most = self.num_draft_tokens if is_measured else 1
        r = _whose_turn(view.step, problem, answer, a)
        length, seconds = cheapest(problem, answer, a, r, most_tokens=most)
        if not length:
            return None
        charged = self.stretches.charged(view, problem, a)
        whole = seconds + float(problem.catch_up[a, r]) * (1.0 / float(charged[r]) - 1.0)
        lone = Probe(r, length, seconds, whole)
        if not is_measured:
            return lone
        for_each, lost, drafting, per_second = together(
            problem, answer, a, charged, most_tokens=most
        )
        alone = (1.0 + float(problem.gain[a, r, length - 1])) / whole
        can_be_paid = lost <= _SAVED_STEPS * self._step_seconds
        if for_each and can_be_paid and per_second > _TOGETHER * alone:
            return Probe(r, for_each, lost, lost, drafting, by_all=True)
        return lone

    def _return(
        self, view: BatchView, problem: Problem, answer: Answer, tried: tuple[int, Probe]
    ) -> float:
        """What an arm could bring: share of the rate for a step's time of trying, catch-up included."""
        a, probe = tried
        arm = problem.arms[a]
        known = 1.0 + self._seen.get(arm, 0.0) / _KNOWN_TOKENS
        gained = upside(
            problem,
            answer,
            a,
            probe.request,
            spread=math.sqrt(_LASTING_VARIANCE + _FIRST_VARIANCE / known),
            round_share=_HOPED_ROUNDS[min(self._measured[family_of(arm)], len(_HOPED_ROUNDS) - 1)],
            catch_up_share=self.stretches.hoped(view, problem, a),
        )
        return gained * self._step_seconds / probe.whole

    def _count_seen(self, observation: Observation) -> None:
        verified, choices = dict.fromkeys(self._seen, 0), observation.plan.choices
        rows = zip(choices, observation.proposed, observation.accepted, strict=True)
        for choice, proposed, accepted in rows:  # of hundreds
            if (arm := choice.drafter) is not None:
                tokens = accepted + 1 if accepted < proposed else proposed
                verified[arm] = verified.get(arm, 0) + tokens
        for arm, tokens in verified.items():
            self._seen[arm] = _SEEN_MEMORY * self._seen.get(arm, 0.0) + tokens

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
