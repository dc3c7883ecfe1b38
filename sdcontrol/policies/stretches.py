"""How many tokens a request gets from a drafter that had to catch up.

What a drafter's cache lacks is computed in the first round of a stretch of drafting with it. A request's first
catch-up, of its prompt mostly, serves all stretches that it still has, which together are a share of the tokens
to go; later ones, where drafters take turns, serve a stretch of a few tokens each. Whoever spreads either
over more takes turns that do not pay. Knows nothing of how plans are made. A fold over
observations.
"""

import math
from dataclasses import dataclass

import numpy as np

from sdcontrol.columns import columns_of
from sdcontrol.core import BatchView, FloatArray, Observation, RequestView
from sdcontrol.policies import posing
from sdcontrol.policies.endings import Endings, to_go, to_go_each
from sdcontrol.policies.posing import Horizon
from sdcontrol.policies.problem import IntArray, Problem
from sdcontrol.policies.tries import try_of

__all__ = ["Stretches"]

_RATE = 1.0 / 16.0  # of an average of stretches, or of requests
_PROVEN_TOKENS = 12  # from steps, tries too, that drafted with what had to catch up
_DRIFT = 1.0 / 8192.0  # of the share, per step in which nobody drafts with what has to catch up

_Stretch = tuple[str, int]
"""Arm, and tokens emitted."""


@dataclass(slots=True)
class _Use:
    possible: int  # tokens to go when it caught up first
    tokens: int  # of those, emitted in steps that drafted with what had to


