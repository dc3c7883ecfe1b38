"""A drafter that pays once everybody uses it, and that nobody begins with: all take it up together.

What a draft model takes for a round is mostly the same for one request as for many, and each request has its
prompt to catch up with. Whoever begins pays for both alone, so that where answers are short nobody does, although
everybody would be faster: each plan is the best one for its step, and none for what follows. So now and then it is
asked what a step would take if every request had caught up when it came, and shared its rounds with the
others. Where that is better than what is, by more than chance, requests are planned as if it were so, until those that are
there have gone: rounds cost what they will when they are shared, and a catch-up is charged to all that a request has to go.
What is taken up is decided while plans are made; a step that is planned twice counts once, with its last plan.
"""

from collections.abc import Mapping
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

_STEPS = 8  # from one look to the next
_LOOKS = 4  # over which rates are averaged: one step's says little, where what is looked up comes in runs
_LEAST_GAIN = 0.02  # of the rate; twice as much after each time that few went on by themselves
_HOPED_SLOPE = 0.5  # of what a request more adds to a round, where not many ever shared one
_HOPED_TOKENS = 0.5  # of what draft tokens take, where no step had many
_FOLLOWED = 0.5  # share of requests after which others come, so that there is a steady state
_FORGETS = 0.995  # of what is asked for beyond that, per look


class _Steady(NamedTuple):
    rate: float  # tokens per second once all have caught up
    users: int
    tokens: float  # of each of them


class _Compared(NamedTuple):
    """Averages of what a token takes."""

    looks: int = 0
    steady: float = 0.0  # seconds, once all have caught up
    otherwise: float = 0.0  # the same

    @property
    def gain(self) -> float:
        """By what share the rate would be better; 0 until there were enough looks."""
        return self.otherwise / self.steady - 1.0 if self.looks >= _LOOKS else 0.0

    def with_one(self, steady: float, otherwise: float) -> "_Compared":
        """After one more, of these rates."""
        share = max(1.0 / (self.looks + 1), 1.0 / _LOOKS)
        return _Compared(
            self.looks + 1,
            self.steady + share * (1.0 / steady - self.steady),
            self.otherwise + share * (1.0 / otherwise - self.otherwise),
        )


class _State(NamedTuple):
    arm: str = ""  # that is being taken up, empty for none
    users: int = 0
    present: frozenset[str] = frozenset()  # requests, when it began
    left: int = 0  # looks until they must have gone, if names are used again
    least_gain: float = _LEAST_GAIN
    compared: Mapping[str, _Compared] = {}  # by arm
    tokens: Mapping[str, float] = {}  # by arm, that a step emits of who uses it


