"""What a step costs, corrected online by what steps did cost.

Knows nothing of acceptance or of plans' merits. A verification over T tokens, V KV tokens and B
requests is priced as

    c0 prior(T, V, B) + c1 + c2 T + c3 V + c4 B + c5 T V / B + staircase(T)

with non-negative coefficients (attention does T / B queries over V keys each: its arithmetic), and a
running correction per number of tokens for what is not linear. Prices never fall with tokens or KV.
A drafting round is priced per family as `c0 prior + c1 + c2 B + c3 V`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from sdcontrol.core import Cost, FloatArray, Observation
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.loads import DraftLoad, draft_loads, verify_load
from sdcontrol.estimators.regression import OnlineRegression
from sdcontrol.estimators.staircase import Staircase, token_grid

__all__ = ["OnlineCost", "Prediction", "UninformedCost"]

_log = structlog.get_logger(__name__)

_FREE_FAMILIES = frozenset({"ngram"})  # no forward: until measured, their rounds cost nothing
_DRAFT_SHARE = 0.2  # of a target's forward, that an unmeasured draft model's takes
_VERIFY_SPREAD = np.array([0.5, 0.5, 0.5, 0.5, 0.2, 0.3])
_DRAFT_SPREAD = np.array([0.5, 0.5, 0.3, 0.3, 0.3])
_DRIFT_RATE = 0.1
_DRIFT_LIMIT = 0.2  # running log-ratio of measured to predicted that is called a drift
_OVERHEAD_RATE = 0.05


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step was expected to take, and what it took."""

    predicted_seconds: float
    measured_seconds: float


class UninformedCost:
    """A cost that assumes no model and no machine: only its shape means anything."""

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """A constant, and a little per token and per KV token."""
        tokens, kv = np.asarray(num_tokens), np.asarray(kv_tokens)
        return np.asarray(1e-2 * (1.0 + tokens / 48.0 + kv / 6e4))

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """A share of a forward over one token per request; nothing for an n-gram look-up."""
        return _share(family) * self.verify_seconds(num_requests, kv_tokens, 1)

    def overhead_seconds(self) -> float:
        """Nothing beside the forwards."""
        return 0.0