class Stretches:
    """Running averages, at their most until something was seen: of tokens `most_tokens`, of shares 1."""

    def __init__(self, most_tokens: int = 64) -> None:
        self.most_tokens = most_tokens
        self.mean_tokens = float(most_tokens)  # of a stretch
        self.share = 1.0  # of what a request had to go
        self.endings = Endings()
        self._current: dict[str, _Stretch] = {}  # by request
        self._uses: dict[str, _Use] = {}  # by request that caught up a first time
        self.most_drafts = 0  # tokens of a step
        self._served = 0  # tokens
        self._caught_up: set[str] = set()  # arms that had to
        self._most_users: dict[str, int] = {}  # of one step, by arm
        self._looked_up: set[str] = set()  # arms that have nothing to catch up with

    @property
    def is_proven(self) -> bool:
        """Whether enough tokens came of steps that drafted with what had to catch up."""
        return self._served >= _PROVEN_TOKENS

    def most_users(self, arm: str) -> int:
        """Requests that ever drafted with it in the same step."""
        return self._most_users.get(arm, 0)

    @property
    def horizon(self) -> Horizon:
        """What plans may spread catch-ups over."""
        most = float(self.most_tokens)
        first = most * (posing.BOLD if self.is_proven else 1.0)
        again = min(max(self.mean_tokens, 1.0), most)
        return first, again, self.share, self.endings.per_token

    def charged(self, view: BatchView, problem: Problem, a: int) -> FloatArray:
        """The share of each request's catch-up that is charged to a step, `[requests]`."""
        return self._charged(view, problem, a, self.horizon)

    def hoped(self, view: BatchView, problem: Problem, a: int) -> float:
        """What would be charged for catch-ups over what is charged: if all that may come of them did, or if each
        request had caught up when it came, whichever is less.
        """
        charged = problem.catch_up[a]
        if not charged.any():
            return 1.0
        horizon = self.most_tokens * posing.BOLD, *self.horizon[1:]
        shares = self._charged(view, problem, a, horizon) / self.charged(view, problem, a)
        least = min((charged * shares).sum(), self.steady(view, problem, a).sum())
        return float(least / charged.sum())

    def whole(self, view: BatchView, problem: Problem, a: int) -> FloatArray:
        """Seconds of each request's catch-up, `[requests]`."""
        return np.asarray(problem.catch_up[a] / self.charged(view, problem, a))

    def steady(
        self, view: BatchView, problem: Problem, a: int, tokens: float = math.inf
    ) -> FloatArray:
        """Seconds that each request's step would be charged if it had caught up with its prompt when it came.

        A step emits `tokens` of a request, or as many as it may draft, if those are fewer.
        """
        columns = columns_of(view)
        lags = columns.catch_up_tokens[columns.arms.index(problem.arms[a])]
        generated = np.array([request.generated_tokens for request in view.requests])
        prompts = np.maximum(columns.context_tokens - generated, 0)
        whole = self.whole(view, problem, a).sum() / max(lags.sum(), 1) * prompts
        return self._spread(problem, a, whole, generated + columns.remaining_tokens, tokens)

    def at_once(self, view: BatchView, problem: Problem, a: int, tokens: float) -> FloatArray:
        """The same where each catches up now, and gets all that it has to go from that."""
        whole, left = self.whole(view, problem, a), columns_of(view).remaining_tokens
        return self._spread(problem, a, whole, left, tokens)

    def _spread(
        self, problem: Problem, a: int, whole: FloatArray, left: IntArray, tokens: float
    ) -> FloatArray:
        expected = to_go_each(left.astype(float), self.endings.per_token)
        served = np.clip(posing.SURELY * self.share * expected, 1.0, self.most_tokens * posing.BOLD)
        emitted = np.minimum(1.0 + problem.gain[a, :, -1], tokens)
        return np.asarray(whole * np.minimum(emitted / served, 1.0))

    def _charged(self, view: BatchView, problem: Problem, a: int, horizon: Horizon) -> FloatArray:
        columns = columns_of(view)
        longest = int(columns.remaining_tokens.argmax())
        rows = zip(
            columns.catch_up_tokens[columns.arms.index(problem.arms[a])].tolist(),
            columns.remaining_tokens.tolist(),
            columns.context_tokens.tolist(),
            (1.0 + problem.gain[a, :, -1]).tolist(),
            strict=True,
        )
        shares = [
            posing.charged((lag, left), context, tokens, posing.bolder(horizon, r == longest))
            for r, (lag, left, context, tokens) in enumerate(rows)
        ]
        return np.array(shares)

    def update(self, observation: Observation) -> None:
        """Take note of who went on with what."""
        self._count(observation)
        choices = observation.plan.choices
        users = [choice.drafter for choice in choices if choice.drafter is not None]
        nobody = set(users) <= self._looked_up
        if nobody:
            self.share += _DRIFT * (1.0 - self.share)  # texts change, and nobody would notice
        if nobody and not self._current:
            return  # as most steps: quickly
        for used in set(users) - self._looked_up:
            self._most_users[used] = max(self._most_users.get(used, 0), users.count(used))
        tried = try_of(observation.plan)
        self._follow(observation, None if tried is None else tried.arm)
        if not nobody:
            self._settle({request.id for request in observation.view.requests})

    def _follow(self, observation: Observation, tried_arm: str | None) -> None:
        """Stretches that go on, begin and end."""
        before, self._current = self._current, {}
        choices, emitted_tokens = observation.plan.choices, observation.emitted
        rows = zip(observation.view.requests, choices, emitted_tokens, strict=True)
        for request, choice, emitted in rows:
            arm = choice.drafter
            going = before.get(request.id) if before else None
            lag = None if arm is None else self._lag(request, arm)
            if lag is None or arm == tried_arm:  # a try says how well, and ends here
                self._served += 0 if lag is None else emitted
                arm = None
            if going is not None and going[0] != arm:  # of those that end nobody knows
                self.mean_tokens += _RATE * (going[1] - self.mean_tokens)
                going = None
            if arm is not None and lag is not None:
                self._current[request.id] = arm, emitted + (going[1] if going else 0)
                self._served += emitted
                if 2 * lag >= request.context_tokens:
                    self._end(request.id)  # a name may be used again
                    self._uses[request.id] = _Use(request.remaining_tokens, emitted)
                elif (use := self._uses.get(request.id)) is not None:
                    use.tokens += emitted

    def _count(self, observation: Observation) -> None:
        self.endings.update(observation)
        self.most_drafts = max(self.most_drafts, sum(observation.proposed))

    def _lag(self, request: RequestView, arm: str) -> int | None:
        """Tokens that `arm` lacks, if it ever had to catch up."""
        hint = request.hints.get(arm)
        if hint is None:
            return 0 if arm in self._caught_up else None
        lag = hint.catch_up_tokens
        if hint.match_tokens is not None:
            self._looked_up.add(arm)
        elif lag > 0:
            self._caught_up.add(arm)
            return lag
        return lag if arm in self._caught_up else None

    def _settle(self, here: set[str]) -> None:
        for ended in [name for name in self._uses if name not in here]:
            self._end(ended)

    def _end(self, name: str) -> None:
        """Count what a request got, if it ever caught up."""
        use = self._uses.pop(name, None)
        if use is not None:
            possible = to_go(float(use.possible), self.endings.per_token)
            self.share += _RATE * (min(use.tokens / max(possible, 1.0), 1.0) - self.share)
