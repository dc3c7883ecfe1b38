"""The target's forward, priced by what forwards took.

Knows nothing of drafting. T tokens, V KV tokens and B requests take

    c0 prior(T, V, B) + c1 + c2 T + c3 V + c4 B + c5 T V / B + staircase(T)

with non-negative coefficients (attention does T / B queries over V keys each: its arithmetic), and a
running correction per number of tokens for what is not linear. Prices never fall with T or V.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sdcontrol.core import Cost, FloatArray
from sdcontrol.estimators.loads import VerifyLoad, is_plausible
from sdcontrol.estimators.regression import OnlineRegression
from sdcontrol.estimators.staircase import Staircase, token_grid

__all__ = ["LearntForward"]

_SPREAD = np.array([0.5, 0.5, 0.5, 0.5, 0.2, 0.3])
_MOST_RESIDUAL = 0.5  # of the expected time, that one measurement may correct a stair by
_MOST_NEWS = 3.0  # the same, at a load that is new
_FAMILIAR_STEPS = 2  # measurements of a load before a surprise there is an outlier
_MOST_SEEN = 1024
_KV_STEP = 1.25  # between the KV counts at which the prior is evaluated and kept
_MOST_KEPT = 64


class LearntForward:
    """Seconds of one forward, from a prior and measurements.

    `token_edges` are the sizes to which the engine pads the tokens of a forward: tokens up to the
    next edge are free.
    """

    def __init__(self, prior: Cost, token_edges: Sequence[int] = ()) -> None:
        self._prior = prior
        self._edges: FloatArray = np.array(sorted(token_edges), dtype=float)
        self._grid: FloatArray = token_grid()
        self._stairs = Staircase(self._grid)
        self._regression: OnlineRegression | None = None
        self._seen: Counter[tuple[int, int]] = Counter()
        self._kept: dict[tuple[int, int], FloatArray] = {}
        self._table: tuple[float, int, FloatArray] | None = None

    @property
    def is_measured(self) -> bool:
        """Whether any step was learnt."""
        return self._regression is not None

    @property
    def speed(self) -> float:
        """Seconds measured per second of the prior."""
        regression = self._regression
        return 1.0 if regression is None else regression.scale / float(regression.units[0])

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Of the prior, 1, T, V, B and T V / B, in seconds; the prior alone before measurements."""
        if self._regression is None:
            return (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return tuple(self._regression.coefficients.tolist())

    def seconds(self, num_tokens: FloatArray, kv_tokens: float, num_requests: int) -> FloatArray:
        """Positive, non-decreasing in tokens and KV tokens; same shape as `num_tokens`."""
        table = self._seconds_on_grid(kv_tokens, num_requests)
        tokens = self._padded(num_tokens)
        seconds = np.interp(tokens, self._grid, table)
        beyond = tokens - self._grid[-1]
        if np.any(beyond > 0.0):
            slope = (table[-1] - table[-2]) / (self._grid[-1] - self._grid[-2])
            seconds = seconds + slope * np.maximum(beyond, 0.0)
        return np.asarray(seconds)

    def seconds_of(self, load: VerifyLoad) -> float:
        """Of one forward."""
        tokens = float(load.num_tokens)
        if tokens > self._grid[-1] or len(self._edges):
            kv_tokens, num_requests = float(load.kv_tokens), load.num_requests
            return float(self.seconds(np.asarray(tokens), kv_tokens, num_requests))
        table = self._seconds_on_grid(float(load.kv_tokens), load.num_requests)
        return float(np.interp(tokens, self._grid, table))

    def update(self, load: VerifyLoad, seconds: float) -> bool:
        """Learn one measurement; whether it completed a change of speed."""
        features = self._features(load)
        tokens = float(features[2])
        expected = self.seconds_of(load)
        if self._regression is None:
            self._regression = OnlineRegression(features, np.eye(len(features))[0], _SPREAD)
        is_familiar = self._is_familiar(load)
        changed = self._regression.update(
            features, seconds, expected=expected, is_familiar=is_familiar
        )
        if changed:
            self._stairs.forget()
        elif is_plausible(seconds):
            fitted = self._regression.predict(features)
            limit = fitted * (_MOST_RESIDUAL if is_familiar else _MOST_NEWS)
            residual = min(max(seconds - fitted, -limit), limit) / self._regression.scale
            self._stairs.update(tokens, residual)
        self._table = None
        return changed

    def _is_familiar(self, load: VerifyLoad) -> bool:
        """Whether about this load was measured more than once before; counts it."""
        tokens = round(4.0 * math.log2(max(load.num_tokens, 1)))
        kv_tokens = round(2.0 * math.log2(max(load.kv_tokens, 1)))
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[tokens, kv_tokens] += 1
        return self._seen[tokens, kv_tokens] > _FAMILIAR_STEPS

    def _features(self, load: VerifyLoad) -> FloatArray:
        tokens = float(load.num_tokens)
        if len(self._edges):
            tokens = float(self._padded(np.asarray(tokens)))
        kv, requests = float(load.kv_tokens), float(load.num_requests)
        grid = self._prior_on_grid(kv, load.num_requests)
        prior = float(np.interp(tokens, self._grid, grid))
        return np.array([prior, 1.0, tokens, kv, requests, tokens * kv / max(requests, 1.0)])

    def _seconds_on_grid(self, kv_tokens: float, num_requests: int) -> FloatArray:
        """Seconds at every point of the token grid, `[grid]`; kept for the next call."""
        if self._table is None or self._table[:2] != (kv_tokens, num_requests):
            c = self.coefficients
            seconds = self._grid * (c[2] + c[5] * kv_tokens / max(num_requests, 1))
            seconds += c[1] + c[3] * kv_tokens + c[4] * num_requests
            if c[0]:
                seconds += c[0] * self._prior_on_grid(kv_tokens, num_requests)
            if self._regression is not None:
                seconds += self._regression.scale * self._stairs.correction
            floor = 0.01 * abs(float(seconds[len(self._grid) // 2])) + 1e-9
            seconds = np.maximum.accumulate(np.maximum(seconds, floor))
            self._table = (kv_tokens, num_requests, seconds)
        return self._table[2]

    def _prior_on_grid(self, kv_tokens: float, num_requests: int) -> FloatArray:
        """The prior at every point of the token grid, between the two nearest kept KV counts."""
        if kv_tokens < 1.0:
            return self._kept_prior(-1, num_requests)
        below = math.floor(math.log(kv_tokens) / math.log(_KV_STEP))
        low, high = _KV_STEP**below, _KV_STEP ** (below + 1)
        share = (kv_tokens - low) / (high - low)
        nearest = self._kept_prior(below, num_requests), self._kept_prior(below + 1, num_requests)
        return (1.0 - share) * nearest[0] + share * nearest[1]

    def _kept_prior(self, kv_index: int, num_requests: int) -> FloatArray:
        key = (kv_index, num_requests)
        if key not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            kv_tokens = 0.0 if kv_index < 0 else _KV_STEP**kv_index
            seconds = self._prior.verify_seconds(self._grid, kv_tokens, num_requests)
            self._kept[key] = np.broadcast_to(np.asarray(seconds, dtype=float), self._grid.shape)
        return self._kept[key]

    def _padded(self, tokens: FloatArray) -> FloatArray:
        if not len(self._edges):
            return tokens
        index = np.minimum(np.searchsorted(self._edges, tokens), len(self._edges) - 1)
        return np.maximum(self._edges[index], tokens)
