"""One length for the batch that follows a running mean of what was accepted: SGLang's rule.

Knows no cost, so it cannot tell when speculation loses; the shortest candidate is its floor.
"""

from typing import Literal

from pydantic import Field, field_validator

from sdcontrol.core import BatchView, Belief, Observation, Plan
from sdcontrol.policies.rivals.one_drafter import OneDrafter, OneDrafterConfig

__all__ = ["EmaSteps", "EmaStepsConfig"]

_RATE = 0.2  # of the running mean
_WARM_UP_BATCHES = 10
_INTERVAL_BATCHES = 5
_HYSTERESIS = -0.25  # added to the threshold for a shorter length


class EmaStepsConfig(OneDrafterConfig):
    """`candidates` maps the largest batch to its lengths; the last row serves larger batches."""

    kind: Literal["ema_steps"] = "ema_steps"
    candidates: dict[int, tuple[int, ...]] = Field(
        default={8: (1, 3, 5, 7), 32: (1, 2, 3, 5), 1024: (1, 2, 3)}, min_length=1
    )
    initial_tokens: int = Field(default=3, ge=0)

    @field_validator("candidates")
    @classmethod
    def _is_sorted(cls, candidates: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        if any(not row or min(row) < 0 for row in candidates.values()):
            raise ValueError("every batch size needs draft lengths of at least 0")
        return {batch: tuple(sorted(set(row))) for batch, row in sorted(candidates.items())}

    def build(self) -> "EmaSteps":
        """The policy."""
        return EmaSteps(self.drafter, dict(self.candidates), self.initial_tokens)


class EmaSteps(OneDrafter):
    """k = clamp(round(ema) + 1) among candidates, looked at every 5 batches after the first 10.

    `ema` runs over the batch means of accepted draft tokens. A longer candidate is taken when
    round(ema) + 1 exceeds the current one, a shorter one only when `ema` lies 0.25 below the value
    at which it would have been left. `candidates` is sorted by batch size.
    """

    def __init__(
        self, drafter: str | None, candidates: dict[int, tuple[int, ...]], initial_tokens: int
    ) -> None:
        super().__init__(drafter)
        self.candidates = candidates
        self.initial_tokens = initial_tokens
        self._tokens = initial_tokens
        self._ema: float | None = None
        self._batches = 0

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        """The current length, or the nearest candidate of this batch size."""
        tokens = _nearest(self._row(len(view.requests)), self._tokens)
        return self.uniform(view, tokens, f"ema_steps: {tokens}")

    def update(self, observation: Observation) -> None:
        """Move the running mean, and every 5th batch the length."""
        pairs = zip(observation.accepted, observation.proposed, strict=True)
        accepted = [count for count, proposed in pairs if proposed]
        if not accepted:
            return
        mean = sum(accepted) / len(accepted)
        self._ema = mean if self._ema is None else (1 - _RATE) * self._ema + _RATE * mean
        self._batches += 1
        late = self._batches - _WARM_UP_BATCHES
        if late >= 0 and late % _INTERVAL_BATCHES == 0:
            self._tokens = self._moved(self._row(len(observation.view.requests)), self._ema)

    def _moved(self, row: tuple[int, ...], ema: float) -> int:
        index = row.index(_nearest(row, self._tokens))
        while index > 0 and ema <= row[index - 1] - 0.5 + _HYSTERESIS:
            index -= 1
        while index + 1 < len(row) and ema > row[index] - 0.5:
            index += 1
        return row[index]

    def _row(self, batch: int) -> tuple[int, ...]:
        rows = list(self.candidates.items())
        return next((row for most, row in rows if batch <= most), rows[-1][1])


def _nearest(row: tuple[int, ...], tokens: int) -> int:
    return min(row, key=lambda candidate: (abs(candidate - tokens), candidate))
