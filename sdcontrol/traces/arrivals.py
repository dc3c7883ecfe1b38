"""When requests come: endless streams of arrival times, drawn one by one.

Knows seconds; nothing of what arrives. Every process is drawn from the generator that it is given.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from sdcontrol.plain_numbers import PlainNumbers

__all__ = ["Arrivals", "AtOnce", "Gamma", "OnOff", "Poisson", "Ramp"]

Rate = Annotated[float, Field(ge=1e-9, le=1e9)]
_LEAST_PER_BURST = 1e-3  # requests: rarer ones are looked for in vain


class _Process(PlainNumbers):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AtOnce(_Process):
    """Everything at the beginning."""

    kind: Literal["at_once"] = "at_once"

    def times(self, generator: np.random.Generator) -> Iterator[float]:
        """Seconds from the beginning."""
        return itertools.repeat(0.0)


class Poisson(_Process):
    """Independent requests."""

    kind: Literal["poisson"] = "poisson"
    rate_per_second: Rate

    def times(self, generator: np.random.Generator) -> Iterator[float]:
        """Seconds from the beginning."""
        now = 0.0
        while True:
            now += generator.exponential(1.0 / self.rate_per_second)
            yield now


class Gamma(_Process):
    """Gamma gaps with a coefficient of variation: 1 is Poisson, more comes in clumps."""

    kind: Literal["gamma"] = "gamma"
    rate_per_second: Rate
    cv: float = Field(ge=1e-3, le=100, description="standard deviation of the gaps over their mean")

    def times(self, generator: np.random.Generator) -> Iterator[float]:
        """Seconds from the beginning."""
        shape = 1.0 / self.cv**2
        now = 0.0
        while True:
            now += generator.gamma(shape, 1.0 / (self.rate_per_second * shape))
            yield now


class OnOff(_Process):
    """Bursts: Poisson at one rate, then at another, each for an exponential time."""

    kind: Literal["on_off"] = "on_off"
    on_rate_per_second: Rate
    off_rate_per_second: float = Field(0.0, ge=0, le=1e9)
    on_seconds: float = Field(gt=0, description="mean length of a burst")
    off_seconds: float = Field(gt=0, description="mean time between bursts")

    @model_validator(mode="after")
    def _come_at_all(self) -> Self:
        on = self.on_rate_per_second * self.on_seconds
        if on + self.off_rate_per_second * self.off_seconds < _LEAST_PER_BURST:
            raise ValueError(
                f"{on:.3g} requests come in a burst, of at least {_LEAST_PER_BURST}; raise a rate or "
                "on_seconds"
            )
        return self

    def times(self, generator: np.random.Generator) -> Iterator[float]:
        """Seconds from the beginning, which is that of a burst."""
        now, is_on = 0.0, True
        while True:
            mean, rate = (
                (self.on_seconds, self.on_rate_per_second)
                if is_on
                else (self.off_seconds, self.off_rate_per_second)
            )
            until = now + generator.exponential(mean)
            while rate and (now := now + generator.exponential(1.0 / rate)) < until:
                yield now
            now, is_on = until, not is_on


class Ramp(_Process):
    """Poisson whose rate goes in a straight line from one to the other, and stays there."""

    kind: Literal["ramp"] = "ramp"
    from_rate_per_second: Rate
    to_rate_per_second: Rate
    seconds: float = Field(gt=0, description="that the way takes")

    def times(self, generator: np.random.Generator) -> Iterator[float]:
        """Seconds from the beginning: the expected count, inverted at unit-rate arrivals."""
        expected = 0.0
        while True:
            expected += generator.exponential(1.0)
            yield self._when(expected)

    def _when(self, expected: float) -> float:
        """The time by which so many requests are expected.

        On the ramp: start t + slope t^2 / 2 = expected.
        """
        start, end = self.from_rate_per_second, self.to_rate_per_second
        on_ramp = (start + end) / 2.0 * self.seconds
        if expected >= on_ramp:
            return self.seconds + (expected - on_ramp) / end
        slope = (end - start) / self.seconds
        return 2.0 * expected / (start + math.sqrt(start**2 + 2.0 * slope * expected))


Arrivals = Annotated[AtOnce | Poisson | Gamma | OnOff | Ramp, Field(discriminator="kind")]
