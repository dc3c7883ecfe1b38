"""How many tokens a request gets from a drafter that had to catch up before it uses something else.

What a drafter's cache lacks is computed in the first round of such a stretch. A request's first catch-up,
of its prompt mostly, may serve it for long; later ones, where drafters take turns, serve a stretch of a few
tokens each, and whoever spreads them over more takes turns that do not pay. Knows nothing of
costs or of how plans are made. A fold over observations.
"""

from typing import NamedTuple

from sdcontrol.core import Hint, Observation
from sdcontrol.policies.posing import Horizon

__all__ = ["Stretches"]

_RATE = 1.0 / 16.0  # of an average of stretches
_UP_TO_DATE = Hint()


class _Stretch(NamedTuple):
    arm: str
    tokens: int  # emitted


class Stretches:
    """The tokens of a stretch, running; `most_tokens` until some were seen, and at most."""

    def __init__(self, most_tokens: int = 64) -> None:
        self.most_tokens = most_tokens
        self.mean_tokens = float(most_tokens)
        self._current: dict[str, _Stretch] = {}  # by request
        self._caught_up: set[str] = set()  # arms that had to
        self._looked_up: set[str | None] = {None}  # arms that have nothing to catch up with

    @property
    def horizon(self) -> Horizon:
        """What plans may spread a request's first catch-up over, and others, in tokens."""
        return float(self.most_tokens), min(max(self.mean_tokens, 1.0), float(self.most_tokens))

    def update(self, observation: Observation) -> None:
        """Take note of who went on with what."""
        choices, before = observation.plan.choices, self._current
        if not before and {choice.drafter for choice in choices} <= self._looked_up:
            return  # as most steps: quickly
        self._current = {}
        rows = zip(observation.view.requests, choices, observation.emitted, strict=True)
        for request, choice, emitted in rows:
            arm, going = choice.drafter, before.get(request.id)
            if going is not None and going.arm != arm:  # of those that end nobody knows
                self.mean_tokens += _RATE * (going.tokens - self.mean_tokens)
                going = None
            if arm is None:
                continue
            hint = request.hints.get(arm, _UP_TO_DATE)
            if hint.match_tokens is not None:
                self._looked_up.add(arm)
            elif hint.catch_up_tokens > 0:
                self._caught_up.add(arm)
            if arm in self._caught_up:
                tokens = emitted if going is None else going.tokens + emitted
                self._current[request.id] = _Stretch(arm, tokens)
