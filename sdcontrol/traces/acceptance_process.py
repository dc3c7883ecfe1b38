"""Acceptance drawn instead of recorded: for drafters and requests that nobody ran.

    chance of output position i, at draft position j
        rate[j], moved to the request's own level, higher in easy stretches, lower in hard ones
    accepted at i: draft tokens until the first whose uniform number lies above its chance

Everything drawn here is simulated. Knows rates; nothing of texts, drafters or time.
"""

from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from sdcontrol.core import FloatArray
from sdcontrol.outcomes import DEPTH, ArmOutcomes
from sdcontrol.plain_numbers import PlainNumbers

__all__ = ["AcceptanceProcess", "HardStretches"]

_LEAST, _MOST = 1e-6, 1.0 - 1e-6


class HardStretches(PlainNumbers):
    """A two-state Markov chain along the text: acceptance comes in runs of good and bad luck.

    In a hard stretch the rate is `factor` times the request's; in an easy one it is higher, so that
    the mean stays, as far as a rate can rise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(0.3, gt=0, lt=1, description="of the positions, on average")
    factor: float = Field(0.6, ge=0, le=1, description="of the rate in a hard stretch")
    tokens: float = Field(20.0, ge=1, description="mean length of a hard stretch")

    @property
    def easy_tokens(self) -> float:
        """Mean length of an easy stretch."""
        return self.tokens * (1.0 - self.share) / self.share

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if self.easy_tokens < 1.0:
            raise ValueError(
                f"hard stretches of {self.tokens} tokens cannot be {self.share} of the text; "
                "raise tokens or lower share"
            )
        return self

    def factors(self, generator: np.random.Generator, num_tokens: int) -> FloatArray:
        """What the rate is multiplied by, `[num_tokens]`."""
        begins_hard = bool(generator.random() < self.share)
        is_hard = np.arange(num_tokens) % 2 == (0 if begins_hard else 1)  # by stretch
        lengths = generator.geometric(1.0 / np.where(is_hard, self.tokens, self.easy_tokens))
        states = np.repeat(is_hard, lengths)[:num_tokens]
        easy = (1.0 - self.share * self.factor) / (1.0 - self.share)
        return np.where(states, self.factor, easy)


class AcceptanceProcess(PlainNumbers):
    """How a drafter fares: rates by draft position, requests that differ, stretches that differ.

    `rates[j]` is P(draft token j is accepted | those before it were); the last goes on. With a
    `concentration` c a request's own first rate is drawn from Beta(c m, c (1 - m)) of mean
    m = rates[0], and its other rates move along on the scale of log odds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rates: tuple[float, ...] = Field(min_length=1, max_length=DEPTH)
    concentration: float | None = Field(None, gt=0, description="None: requests are alike")
    hard: HardStretches | None = None
    tells_confidence: bool = Field(
        False, description="whether the drafter says the chance of each of its tokens"
    )

    @model_validator(mode="after")
    def _are_rates(self) -> Self:
        if not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ValueError("every rate is from 0 to 1")
        return self

    def outcomes(self, generator: np.random.Generator, output_tokens: int) -> ArmOutcomes:
        """One request's acceptance, up to `DEPTH` draft tokens at each position."""
        length = output_tokens + DEPTH
        rates = self._request_rates(generator)
        factors = self.hard.factors(generator, length) if self.hard else np.ones(length)
        luck = generator.random(length)
        accepted = np.zeros(output_tokens, dtype=np.uint8)
        goes_on = np.ones(output_tokens, dtype=bool)
        for place, rate in enumerate(rates):
            here = slice(place, place + output_tokens)
            goes_on &= luck[here] < rate * factors[here]
            accepted += goes_on
        confidence = None
        if self.tells_confidence:
            chances = np.minimum(rates[0] * factors[:output_tokens], 1.0)
            confidence = chances.astype(np.float32)
        return ArmOutcomes(accepted, confidence=confidence)

    def _request_rates(self, generator: np.random.Generator) -> NDArray[np.float64]:
        """`[DEPTH]`."""
        given = np.array(self.rates + self.rates[-1:] * (DEPTH - len(self.rates)))
        if self.concentration is None or not 0.0 < self.rates[0] < 1.0:
            return given
        mean, weight = self.rates[0], self.concentration
        own = generator.beta(weight * mean, weight * (1.0 - mean))
        shift = _log_odds(np.array(own)) - _log_odds(np.array(mean))
        moved: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-(_log_odds(given) + shift)))
        return moved


def _log_odds(rate: NDArray[np.float64]) -> NDArray[np.float64]:
    inside = np.clip(rate, _LEAST, _MOST)
    odds: NDArray[np.float64] = np.log(inside / (1.0 - inside))
    return odds
