"""One length for the batch that follows a running mean of what was accepted: SGLang's rule.

Knows no cost, so it cannot tell when speculation loses; the shortest candidate is its floor. That system's
own table now has (0, 1, 3) from 8 requests on, (0, 1) from 32 and 0 from 64: give it as `candidates`.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from sdcontrol.core import BatchView, Belief, Observation, Plan
from sdcontrol.policies.rivals.one_drafter import CandidatesConfig, OneDrafter

__all__ = ["EmaSteps", "EmaStepsConfig"]

_RATE = 0.2  # of the running mean
_WARM_UP_BATCHES = 10
_INTERVAL_BATCHES = 5
_HYSTERESIS = -0.25  # added to the threshold for a shorter length


class EmaStepsConfig(CandidatesConfig):
    """`candidates` maps the largest batch to its lengths; the last row serves larger batches."""

    kind: Literal["ema_steps"] = "ema_steps"
    candidates: dict[int, tuple[int, ...]] = Field(
        default={8: (1, 3, 5, 7), 32: (1, 2, 3, 5), 1024: (1, 2, 3)}, min_length=1
    )
    initial_tokens: int = Field(default=3, ge=0)

    def build(self) -> "EmaSteps":
        """The policy."""
        return EmaSteps(self.drafter, dict(self.candidates), self.initial_tokens)


@dataclass(slots=True)
class _Row:
    """The candidates of some batch sizes, and what batches of those sizes have taught."""

    most: int  # requests
    lengths: tuple[int, ...]
    tokens: int  # the present one of `lengths`
    ema: float  # of the batch means of accepted draft tokens; one less than `tokens` at first
    num_batches: int = 0

    def move(self) -> None:
        """Take another length, if it is time: the next one where nothing is drafted, to look again."""
        late = self.num_batches - _WARM_UP_BATCHES
        if late <= 0 or late % _INTERVAL_BATCHES:
            return
        if self.tokens or len(self.lengths) == 1:
            self.tokens = _moved(self.lengths, self.tokens, self.ema)
            return
        self.tokens = self.lengths[1]
        if self.ema < 0.0:  # it never drafted
            self.ema = self.tokens - 1.0


class EmaSteps(OneDrafter):
    """k = clamp(round(ema) + 1) among candidates, looked at every 5 batches after the first 10.

    `ema` runs over the batch means of accepted draft tokens. A longer candidate is taken when
    round(ema) + 1 exceeds the current one, a shorter one only when `ema` lies 0.25 below the value
    at which it would have been left. Each row of `candidates`, which is sorted by batch size, has a
    mean and a length of its own. A candidate of 0 is left again after 5 batches.
    """

    uses_belief = False

    def __init__(
        self, drafter: str | None, candidates: dict[int, tuple[int, ...]], initial_tokens: int
    ) -> None:
        super().__init__(drafter)
        self.candidates = candidates
        self.initial_tokens = initial_tokens
        self._rows = [
            _Row(most, lengths, tokens := _nearest(lengths, initial_tokens), tokens - 1.0)
            for most, lengths in candidates.items()
        ]

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The current length of this batch size."""
        tokens = self._row(len(view.requests)).tokens
        return self.uniform(view, tokens, f"ema_steps: {tokens}")

    def update(self, observation: Observation) -> None:
        """Move the running mean, and every 5th batch the length."""
        row = self._row(len(observation.view.requests))
        pairs = zip(observation.accepted, observation.proposed, strict=True)
        accepted = [count for count, proposed in pairs if proposed]
        if accepted:
            row.ema = (1 - _RATE) * row.ema + _RATE * sum(accepted) / len(accepted)
        elif row.tokens or not observation.view.requests:  # nobody could draft: it says nothing
            return
        row.num_batches += 1
        row.move()

    def _row(self, batch: int) -> _Row:
        return next((row for row in self._rows if batch <= row.most), self._rows[-1])


def _moved(lengths: tuple[int, ...], tokens: int, ema: float) -> int:
    """The candidate that `ema` calls for, coming from `tokens`."""
    index = lengths.index(tokens)
    while index > 0 and ema <= max(lengths[index - 1] - 0.5, 0.5) + _HYSTERESIS:
        index -= 1
    while index + 1 < len(lengths) and ema > max(lengths[index] - 0.5, 0.5):
        index += 1
    return lengths[index]


def _nearest(lengths: tuple[int, ...], tokens: int) -> int:
    return min(lengths, key=lambda candidate: (abs(candidate - tokens), candidate))
