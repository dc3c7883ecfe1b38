"""How many tokens a request still has to go, where most end before they have all that they may.

A chat with room for 1,000 tokens that answers in 40 ends by itself. Whoever shares out over 1,000 tokens what a
request costs once, as a draft model's catch-up does, believes it 25 times too cheap. How often requests
end by themselves is counted per token; one that ends with its last token says nothing of it, so that nothing changes where
all do. One that is away for a few steps has not ended: it waits for KV slots, or its turn in a loop of several batches. Knows nothing
of why a request ends, of drafters or costs. A fold over observations.
"""

import math
from typing import NamedTuple

import numpy as np

from sdcontrol.columns import ids_of
from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, FloatArray, Observation

__all__ = ["Endings", "to_go", "to_go_each"]

_MEMORY = 31.0 / 32.0  # of tokens and ends, per request that ends
_AWAY = 8  # steps, after which it has ended


class _Away(NamedTuple):
    since: int  # step
    left: int  # tokens that it might still have had


class Endings:
    """Tokens that were emitted, and requests that ended although they might have had more."""

    def __init__(self) -> None:
        self._tokens = self._early = 0.0
        self._steps = 0
        self._last: Observation | None = None
        self._away: dict[str, _Away] = {}

    @property
    def per_token(self) -> float:
        """How probable it is that a token is a request's last one, though it might have more."""
        return self._early / max(self._tokens, self._early) if self._early else 0.0

    def update(self, observation: Observation) -> None:
        """Take note of who is not there any more."""
        last, self._last = self._last, observation
        self._steps += 1
        self._tokens += sum(observation.emitted)
        if last is not None and ids_of(last.view) != ids_of(observation.view):
            self._compare(last, observation.view)
        while self._away:
            name, away = next(iter(self._away.items()))  # who left first
            if self._steps - away.since < _AWAY:
                break
            self._end(self._away.pop(name).left)

    def _compare(self, last: Observation, view: BatchView) -> None:
        """Who left, who is back, and whose name is another's now, which has more to go."""
        here = {request.id: request.remaining_tokens for request in view.requests}
        for name in [
            name for name in self._away if name in here
        ]:  # in their order, as a replay has it
            away = self._away.pop(name)
            if here[name] > away.left:
                self._end(away.left)
        for request, emitted in zip(last.view.requests, last.emitted, strict=True):
            left = request.remaining_tokens - emitted
            if request.id not in here:
                self._away[request.id] = _Away(self._steps, left)
            elif here[request.id] > left:
                self._end(left)

    def _end(self, left: int) -> None:
        self._tokens, self._early = _MEMORY * self._tokens, _MEMORY * self._early + (left > 0)


@compiled("float64(float64, float64)", is_inlined=True)
def to_go(remaining: float, per_token: float) -> float:
    """Tokens to expect of a request that may have `remaining`, where each is its last with such a probability."""
    if per_token <= 0.0:
        return remaining
    return (1.0 - math.exp(-per_token * remaining)) / per_token


def to_go_each(remaining: FloatArray, per_token: float) -> FloatArray:
    """The same of each request, `[requests]`."""
    if per_token <= 0.0:
        return remaining
    return np.asarray(-np.expm1(-per_token * remaining) / per_token)
