"""A learned cost on today's machine: its shape at the speed of the last steps, beside the online one.

Two forecasts with different errors are better together: the learned one knows the shape before the
first step, the online one follows what the machine does. Their geometric mean is taken, and the learned
one may part from the online one by a factor of 4 at most, so that it can never be much worse. Where its
own errors say that it is not of this machine, it is not used. Knows nothing of acceptance or files.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import Cost, FloatArray, Observation
from sdcontrol.estimators.loads import draft_loads, is_plausible, verify_load
from sdcontrol.policies.learned_cost import LearnedCost

__all__ = ["MixedCost", "Speeds"]

VERIFY, OVERHEAD = "verify", "overhead"  # phases beside the families of drafters

_RATE = 0.3
_MOST_NEWS = 0.5  # log-ratio that one step counts for, after the first few
_FIRST_STEPS = 3
_MOST_RATIO = 4.0  # of the online price, and its inverse
_STRANGE_ERROR, _STRANGE_TIMES = 0.15, 2.0  # running error beyond these, of the trained one
_ERROR_RATE = 0.05


@dataclass(slots=True)
class _Level:
    """The running log-ratio of measured to learned seconds of one phase."""

    value: float = 0.0
    steps: int = 0

    def update(self, log_ratio: float) -> None:
        self.steps += 1
        news = log_ratio - self.value
        if self.steps > _FIRST_STEPS:
            news = min(max(news, -_MOST_NEWS), _MOST_NEWS)
        self.value += max(1.0 / self.steps, _RATE) * news


@dataclass(slots=True)
class Speeds:
    """How fast the machine runs each phase now, compared with the training runs."""

    learned: LearnedCost
    typical_error: float  # mean absolute log error of held-out steps
    _levels: dict[str, _Level] = field(default_factory=dict)
    _error: float = 0.0

    @property
    def is_strange(self) -> bool:
        """Whether steps have been further from the learned shape than the training's ever were."""
        return self._error > max(_STRANGE_ERROR, _STRANGE_TIMES * self.typical_error)

    @property
    def is_measured(self) -> bool:
        """Whether any step was seen."""
        return VERIFY in self._levels

    def update(self, observation: Observation) -> float:
        """Compare a step with what was learnt: the log-ratio of its forward to the forecast.

        What is not a positive finite number is left out.
        """
        view, timing = observation.view, observation.timing
        if not view.requests:
            return 0.0
        is_first = not self.is_measured
        expected = self.learned.of_verification(verify_load(observation))
        surprise = self._compare(VERIFY, timing.verify_seconds, expected)
        if not is_first:
            self._error += _ERROR_RATE * (min(abs(surprise), 1.0) - self._error)
        rest = timing.overhead_seconds + timing.controller_seconds
        self._compare(OVERHEAD, rest, self.learned.overhead)
        for family, load in draft_loads(observation).items():
            seconds = timing.draft_seconds.get(family)
            if seconds is not None and family in self.learned.rounds:
                self._compare(family, seconds, self.learned.of_drafting(family, load))
        return surprise

    def _compare(self, phase: str, seconds: float, expected: float) -> float:
        """Learn from one phase; the log-ratio to what was expected of it."""
        if not (is_plausible(seconds) and expected > 0.0):
            return 0.0
        level = self._levels.setdefault(phase, _Level())
        log_ratio = math.log(seconds / expected)
        surprise = log_ratio - level.value
        level.update(log_ratio)
        return surprise

    def ratio(self, phase: str) -> float:
        """Seconds now per second learnt; that of verification for a phase not yet seen."""
        level = self._levels.get(phase) or self._levels.get(VERIFY)
        return math.exp(level.value) if level is not None else 1.0

    def with_online(self, online: Cost) -> "MixedCost":
        """What a step costs now. Before the first step the online cost has nothing to say."""
        return MixedCost(self, online, is_alone=not self.is_measured)


@dataclass(frozen=True, slots=True)
class MixedCost:
    """A `Cost`: per phase the geometric mean of online and learned; monotone where both are.

    `is_alone`: the learned one only.
    """

    speeds: Speeds
    online: Cost
    is_alone: bool

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One forward of the target."""
        online = self.online.verify_seconds(num_tokens, kv_tokens, num_requests)
        learned = self.speeds.learned.verify_seconds(num_tokens, kv_tokens, num_requests)
        return self._mixed(VERIFY, online, learned)

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round; the online price for a family that was not learnt."""
        online = self.online.draft_seconds(family, num_requests, kv_tokens)
        if family not in self.speeds.learned.rounds:
            return online
        learned = self.speeds.learned.draft_seconds(family, num_requests, kv_tokens)
        return self._mixed(family, online, learned)

    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        """To compute what a drafter's cache lacks."""
        price = getattr(self.online, "catch_up_seconds", None)
        online = float(price(family, num_tokens)) if price is not None else 0.0
        if family not in self.speeds.learned.rounds:
            return online
        learned = self.speeds.learned.catch_up_seconds(family, num_tokens)
        return self._mixed_number(online, learned * self.speeds.ratio(family))

    def overhead_seconds(self) -> float:
        """The rest of a step."""
        learned = self.speeds.learned.overhead * self.speeds.ratio(OVERHEAD)
        return self._mixed_number(self.online.overhead_seconds(), learned)

    def _mixed(self, phase: str, online: FloatArray, learned: FloatArray) -> FloatArray:
        ratio = self.speeds.ratio(phase)
        if self.is_alone:
            return np.asarray(learned * ratio)
        shape = np.shape(online)
        return _means(np.ravel(online), np.ravel(learned), ratio).reshape(shape)

    def _mixed_number(self, online: float, learned: float) -> float:
        if self.is_alone:
            return learned
        bounded = min(max(learned, online / _MOST_RATIO), online * _MOST_RATIO)
        return math.sqrt(online * bounded)


@compiled("float64[::1](float64[::1], float64[::1], float64)")
def _means(online: FloatArray, learned: FloatArray, ratio: float) -> FloatArray:
    """Geometric means of `online` and the bounded `ratio * learned`."""
    means = np.empty(len(online))
    for i in range(len(online)):
        low, high = online[i] / _MOST_RATIO, online[i] * _MOST_RATIO
        means[i] = math.sqrt(online[i] * min(max(ratio * learned[i], low), high))
    return means
