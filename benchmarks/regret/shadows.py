"""An engine whose unused n-gram drafter is scored by the synthetic rates that would judge it in use.

The shadow drafts are made in earnest; a random model's text says nothing of what would be accepted,
so each count is made up from the numbers that decide at its request and positions.
"""

from dataclasses import replace

import numpy as np

from sdcontrol.core import Observation
from sdcontrol.engine.drafters.base import Draft
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.synthetic import SyntheticVerifier
from sdcontrol.engine.walk import VerifyTask

__all__ = ["SyntheticEngine"]


class SyntheticEngine(Engine):
    """Learns from shadows that are right at the verifier's rates, as far as the step's tokens go."""

    def _learn(self, observation: Observation) -> None:
        shadow = {arm: self._made_up(arm, observation) for arm in observation.shadow}
        super()._learn(replace(observation, shadow=shadow))

    def _made_up(self, arm: str, observation: Observation) -> tuple[int | None, ...]:
        """By request, how many of the step's tokens `arm` had foreseen; None where it was used."""
        verifier, requests = self.verifier, {r.id: r for r in self._ended}
        assert isinstance(verifier, SyntheticVerifier)
        requests.update(self.requests)
        drafts = [accepted + 1 for accepted in observation.accepted]
        tasks = [
            VerifyTask(
                requests[request.id].sampler,
                range(request.context_tokens),
                Draft.chain([0] * num_tokens),
                first_row=0,
                drafter=arm,
            )
            for request, num_tokens in zip(observation.view.requests, drafts, strict=True)
        ]
        rows = np.split(verifier.stands(tasks), np.cumsum(drafts))[:-1]
        counts = [int(np.logical_and.accumulate(row).sum()) for row in rows]
        pairs = zip(counts, observation.shadow[arm], strict=True)
        return tuple([None if by_text is None else count for count, by_text in pairs])