class OnlineCost:
    """A `Cost` that starts from `prior` and follows the measured steps.

    `token_edges` are the sizes to which the engine pads the tokens of a forward (graph buckets):
    tokens up to the next edge are free.
    """

    def __init__(self, prior: Cost | None = None, token_edges: Sequence[int] = ()) -> None:
        if any(edge < 1 for edge in token_edges):
            raise ConfigError(f"token_edges are {list(token_edges)}; each must be at least 1")
        self._is_informed = prior is not None
        self._prior: Cost = prior if prior is not None else UninformedCost()
        self._edges: FloatArray = np.array(sorted(token_edges), dtype=float)
        self._grid: FloatArray = token_grid()
        self._stairs = Staircase(self._grid)
        self._verify: OnlineRegression | None = None
        self._drafts: dict[str, OnlineRegression] = {}
        self._overhead: float | None = None
        self._table: tuple[float, int, FloatArray] | None = None
        self.last_prediction: Prediction | None = None
        self.drift = 0.0

    @property
    def is_drifting(self) -> bool:
        """Whether steps have been taking longer or shorter than predicted for a while."""
        return abs(self.drift) > _DRIFT_LIMIT

    # prices

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One target forward; positive, non-decreasing in tokens and in KV tokens."""
        tokens, kv = np.asarray(num_tokens, dtype=float), np.asarray(kv_tokens, dtype=float)
        if kv.ndim == 0:
            return self._look_up(tokens, self._verify_table(float(kv), num_requests))
        tokens, kv = np.broadcast_arrays(tokens, kv)
        seconds = np.empty(tokens.shape)
        for value in np.unique(kv):
            rows = kv == value
            table = self._verify_table(float(value), num_requests)
            seconds[rows] = self._look_up(tokens[rows], table)
        return seconds

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round of a family; 0 for a family without a forward, until measured."""
        count, kv = np.asarray(num_requests, dtype=float), np.asarray(kv_tokens, dtype=float)
        prior = self._unmeasured_draft(family, count, kv)
        regression = self._drafts.get(family)
        if regression is None:
            return prior
        weights = regression.coefficients
        return np.asarray(weights[0] * prior + weights[1] + weights[2] * count + weights[3] * kv)

    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        """Seconds to compute `num_tokens` that a drafter's cache lacks."""
        if num_tokens <= 0:
            return 0.0
        regression = self._drafts.get(family)
        per_unit = 1.0 if regression is None else float(regression.coefficients[4])
        return per_unit * self._unmeasured_catch_up(family, num_tokens)

    def overhead_seconds(self) -> float:
        """What a step costs beside its forwards: the engine's own work and the controller's."""
        return self._prior.overhead_seconds() if self._overhead is None else self._overhead

    def step_seconds(self, observation: Observation) -> float:
        """What this step should have taken, by the current prices."""
        load = verify_load(observation)
        forward = self.verify_seconds(load.num_tokens, load.kv_tokens, load.num_requests)
        drafting = sum(
            float(self._draft_features(family, draft)[:4] @ self._draft_weights(family))
            + self.catch_up_seconds(family, draft.catch_up_tokens)
            for family, draft in draft_loads(observation).items()
        )
        return float(forward) + drafting + self.overhead_seconds()

    # measurements

    def update(self, observation: Observation) -> None:
        """Learn from one step's timing. What is not a positive finite number is left out."""
        if not observation.view.requests:
            return
        self._judge(observation)
        self._learn_verify(observation)
        for family, load in draft_loads(observation).items():
            seconds = observation.timing.draft_seconds.get(family)
            if seconds is not None:
                self._learn_draft(family, load, seconds)
        self._learn_overhead(observation)
        self._table = None

    def _judge(self, observation: Observation) -> None:
        """Compare the step with its prediction, before learning from it."""
        measured = observation.timing.total_seconds
        predicted = self.step_seconds(observation)
        if self._verify is None or not (0.0 < measured < math.inf and predicted > 0.0):
            return
        self.last_prediction = Prediction(predicted, measured)
        was_drifting = self.is_drifting
        error = min(max(math.log(measured / predicted), -1.0), 1.0)
        self.drift += _DRIFT_RATE * (error - self.drift)
        if self.is_drifting and not was_drifting:
            _log.info("cost_drifted", drift=round(self.drift, 3), step=observation.view.step)

    def _learn_verify(self, observation: Observation) -> None:
        load = verify_load(observation)
        tokens = self._padded(np.asarray(float(load.num_tokens)))
        kv, requests = np.asarray(float(load.kv_tokens)), np.asarray(float(load.num_requests))
        features = np.array([float(f) for f in self._features(tokens, kv, requests)])
        if self._verify is None:
            self._verify = OnlineRegression(features, np.eye(6)[0], _VERIFY_SPREAD)
        seconds = observation.timing.verify_seconds
        if self._verify.update(features, seconds):
            self._stairs.forget()
            _log.info("speed_changed", step=observation.view.step, seconds=seconds)
        elif 0.0 < seconds < math.inf:
            expected = self._verify.predict(features)
            residual = min(max(seconds - expected, -0.5 * expected), 0.5 * expected)
            self._stairs.update(float(tokens), residual / self._verify.scale)

    def _learn_draft(self, family: str, load: DraftLoad, seconds: float) -> None:
        features = self._draft_features(family, load)
        if family not in self._drafts:
            is_priced = features[0] > 0.0
            units = np.append(features[:4], features[0] if is_priced else 1.0)
            prior = np.array([1.0, 0.0, 0.0, 0.0, 1.0] if is_priced else [0.0, 1.0, 0.0, 0.0, 0.0])
            self._drafts[family] = OnlineRegression(units, prior, _DRAFT_SPREAD)
        self._drafts[family].update(features, seconds)

    def _learn_overhead(self, observation: Observation) -> None:
        timing = observation.timing
        seconds = timing.overhead_seconds + timing.controller_seconds
        if not 0.0 <= seconds < math.inf:
            return
        if self._overhead is None:
            self._overhead = seconds
        likely = min(seconds, 3.0 * self._overhead + 1e-4)
        self._overhead += _OVERHEAD_RATE * (likely - self._overhead)

    # the model

    def _speed(self) -> float:
        """Seconds measured per second of the prior."""
        return 1.0 if self._verify is None else self._verify.scale / float(self._verify.units[0])

    def _unmeasured_draft(self, family: str, count: FloatArray, kv: FloatArray) -> FloatArray:
        """One round before any was measured: the prior's, or a share of our own target's forward."""
        if self._is_informed or _share(family) == 0.0:
            return self._speed() * np.asarray(self._prior.draft_seconds(family, count, kv))
        return _share(family) * self._linear(count, kv, count)

    def _unmeasured_catch_up(self, family: str, num_tokens: float) -> float:
        price = getattr(self._prior, "catch_up_seconds", None)
        if price is not None:
            return self._speed() * float(price(family, num_tokens))
        tokens = np.asarray(float(num_tokens))
        return _share(family) * float(self._linear(tokens, np.zeros(()), np.ones(())))

    def _draft_features(self, family: str, load: DraftLoad) -> FloatArray:
        prior = self._unmeasured_draft(family, load.num_requests, load.kv_tokens)
        return np.array(
            [
                float(np.sum(prior)),
                float(len(load.num_requests)),
                float(load.num_requests.sum()),
                float(load.kv_tokens.sum()),
                self._unmeasured_catch_up(family, load.catch_up_tokens),
            ]
        )

    def _draft_weights(self, family: str) -> FloatArray:
        regression = self._drafts.get(family)
        return np.eye(4)[0] if regression is None else regression.coefficients[:4]

    def _linear(self, tokens: FloatArray, kv: FloatArray, requests: FloatArray) -> FloatArray:
        """A forward without the staircase."""
        features = self._features(tokens, kv, requests)
        if self._verify is None:
            return features[0]
        weights = self._verify.coefficients.tolist()
        return np.asarray(sum(w * f for w, f in zip(weights, features, strict=True)))

    def _features(
        self, tokens: FloatArray, kv: FloatArray, requests: FloatArray
    ) -> tuple[FloatArray, ...]:
        prior = np.asarray(self._prior.verify_seconds(tokens, kv, int(np.max(requests))))
        return prior, np.ones(()), tokens, kv, requests, tokens * kv / np.maximum(requests, 1.0)

    def _verify_table(self, kv_tokens: float, num_requests: int) -> FloatArray:
        """Seconds at every point of the token grid, `[grid]`; kept for the next call."""
        if self._table is None or self._table[:2] != (kv_tokens, num_requests):
            kv, requests = np.asarray(kv_tokens), np.asarray(float(num_requests))
            seconds = self._linear(self._grid, kv, requests)
            if self._verify is not None:
                seconds = seconds + self._verify.scale * self._stairs.correction
            floor = 0.01 * float(np.max(seconds[:64])) + 1e-9
            seconds = np.maximum(np.maximum.accumulate(seconds), floor)
            self._table = (kv_tokens, num_requests, seconds)
        return self._table[2]

    def _look_up(self, tokens: FloatArray, table: FloatArray) -> FloatArray:
        tokens = self._padded(tokens)
        beyond = np.maximum(tokens - self._grid[-1], 0.0)
        slope = (table[-1] - table[-2]) / (self._grid[-1] - self._grid[-2])
        return np.asarray(np.interp(tokens, self._grid, table) + slope * beyond)

    def _padded(self, tokens: FloatArray) -> FloatArray:
        if not len(self._edges):
            return tokens
        index = np.minimum(np.searchsorted(self._edges, tokens), len(self._edges) - 1)
        return np.maximum(self._edges[index], tokens)


def _share(family: str) -> float:
    """Of a target's forward over the same tokens: an unmeasured drafter's."""
    if family in _FREE_FAMILIES:
        return 0.0
    return 1.0 if family == "sparse_kv" else _DRAFT_SHARE
