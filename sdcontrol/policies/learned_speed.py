"""A learned cost on today's machine: its shape at the speed of the last steps, beside the online one.

Two forecasts with different errors are better together: the learned one knows the shape before the
first step, the online one follows what the machine does. Their geometric mean is taken, in which that
counts for more which was nearer of late. The learned one may part from the online one by a factor of 4 at
most, so that it can never be much worse; of padding to the longest draft, which the online one may not know
at all, the arithmetic mean without a bound. Where its own errors say that it is not of this machine, it is
not used. Knows nothing of acceptance or files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sdcontrol.core import BatchView, Cost, FloatArray, Observation
from sdcontrol.estimators.elementwise import of_each
from sdcontrol.estimators.loads import draft_loads, is_plausible, verify_load
from sdcontrol.estimators.overhead import Overheads
from sdcontrol.estimators.price import (
    StepTerms,
    TermedCost,
    even_draft,
    has_terms,
    overheads_of,
    padding_seconds,
    waited_of,
)
from sdcontrol.estimators.pricing import tabled
from sdcontrol.policies.learned_cost import LearnedCost
from sdcontrol.policies.learned_mixing import as_they_are, mean, means, mixed_lines, on_grid

__all__ = ["MixedCost", "Speeds", "TermedMix"]

VERIFY, OVERHEAD = "verify", "overhead"  # phases beside the families of drafters

_RATE = 0.5  # times of neighbouring steps are alike
_MOST_NEWS = 0.5  # log-ratio that one step counts for, after the first few
_FIRST_STEPS = 3
_STRANGE_ERROR, _STRANGE_TIMES = 0.15, 2.0  # running error beyond these, of the trained one
_ERROR_RATE = 0.05
_FIRST_ERROR = 0.05  # of both forecasts of a step: log-ratio to what was measured
_FORECAST_RATE, _MOST_ERROR = 0.1, 0.5
_SHARPNESS = 3.0  # power of the errors by which forecasts weigh


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
    _own_error: float = _FIRST_ERROR  # running, of a step's forecast
    _online_error: float = _FIRST_ERROR
    _heard: object = None  # the online cost's last prediction
    _lines: dict[tuple[str, ...], FloatArray] = field(default_factory=dict)

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
        self._lines.clear()
        is_first, learned = not self.is_measured, self.learned
        verified = learned.of_verification(verify_load(observation))
        rest = timing.overhead_seconds + timing.controller_seconds
        phases = [(VERIFY, timing.verify_seconds, verified), (OVERHEAD, rest, learned.overhead)]
        for family, load in draft_loads(observation).items():
            seconds = timing.draft_seconds.get(family)
            if seconds is not None and family in learned.rounds:
                phases.append((family, seconds, learned.of_drafting(family, load)))
        if not is_first:
            self._judge(phases)
        surprise, *_ = [self._compare(*phase) for phase in phases]
        if not is_first:
            self._error += _ERROR_RATE * (min(abs(surprise), 1.0) - self._error)
        return surprise

    @property
    def weight(self) -> float:
        """Of the learned forecast beside the online one, 0 to 1: as near as each was of late."""
        own, online = self._own_error**_SHARPNESS, self._online_error**_SHARPNESS
        return online / (own + online) if own + online > 0.0 else 0.5

    def hear(self, online: Cost) -> None:
        """Take note of how near the online cost's last prediction was, if it is a new one."""
        said = getattr(online, "last_prediction", None)
        if said is not None and said is not self._heard:
            self._heard = said
            self._online_error = _nearer(self._online_error, said.log_error)

    def _judge(self, phases: Sequence[tuple[str, float, float]]) -> None:
        """How near the forecast of a step's learnt phases was, before anything is learnt from it."""
        measured = sum([seconds for _, seconds, _ in phases])
        expected = sum([self.ratio(phase) * usual for phase, _, usual in phases])
        if is_plausible(measured) and expected > 0.0:
            self._own_error = _nearer(self._own_error, math.log(measured / expected))

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

    def lines(self, families: tuple[str, ...]) -> FloatArray:
        """As `TabledCost.lines`, at today's speed; NaN for families that were not learnt."""
        lines = self._lines.get(families)
        if lines is None:
            lines = self._lines[families] = np.full((len(families), 5), np.nan)
            for line, family in zip(lines, families, strict=True):
                if family in self.learned.rounds:
                    base, each, per_kv, catch_up = self.learned.rounds[family].tolist()
                    line[:] = base, each, per_kv, 0.0, catch_up
                    line *= self.ratio(family)
        return lines

    def with_online(self, online: Cost, view: BatchView) -> "MixedCost":
        """What a step costs now. Before the first step the online cost has nothing to say."""
        self.hear(online)
        if not self.is_measured:
            return MixedCost(self, online, is_alone=True)
        if not has_terms(online):
            return MixedCost(self, online)
        kv_tokens = sum([request.context_tokens for request in view.requests])
        return TermedMix(self, online, load=(float(kv_tokens), len(view.requests)))


