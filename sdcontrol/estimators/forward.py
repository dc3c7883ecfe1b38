"""The target's forward, priced by what forwards took.

Knows nothing of drafting. T tokens, V KV tokens and B requests, the longest draft of which is L tokens, take

    c0 prior(T, V, B) + c1 + c2 T + c3 V + c4 B + c5 T V / B + c6 L V + staircase(T)

with non-negative coefficients (attention does T / B queries over V keys each: its arithmetic; where it
pads requests to the longest one, 1 + L for each), and a running correction per number of tokens for what
is not linear. Prices never fall with T or V.
"""

import math
from collections.abc import Sequence

import numpy as np

from sdcontrol.core import Cost, FloatArray
from sdcontrol.estimators.loads import VerifyLoad, is_plausible
from sdcontrol.estimators.price import even_draft
from sdcontrol.estimators.pricing import (
    PRIOR_ALONE,
    Pricing,
    featured,
    padded,
    priced,
    read_off,
    tabled,
)
from sdcontrol.estimators.regression import OnlineRegression
from sdcontrol.estimators.staircase import Staircase, interpolated, token_grid

__all__ = ["LearntForward"]

_SPREAD = np.array([0.5, 0.5, 0.5, 0.5, 0.2, 0.3, 0.04])
_MOST_RESIDUAL = 0.5  # of the expected time, that one measurement may correct a stair by
_MOST_NEWS = 3.0  # the same, at a load that is new
_FOLLOWS = 0.1  # of the log-ratio of measured to expected, that all prices follow at once
_MOST_OFF = 0.35  # log-ratio, beyond which more counts as much
_FAMILIAR_STEPS = 2  # measurements of a load before a surprise there is an outlier
_MOST_SEEN = 1024
_KV_STEP = 1.25  # between the KV counts at which the prior is evaluated and kept
_LOG_KV_STEP = math.log(_KV_STEP)
_MOST_KEPT = 64


