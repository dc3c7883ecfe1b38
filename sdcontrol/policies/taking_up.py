"""A drafter that pays once everybody uses it, and that nobody begins with: all take it up together.

What a draft model takes for a round is mostly the same for one request as for many, and each request has its
prompt to catch up with. Whoever begins pays for both alone, so that where answers are short nobody does, although
everybody would be faster: each plan is the best one for its step, and none for what follows. So now and then it is
asked what a step would take if every request had caught up when it came, and shared its rounds with the
others. Where that is better than what is, by more than chance, requests are planned as if it were so, until those that are
there have gone: rounds cost what they will when they are shared, and a catch-up is charged to all that a request has to go.
A fold over observations, but for `priced`, which is asked in steps that it `looks` at.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import Columns, columns_of
from sdcontrol.core import BatchView, FloatArray
from sdcontrol.policies.lengths import only
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.problem import Answer, Problem
from sdcontrol.policies.stretches import Stretches

__all__ = ["TakingUp"]

_STEPS = 32  # from one look to the next
_LEAST_GAIN = 0.05  # of the rate, for which a drafter is taken up; twice as much after each time
_HOPED_SLOPE = 0.5  # of what a request more adds to a round, where not many ever shared one
_FOLLOWED = 0.5  # share of requests after which others come, so that there is a steady state
_FORGETS = 0.98  # of what is asked for beyond that, per look


class _Steady(NamedTuple):
    rate: float  # tokens per second once all have caught up
    users: int


class TakingUp:
    """`arm` is the one that is being taken up, empty for none."""

    def __init__(self, stretches: Stretches) -> None:
        self.stretches = stretches
        self.arm = ""
        self._users = 0
        self._present: set[str] = set()  # requests, when it began
        self._least_gain = _LEAST_GAIN
        self._taken_up: set[str] = set()  # arms, ever

    def looks(self, view: BatchView, followed: float) -> bool:
        """Whether the problem of this step is to be `priced`; `followed` is the share of requests after which others come."""
        if self.arm:
            return True
        is_due = view.step % _STEPS == 0 and not view.prefill_tokens and self.stretches.is_proven
        return is_due and followed >= _FOLLOWED and bool(_late(columns_of(view)).any())

    def priced(self, view: BatchView, problem: Problem) -> Problem:
        """The problem as it is, or as it will be once a drafter was taken up."""
        if view.step % _STEPS == 0 and not view.prefill_tokens:
            self._decide(view, problem)
        if self.arm not in problem.arms:
            return problem
        a = problem.arms.index(self.arm)
        whole, remaining = self.stretches.whole(view, problem, a), columns_of(view).remaining_tokens
        charged = self.stretches.spread(problem, a, whole, remaining)
        return _shared(problem, a, self._users, charged)

    def _decide(self, view: BatchView, problem: Problem) -> None:
        self._least_gain = _LEAST_GAIN + _FORGETS * (self._least_gain - _LEAST_GAIN)
        if self.arm:
            self._go_on(view, problem)
            return
        columns, now = columns_of(view), maximise(problem).rate
        late = _late(columns)
        for a, arm in enumerate(problem.arms):
            if not late[columns.arms.index(arm)]:
                continue
            steady = self._steady(view, problem if arm in self._taken_up else _hoped(problem, a), a)
            if steady.users > 1 and steady.rate > (1.0 + self._least_gain) * now:
                self._begin(view, arm, steady.users)
                return

    def _begin(self, view: BatchView, arm: str, users: int) -> None:
        self.arm, self._users = arm, users
        self._present = {request.id for request in view.requests}
        self._taken_up.add(arm)
        self._least_gain *= 2.0

    def _go_on(self, view: BatchView, problem: Problem) -> None:
        """Stop where everybody has gone who was there, or it would bring nothing."""
        is_over = self._present.isdisjoint(request.id for request in view.requests)
        if not is_over and self.arm in problem.arms:
            a = problem.arms.index(self.arm)
            others = set(range(len(problem.arms))) - {a}
            steady = self._steady(view, problem, a)
            is_over = steady.users < 2 or steady.rate < maximise(only(problem, others)).rate
        if is_over:
            self.arm = ""

    def _steady(self, view: BatchView, problem: Problem, a: int) -> _Steady:
        """What a step would be if each request had caught up when it came."""
        if not problem.catch_up[a].any():  # nobody says how long it takes, and nobody has to
            return _Steady(np.inf, problem.batch)
        asked = _shared(problem, a, problem.batch, self.stretches.steady(view, problem, a))
        return _worth(problem, asked, maximise(asked), a)


def _late(columns: Columns) -> NDArray[np.bool_]:
    """The arms that several requests never caught up for, `[arms]`."""
    never = 2 * columns.catch_up_tokens >= columns.context_tokens
    return np.asarray(never.sum(axis=1) > 1)


def _hoped(problem: Problem, a: int) -> Problem:
    """With rounds that take less for each request more: that is known only once many shared them."""
    rounds, f = problem.rounds.copy(), problem.family[a]
    rounds[f, 2:] = rounds[f, 1] + _HOPED_SLOPE * (rounds[f, 2:] - rounds[f, 1])
    return problem._replace(rounds=rounds)


def _shared(problem: Problem, a: int, users: int, charged: FloatArray) -> Problem:
    """With rounds at what they take each where so many share them, and other charges for catching up."""
    rounds, catch_up, f = problem.rounds.copy(), problem.catch_up.copy(), problem.family[a]
    some = np.arange(1, min(users, problem.batch) + 1)
    rounds[f, some] = np.minimum(rounds[f, some], rounds[f, some[-1]] / len(some) * some)
    catch_up[a] = charged
    return problem._replace(rounds=rounds, catch_up=catch_up)


def _worth(problem: Problem, asked: Problem, answer: Answer, a: int) -> _Steady:
    """The rate of a plan where rounds take what they do, and catch-ups are charged for what is emitted."""
    uses = (answer.arm == a) & (answer.length > 0)
    seconds, f = answer.seconds, problem.family[a]
    of_family = (problem.family[answer.arm] == f) & (answer.length > 0)
    for j in range(int(answer.length[of_family].max(initial=0))):
        k = int((answer.length[of_family] > j).sum())
        seconds += problem.rounds[f, k] - asked.rounds[f, k]
    rows = np.flatnonzero(uses)
    gain = problem.gain[a, rows]
    emitted = 1.0 + gain[np.arange(len(rows)), answer.length[rows]]
    seconds -= (asked.catch_up[a, rows] * (1.0 - emitted / (1.0 + gain[:, -1]))).sum()
    return _Steady(answer.gain / seconds, len(rows))