@dataclass(frozen=True, slots=True)
class MixedCost:
    """A `Cost`: per phase the geometric mean of online and learned; monotone where both are.

    `is_alone`: the learned one only.
    """

    speeds: Speeds
    online: Cost
    is_alone: bool = False

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One forward of the target, of tokens that are spread evenly over the requests."""
        even, kv = even_draft(num_tokens, num_requests), np.asarray(kv_tokens, float)
        per_kv = padding_seconds(self.online, 1.0)
        online = self.online.verify_seconds(num_tokens, kv, num_requests) - even * per_kv * kv
        learned = self.speeds.learned.unpadded_seconds(num_tokens, kv, num_requests)
        padding = even * self.padding_seconds(1.0) * kv
        return np.asarray(self._mixed(VERIFY, online, learned) + padding)

    def padding_seconds(self, kv_tokens: float) -> float:
        """What a token more of the longest draft adds: the arithmetic mean, by weight.

        One may count as padding what the other counts as tokens; so the parts of a forward still add up.
        """
        learned = self.speeds.learned.padding_seconds(kv_tokens) * self.speeds.ratio(VERIFY)
        if self.is_alone:
            return learned
        online = padding_seconds(self.online, kv_tokens)
        return online + self.speeds.weight * (learned - online)

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round; the online price for a family that was not learnt."""
        online = self.online.draft_seconds(family, num_requests, kv_tokens)
        if family not in self.speeds.learned.rounds:
            return online
        learned = self.speeds.learned.draft_seconds(family, num_requests, kv_tokens)
        return self._mixed(family, online, learned)

    @of_each
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

    def overheads(self) -> Overheads:
        """The same by kind, told apart as the online cost tells them."""
        more = self.overhead_seconds() - self.online.overhead_seconds()
        return Overheads(*[kind + more for kind in overheads_of(self.online)])

    def waited_seconds(self) -> float:
        """See `price.waited_of`."""
        return waited_of(self.online) + self.overhead_seconds() - self.online.overhead_seconds()

    def _mixed(self, phase: str, online: FloatArray, learned: FloatArray) -> FloatArray:
        ratio = self.speeds.ratio(phase)
        if self.is_alone:
            return np.asarray(learned * ratio)
        shape = np.shape(online)
        today = ratio, self.speeds.weight
        return means(np.ravel(online), np.ravel(learned), today).reshape(shape)

    def _mixed_number(self, online: float, learned: float) -> float:
        if self.is_alone:
            return learned
        return mean(online, learned, self.speeds.weight)


@dataclass(frozen=True, slots=True)
class TermedMix(MixedCost):
    """The same beside a `TermedCost`, as one; lines are means at `load`."""

    load: tuple[float, int] = (0.0, 1)  # KV tokens, requests

    def terms(self, kv_tokens: float, num_requests: int, families: tuple[str, ...]) -> StepTerms:
        """See `price.TermedCost`."""
        online = self._termed.terms(kv_tokens, num_requests, families)
        speeds, learned = self.speeds, self.speeds.learned
        today = speeds.ratio(VERIFY), speeds.weight
        load, shape = (float(kv_tokens), num_requests), (learned.knots, learned.verify, today)
        seconds = on_grid(*online.pricing, load, shape)
        pricing = as_they_are(online.pricing[0][0], seconds)
        return StepTerms(
            pricing,
            online.edges,
            self.overheads(),
            self.padding_seconds(kv_tokens),
            self._mixed_lines(online.lines, families),
        )

    def step_table(
        self, first_tokens: int, most_draft_tokens: int, kv_tokens: float, num_requests: int
    ) -> FloatArray:
        """See `price.TabledCost`."""
        terms = self.terms(kv_tokens, num_requests, ())
        load = float(kv_tokens), float(num_requests)
        asked = terms.edges, float(first_tokens), most_draft_tokens, self.overhead_seconds()
        table: FloatArray = tabled(*terms.pricing, load, asked)[0]
        return table

    def lines(self, families: tuple[str, ...]) -> FloatArray:
        """See `price.TabledCost`."""
        return self._mixed_lines(self._termed.lines(families), families)

    @property
    def _termed(self) -> TermedCost:
        assert has_terms(self.online)
        return self.online

    def _mixed_lines(self, online: FloatArray, families: tuple[str, ...]) -> FloatArray:
        speeds = self.speeds
        lines: FloatArray = mixed_lines(online, speeds.lines(families), self.load, speeds.weight)
        return lines


def _nearer(running: float, log_error: float) -> float:
    """A running error after another one."""
    if not math.isfinite(log_error):
        return running
    return running + _FORECAST_RATE * (min(abs(log_error), _MOST_ERROR) - running)