class LearntForward:
    """Seconds of one forward, from a prior and measurements."""

    def __init__(self, prior: Cost) -> None:
        self._prior = prior
        self._grid: FloatArray = token_grid()
        self._stairs = Staircase(self._grid)
        self._regression: OnlineRegression | None = None
        self._seen: dict[tuple[int, int], int] = {}
        self._kept: dict[tuple[int, int], FloatArray] = {}
        self._table: tuple[float, int, FloatArray] | None = None
        self.pad_to(())

    def pad_to(self, token_edges: Sequence[int]) -> None:
        """The sizes to which the engine pads the tokens of a forward: up to the next edge they are free."""
        self._edges: FloatArray = np.array(sorted(token_edges), dtype=float)

    @property
    def edges(self) -> FloatArray:
        """Sizes that tokens are padded to, ascending."""
        return self._edges

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
        """Of the prior, 1, T, V, B, T V / B and L V, in seconds; the prior alone before measurements."""
        if self._regression is None:
            return tuple(PRIOR_ALONE.tolist())
        return tuple(self._regression.coefficients.tolist())

    def seconds(self, num_tokens: FloatArray, kv_tokens: float, num_requests: int) -> FloatArray:
        """Of tokens that are spread evenly over the requests; same shape as `num_tokens`.

        Positive, non-decreasing in tokens and KV tokens.
        """
        table = self._seconds_on_grid(kv_tokens, num_requests)
        tokens = padded(np.ascontiguousarray(num_tokens.ravel()), self._edges)
        seconds = interpolated(tokens, self._grid, table)
        seconds += even_draft(tokens, num_requests) * self.padding_seconds(kv_tokens)
        return seconds.reshape(num_tokens.shape)

    def table(
        self, first_tokens: int, most_more: int, kv_tokens: float, num_requests: int, beside: float
    ) -> FloatArray:
        """Seconds of `first_tokens` and up to `most_more` more, `[most_more + 1]`, and `beside`.

        Without padding to the longest draft.
        """
        if self._is_kept(kv_tokens, num_requests):
            tables = self._grid, self._seconds_on_grid(kv_tokens, num_requests), self._edges
            return read_off(tables, float(first_tokens), most_more, beside)
        table, seconds = tabled(
            *self.pricing(kv_tokens, num_requests),
            (float(kv_tokens), float(num_requests)),
            (self._edges, float(first_tokens), most_more, beside),
        )
        self._table = (kv_tokens, num_requests, seconds)
        return table

    def seconds_of(self, load: VerifyLoad, times: int = 1) -> float:
        """Of one forward, with that many times its tokens."""
        tokens, kv_tokens = times * load.num_tokens, float(load.kv_tokens)
        padding = (times * (1 + load.longest_draft) - 1) * self.padding_seconds(kv_tokens)
        return float(self.table(tokens, 0, kv_tokens, load.num_requests, padding)[0])

    def padding_seconds(self, kv_tokens: float) -> float:
        """What a token more of the longest draft adds, however many are as long."""
        if self._regression is None:
            return 0.0
        return self._regression.coefficients.item(6) * kv_tokens

    def update(self, load: VerifyLoad, seconds: float, expected: float) -> bool:
        """Learn one measurement, of which `seconds_of` said `expected`; whether it completed a change of speed."""
        features = self._features(load)
        tokens = float(features[2])
        if self._regression is None:
            units = np.append(features[:-1], features[-2])  # as if all drafts were as long
            self._regression = OnlineRegression(units, PRIOR_ALONE, _SPREAD)
        is_familiar = self._is_familiar(load)
        changed = self._regression.update(
            features, seconds, expected=expected, is_familiar=is_familiar
        )
        if changed:
            self._stairs.forget()
        elif is_plausible(seconds):
            if is_familiar and expected > 0.0:  # what is not measured has changed as well
                off = math.log(seconds / expected)
                self._regression.rescale(math.exp(_FOLLOWS * min(max(off, -_MOST_OFF), _MOST_OFF)))
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
        times = self._seen[tokens, kv_tokens] = self._seen.get((tokens, kv_tokens), 0) + 1
        return times > _FAMILIAR_STEPS

    def _features(self, load: VerifyLoad) -> FloatArray:
        kv, requests = float(load.kv_tokens), float(load.num_requests)
        low, high, share = self._nearest_priors(kv, load.num_requests)
        numbers = float(load.num_tokens), kv, requests, float(load.longest_draft)
        return featured((self._grid, low, high, self._edges), share, numbers)

    def _seconds_on_grid(self, kv_tokens: float, num_requests: int) -> FloatArray:
        """Seconds at every point of the token grid, `[grid]`; kept for the next call."""
        if self._table is None or not self._is_kept(kv_tokens, num_requests):
            pricing = self.pricing(kv_tokens, num_requests)
            seconds = priced(*pricing, (float(kv_tokens), float(num_requests)))
            self._table = (kv_tokens, num_requests, seconds)
        return self._table[2]

    def _is_kept(self, kv_tokens: float, num_requests: int) -> bool:
        return self._table is not None and self._table[:2] == (kv_tokens, num_requests)

    def pricing(self, kv_tokens: float, num_requests: int) -> Pricing:
        """What prices at a load are computed from."""
        regression = self._regression
        below, above, share = self._nearest_priors(kv_tokens, num_requests)
        tables = self._grid, below, above, self._stairs.correction
        if regression is None:
            return tables, (share, 0.0), PRIOR_ALONE
        return tables, (share, regression.scale), regression.coefficients

    def _nearest_priors(
        self, kv_tokens: float, num_requests: int
    ) -> tuple[FloatArray, FloatArray, float]:
        """The prior on the token grid at the two nearest kept KV counts; how near to the second."""
        if kv_tokens < 1.0:
            kept = self._kept_prior(-1, num_requests)
            return kept, kept, 0.0
        below = math.floor(math.log(kv_tokens) / _LOG_KV_STEP)
        low = _KV_STEP**below
        share = (kv_tokens - low) / (_KV_STEP * low - low)
        kept = self._kept_prior(below, num_requests)
        return kept, self._kept_prior(below + 1, num_requests), share

    def _kept_prior(self, kv_index: int, num_requests: int) -> FloatArray:
        kept = self._kept.get((kv_index, num_requests))
        if kept is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            kv_tokens = 0.0 if kv_index < 0 else _KV_STEP**kv_index
            seconds = self._prior.verify_seconds(self._grid, kv_tokens, num_requests)
            kept = np.full(self._grid.shape, seconds, dtype=float)
            self._kept[kv_index, num_requests] = kept
        return kept
