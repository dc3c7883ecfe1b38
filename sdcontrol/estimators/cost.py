"""What a step costs, corrected online by what steps did cost.

Knows nothing of acceptance or of plans' merits. The target's forward is learnt in `forward`, the
drafting rounds of each family in `rounds`, from what is `assumed` of them; here they become one `Cost`,
compared with every step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from sdcontrol.core import Cost, FloatArray, Observation
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.assumed import AssumedRounds
from sdcontrol.estimators.elementwise import of_each
from sdcontrol.estimators.forward import LearntForward
from sdcontrol.estimators.loads import (
    DraftLoad,
    VerifyLoad,
    draft_loads,
    is_plausible,
    latest_drafting,
    measured_loads,
    verify_load,
)
from sdcontrol.estimators.overhead import LearntOverhead, Overheads
from sdcontrol.estimators.price import StepTerms
from sdcontrol.estimators.regime import Regime
from sdcontrol.estimators.rounds import LearntRounds, RoundPrice
from sdcontrol.estimators.uninformed import UninformedCost
from sdcontrol.logs import EventLog

__all__ = ["OnlineCost", "Prediction"]

_log = EventLog(__name__)

_UNSEEN_SECONDS = 1e-6  # what a clock too coarse to see it may have taken
_DRIFT_RATE = 0.1
_DRIFT_LIMIT = 0.2  # running log-ratio of measured to predicted that is called a drift
_LONG_CATCH_UP = 1024  # tokens; shorter ones are priced along the line from 1 token to here


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step was expected to take, and what it took."""

    predicted_seconds: float
    measured_seconds: float

    @property
    def log_error(self) -> float:
        """Log-ratio of measured to predicted."""
        return math.log(self.measured_seconds / self.predicted_seconds)


