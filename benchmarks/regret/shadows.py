"""An engine whose unused n-gram drafter is scored by the synthetic rates that would judge it in use.

The shadow drafts are made in earnest; a random model's text says nothing of what would be accepted,
so each count is made up from the numbers that decide at its request and positions. They are drawn
ahead: what comes of a draft in life is seen at once, too, and the time of a step is measured.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sdcontrol.core import Observation
from sdcontrol.engine.drafters.base import Draft
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.noise import SYNTHETIC, uniforms
from sdcontrol.engine.synthetic import SyntheticVerifier
from sdcontrol.engine.walk import VerifyTask

__all__ = ["SyntheticEngine"]

_AHEAD = 128  # positions drawn at once
_MOST_KEPT = 4096  # requests


class SyntheticEngine(Engine):
    """Learns from shadows that are right at the verifier's rates, as far as the step's tokens go."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._luck_of: dict[tuple[str, str], _Luck] = {}  # by arm and request

    def _learn(self, observation: Observation) -> None:
        shadow = {arm: self._made_up(arm, observation) for arm in observation.shadow}
        super()._learn(replace(observation, shadow=shadow))

    def _made_up(self, arm: str, observation: Observation) -> tuple[int | None, ...]:
        """By request, how many of the step's tokens `arm` had foreseen; None where it was used."""
        counts: list[int | None] = []
        rows = zip(
            observation.view.requests, observation.accepted, observation.shadow[arm], strict=True
        )
        for request, accepted, by_text in rows:
            if by_text is None:
                counts.append(None)
                continue
            luck = self._luck(arm, request.id, request.context_tokens, accepted + 1)
            drawn, last = luck.drawn[request.context_tokens - luck.first :], len(luck.rates) - 1
            count = 0
            while count <= accepted and drawn[count] < luck.rates[min(count, last)]:
                count += 1
            counts.append(count)
        return tuple(counts)

    def _luck(self, arm: str, name: str, position: int, num_tokens: int) -> "_Luck":
        """What decides at least from `position` on, for `num_tokens`."""
        luck = self._luck_of.get((arm, name))
        end = position + num_tokens
        if luck is None or not luck.first <= position <= end <= luck.first + len(luck.drawn):
            if len(self._luck_of) >= _MOST_KEPT:
                self._luck_of.clear()
            luck = self._luck_of[arm, name] = self._draw(arm, name, position)
        return luck

    def _draw(self, arm: str, name: str, position: int) -> "_Luck":
        verifier, draft = self.verifier, Draft.chain([0])
        assert isinstance(verifier, SyntheticVerifier)
        assert not verifier.supports_trees
        request = self.requests.get(name) or next(r for r in self._ended if r.id == name)
        task = VerifyTask(request.sampler, range(position), draft, first_row=0, drafter=arm)
        positions = torch.arange(position, position + _AHEAD)
        seeds, noise = torch.full_like(positions, request.sampler.seed), torch.zeros_like(positions)
        drawn = uniforms(seeds, positions, noise, SYNTHETIC).tolist()
        return _Luck(verifier.rates_of(task), position, drawn)


class _Luck(NamedTuple):
    rates: Sequence[float]  # by depth, the last one beyond
    first: int  # position
    drawn: list[float]  # the number that decides, from that position on