class TakingUp:
    """What looks found, from one to the next; a plan that is made again for a step forgets the one before."""

    def __init__(self, stretches: Stretches) -> None:
        self.stretches = stretches
        self._state = self._before = _State()  # `_before`: when the step's first plan was asked for
        self._step = -1

    @property
    def arm(self) -> str:
        """The one that is being taken up, empty for none."""
        return self._state.arm

    def looks(self, view: BatchView, followed: float) -> bool:
        """Whether the problem of this step is to be `priced`; `followed` is the share of requests after which others come."""
        if view.step != self._step:
            self._step, self._before = view.step, self._state
        self._state = self._before
        if self.arm:
            return True
        is_due = view.step % _STEPS == 0 and not view.prefill_tokens and self.stretches.is_proven
        return is_due and followed >= _FOLLOWED and bool(_late(columns_of(view)).any())

    def priced(self, view: BatchView, problem: Problem) -> Problem:
        """The problem as it is, or as it will be once a drafter was taken up."""
        if view.step % _STEPS == 0:
            least = _LEAST_GAIN + _FORGETS * (self._state.least_gain - _LEAST_GAIN)
            self._state = self._state._replace(least_gain=least)
            if self.arm:
                self._go_on(view, problem)
            else:
                self._look(view, problem)
        if self.arm not in problem.arms:
            return problem
        a = problem.arms.index(self.arm)
        charged = self.stretches.at_once(view, problem, a, self._state.tokens[self.arm])
        return _shared(self._hoped(problem, a), a, self._state.users, charged)

    def _look(self, view: BatchView, problem: Problem) -> None:
        """Begin with the first that is better by enough."""
        columns, now = columns_of(view), maximise(problem).rate
        late, compared = _late(columns), dict[str, _Compared]()
        for a, arm in enumerate(problem.arms):
            if not (late[columns.arms.index(arm)] and problem.catch_up[a].any()):
                continue
            steady = self._steady(view, problem, a)
            before = self._state.compared.get(arm, _Compared())
            compared[arm] = before.with_one(steady.rate, now)
            if steady.users > 1 and compared[arm].gain > self._state.least_gain:
                self._begin(view, arm, steady.users)
                return
        self._state = self._state._replace(compared=compared)

    def _begin(self, view: BatchView, arm: str, users: int) -> None:
        self._state = self._state._replace(
            arm=arm,
            users=users,
            present=frozenset(request.id for request in view.requests),
            left=int(columns_of(view).remaining_tokens.max()) // _STEPS + 1,
            least_gain=2.0 * self._state.least_gain,
            compared={},
        )

    def _go_on(self, view: BatchView, problem: Problem) -> None:
        """Stop where everybody has gone who was there, or it would bring nothing."""
        self._state = state = self._state._replace(left=self._state.left - 1)
        is_over = state.present.isdisjoint(request.id for request in view.requests)
        is_over = is_over or state.left <= 0
        if not is_over and state.arm in problem.arms and not view.prefill_tokens:
            is_over = self._brings_nothing(view, problem, problem.arms.index(state.arm))
        if is_over:
            self._end(problem)

    def _end(self, problem: Problem) -> None:
        """Less is asked of it the next time, where by now most use it by themselves."""
        arm, least = self.arm, self._state.least_gain
        if arm in problem.arms:
            answer = maximise(problem)
            users = (answer.arm == problem.arms.index(arm)) & (answer.length > 0)
            least *= 0.5 if 2 * users.sum() >= problem.batch else 1.0
        self._state = self._state._replace(arm="", compared={}, least_gain=max(least, _LEAST_GAIN))

    def _brings_nothing(self, view: BatchView, problem: Problem, a: int) -> bool:
        if not problem.catch_up[a].any():  # all have caught up, and what it takes is not told
            return False
        without = maximise(only(problem, set(range(len(problem.arms))) - {a})).rate
        before = self._state.compared.get(self.arm, _Compared())
        compared = before.with_one(self._steady(view, problem, a).rate, without)
        self._state = self._state._replace(compared={self.arm: compared})
        return compared.looks >= _LOOKS and compared.gain <= 0.0

    def _steady(self, view: BatchView, problem: Problem, a: int) -> _Steady:
        """What a step would be if each request had caught up when it came."""
        problem = self._hoped(problem, a)
        arm = problem.arms[a]
        tokens = self._state.tokens.get(arm, np.inf)
        charged = self.stretches.steady(view, problem, a, tokens)
        asked = _shared(problem, a, problem.batch, charged)
        steady = _worth(problem, asked, maximise(asked), (a, tokens))
        if steady.users:
            tokens_by_arm = {**self._state.tokens, arm: steady.tokens}
            self._state = self._state._replace(tokens=tokens_by_arm)
        return steady

    def _hoped(self, problem: Problem, a: int) -> Problem:
        """With rounds that take less for each request more: that is known only once many shared one. So with tokens."""
        if 2 * self.stretches.most_users(problem.arms[a]) >= problem.batch:
            return problem
        problem = self._with_hoped_tokens(problem)
        rounds, f = problem.rounds.copy(), problem.family[a]
        rounds[f, 2:] = rounds[f, 1] + _HOPED_SLOPE * (rounds[f, 2:] - rounds[f, 1])
        # What a request reads beyond the average one is part of that: else short contexts pay less than nothing.
        share = np.where(problem.family == f, _HOPED_SLOPE, 1.0)
        return problem._replace(rounds=rounds, reading=share[:, None] * problem.reading)

    def _with_hoped_tokens(self, problem: Problem) -> Problem:
        """With draft tokens that take less: that is known only once a step had many, and nobody drafts."""
        if 2 * self.stretches.most_drafts >= problem.batch:
            return problem
        verify = problem.verify[0] + _HOPED_TOKENS * (problem.verify - problem.verify[0])
        # What drafts that do not come spare is part of that: else they would bring time.
        reading = np.maximum(problem.reading, _HOPED_TOKENS * problem.reading)
        return problem._replace(verify=verify, reading=reading)


def _late(columns: Columns) -> NDArray[np.bool_]:
    """The arms that several requests never caught up for, `[arms]`."""
    never = 2 * columns.catch_up_tokens >= columns.context_tokens
    return np.asarray(never.sum(axis=1) > 1)


def _shared(problem: Problem, a: int, users: int, charged: FloatArray) -> Problem:
    """With rounds at what they take each where so many share them, and other charges for catching up."""
    rounds, catch_up, f = problem.rounds.copy(), problem.catch_up.copy(), problem.family[a]
    some = np.arange(1, min(users, problem.batch) + 1)
    rounds[f, some] = np.minimum(rounds[f, some], rounds[f, some[-1]] / len(some) * some)
    catch_up[a] = charged
    return problem._replace(rounds=rounds, catch_up=catch_up)


def _worth(problem: Problem, asked: Problem, answer: Answer, use: tuple[int, float]) -> _Steady:
    """The rate of a plan where rounds take what they do, and catch-ups are charged for what is emitted."""
    a, tokens = use
    seconds, f = answer.seconds, problem.family[a]
    of_family = (problem.family[answer.arm] == f) & (answer.length > 0)
    for j in range(int(answer.length[of_family].max(initial=0))):
        k = int((answer.length[of_family] > j).sum())
        seconds += problem.rounds[f, k] - asked.rounds[f, k]
    rows = np.flatnonzero((answer.arm == a) & (answer.length > 0))
    gain = problem.gain[a, rows]
    emitted = 1.0 + gain[np.arange(len(rows)), answer.length[rows]]
    charged = np.minimum(1.0 + gain[:, -1], tokens)
    seconds += (asked.catch_up[a, rows] * (emitted / charged - 1.0)).sum()
    return _Steady(answer.gain / seconds, len(rows), float(emitted.sum()) / max(len(rows), 1))