class OnlineCost:
    """A `Cost` that starts from `prior` and follows the measured steps; see `pad_to` for edges.

    Without a prior `catch_up_shares` may say what a token that a drafter's cache lacks takes, of the target's.
    """

    def __init__(
        self,
        prior: Cost | None = None,
        token_edges: Sequence[int] = (),
        catch_up_shares: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._prior: Cost = prior if prior is not None else UninformedCost()
        self._forward = LearntForward(self._prior)
        self.pad_to(token_edges)
        self._rounds: dict[str, LearntRounds] = {}
        self._assumed = AssumedRounds(prior, self._forward, catch_up_shares)
        self._overhead = LearntOverhead()
        self.last_prediction: Prediction | None = None
        self._lines: dict[tuple[str, ...], FloatArray] = {}
        self._judged: Sequence[Observation] | None = None
        # Steps whose drafting is to be learnt from, and the speed before their forwards were.
        self._measured: tuple[Sequence[Observation], float] | None = None
        self._drafts: tuple[Observation, dict[str, DraftLoad]] | None = None  # that was judged last
        self._regime = Regime()
        self.drift = 0.0  # running log-ratio of measured to predicted step time

    def pad_to(self, token_edges: Sequence[int]) -> None:
        """The sizes to which the engine pads the tokens of a forward: up to the next edge they are free.

        Raises `ConfigError` for one below 1.
        """
        if not all(edge >= 1 for edge in token_edges):
            raise ConfigError(f"token_edges are {list(token_edges)}; each must be at least 1")
        self._forward.pad_to(token_edges)

    @property
    def share_of_drafting(self) -> float:
        """What a step with drafts takes more beside forward and drafting, of a forward."""
        return self._overhead.share

    def hide_plain_steps(self) -> None:
        """Take steps without drafts to cost nothing beside their forwards, until that was measured."""
        self._overhead.is_hidden = True

    @property
    def is_drifting(self) -> bool:
        """Whether steps have been taking longer or shorter than predicted for a while."""
        return abs(self.drift) > _DRIFT_LIMIT

    # prices

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One target forward; positive, non-decreasing in tokens and in KV tokens.

        Tokens are spread evenly over the requests, and so is padding.
        """
        tokens, kv = np.asarray(num_tokens, dtype=float), np.asarray(kv_tokens, dtype=float)
        if kv.ndim == np.ndim(num_requests) == 0:
            return self._forward.seconds(tokens, float(kv), num_requests)
        tokens, kv, requests = np.broadcast_arrays(tokens, kv, num_requests)
        seconds = np.empty(tokens.shape)
        for value, count in {*zip(kv.flat, requests.flat, strict=True)}:
            rows = (kv == value) & (requests == count)
            seconds[rows] = self._forward.seconds(tokens[rows], float(value), int(count))
        return seconds

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round of a family; 0 for a family without a forward, until measured."""
        return self._round_price(family).seconds(num_requests, kv_tokens)

    @of_each
    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        """Seconds to compute `num_tokens` that a drafter's cache lacks."""
        if num_tokens <= 0:
            return 0.0
        rounds = self._rounds.get(family)
        each = None if rounds is None else rounds.per_caught_up_token
        assumed = self._assumed.catch_up_seconds(family, num_tokens, each)
        return assumed if rounds is None else rounds.catch_up_seconds(assumed)

    def overhead_seconds(self) -> float:
        """What a step costs beside its forwards: the engine's own work and the controller's.

        Of a typical step: what an arrival costs once is no reason to draft more in the next steps.
        """
        typical = self._overhead.typical
        return self._prior.overhead_seconds() if typical is None else typical

    def overheads(self) -> Overheads:
        """See `price.overheads_of`."""
        typical = self.overhead_seconds()
        return self._overhead.by_kind or Overheads(typical, typical)

    def waited_seconds(self) -> float:
        """What a step without drafts costs beside its forward where it is not launched ahead, if `overheads` differ."""
        return self._overhead.waited

    def step_table(
        self, first_tokens: int, most_draft_tokens: int, kv_tokens: float, num_requests: int
    ) -> FloatArray:
        """See `price.TabledCost`."""
        beside = self.overhead_seconds()
        return self._forward.table(first_tokens, most_draft_tokens, kv_tokens, num_requests, beside)

    def terms(self, kv_tokens: float, num_requests: int, families: tuple[str, ...]) -> StepTerms:
        """See `price.TermedCost`."""
        forward = self._forward
        pricing = forward.pricing(kv_tokens, num_requests)
        padding, lines = forward.padding_seconds(kv_tokens), self.lines(families)
        return StepTerms(pricing, forward.edges, self.overheads(), padding, lines)

    def padding_seconds(self, kv_tokens: float) -> float:
        """See `price.TabledCost`."""
        return self._forward.padding_seconds(kv_tokens)

    def lines(self, families: tuple[str, ...]) -> FloatArray:
        """See `price.TabledCost`; kept until the next measurement."""
        lines = self._lines.get(families)
        if lines is None:
            rows = [self._line(family) for family in families]
            lines = self._lines[families] = np.array(rows).reshape(len(rows), 5)
        return lines

    def _line(self, family: str) -> tuple[float, float, float, float, float]:
        price = self._round_price(family)
        one, many = self.catch_up_seconds(family, 1), self.catch_up_seconds(family, _LONG_CATCH_UP)
        each = (many - one) / (_LONG_CATCH_UP - 1)
        return price.constant, price.per_request, price.per_kv_token, one - each, each

    # measurements

    def update(self, observation: Observation) -> None:
        """Learn from one step's timing. What is not a positive finite number is left out.

        A step without a time of verification, which an engine that prepared something in it may
        report, teaches nothing.
        """
        self.judge((observation,), observation)
        self.learn()

    def judge(self, steps: Sequence[Observation], one: Observation) -> None:
        """The first part of learning from steps: compare one of them, a typical one, with what was expected of it."""
        is_timed = bool(one.view.requests) and is_plausible(one.timing.verify_seconds)
        self._judged = steps
        if not is_timed:
            return
        load, drafts = verify_load(one), draft_loads(one)
        self._drafts = one, drafts
        expected = self._forward.seconds_of(load)
        self._compare(one, expected + self._beside(drafts))
        self._learn_overhead(one)
        self._judge_regime(load, expected, one.view.step)

    def learn(self) -> None:
        """Learn from the steps that were judged last, once: their forwards, then rounds."""
        self.learn_forwards()
        self.learn_rounds()

    def learn_forwards(self) -> None:
        """The second part: learn what the forwards of the steps that were judged last took."""
        if self._judged is None:
            return
        self.learn_rounds()  # of those before, if that is still to be done
        steps, self._judged = self._judged, None
        self._assumed.forget()
        self._lines.clear()
        self._measured = steps, self._forward.speed
        if self._forward.learn(measured_loads(steps)):
            _log.info("speed_changed", step=steps[-1].view.step, speed=self._forward.speed)

    def learn_rounds(self) -> None:
        """The last part: let rounds follow the forwards' speed, and learn what each family's last ones took."""
        if self._measured is None:
            return
        (steps, before), self._measured = self._measured, None
        self._lines.clear()
        speed = self._forward.speed
        if speed != before:
            for rounds in self._rounds.values():  # those that are off are not measured
                rounds.rescale(speed / before)
        for family, (draft, seconds) in latest_drafting(steps, self._drafts).items():
            if is_plausible(taken := seconds or _UNSEEN_SECONDS):
                self._learn_rounds(family, draft, taken)

    def _beside(self, drafts: dict[str, DraftLoad]) -> float:
        """What is expected of a step beside its forward."""
        plain, drafting = self.overheads()
        seconds = drafting if drafts else plain
        for family, draft in drafts.items():
            seconds += self._round_price(family).seconds_of(draft)
            seconds += self.catch_up_seconds(family, draft.catch_up_tokens)
        return seconds

    def _compare(self, observation: Observation, predicted: float) -> None:
        """Compare the step with its prediction, before learning from it."""
        measured = observation.timing.total_seconds
        if not (self._forward.is_measured and is_plausible(measured) and predicted > 0.0):
            return
        self.last_prediction = Prediction(predicted, float(measured))
        was_drifting = self.is_drifting
        error = min(max(self.last_prediction.log_error, -1.0), 1.0)
        self.drift += _DRIFT_RATE * (error - self.drift)
        if self.is_drifting and not was_drifting:
            _log.info("cost_drifted", drift=round(self.drift, 3), step=observation.view.step)

    def _judge_regime(self, load: VerifyLoad, seconds: float, step: int) -> None:
        """Say so when forwards, of which this one is expected to take `seconds`, become bound otherwise."""
        regime = self._regime
        if regime.judge(seconds, self._forward.seconds_of(load, times=2)):
            _log.info("regime_changed", regime=regime.bound, reason=regime.reason, step=step)

    def _learn_rounds(self, family: str, load: DraftLoad, seconds: float) -> None:
        assumed = self._assumed
        if family not in self._rounds:
            each = assumed.per_caught_up_token(family)
            self._rounds[family] = LearntRounds(assumed.price(family), each, load)
        rounds = self._rounds[family]
        each = rounds.per_caught_up_token
        catch_up = assumed.catch_up_seconds(family, load.catch_up_tokens, each)
        rounds.update(load, catch_up, seconds)

    def _learn_overhead(self, observation: Observation) -> None:
        timing = observation.timing
        seconds = timing.overhead_seconds + timing.controller_seconds
        if is_plausible(seconds):
            self._overhead.update(
                seconds,
                timing.verify_seconds,
                len(observation.view.requests),
                drafts=any(observation.drafted),
                is_ahead=observation.launched_ahead,
            )

    def _round_price(self, family: str) -> RoundPrice:
        rounds = self._rounds.get(family)
        return self._assumed.price(family) if rounds is None else rounds.price
