"""The target's forward, priced by what forwards took.

Knows nothing of drafting. T tokens, V KV tokens and B requests, the longest draft of which is L tokens, take

    c0 prior(T, V, B) + c1 + c2 T + c3 V + c4 B + c5 T V / B + c6 L V - c7 [T = 1]
    + sum_k c(8+k) max(T - knee_k, 0) + staircase(T)

with non-negative coefficients (attention does T / B queries over V keys each: its arithmetic; where it
pads requests to the longest one, 1 + L for each; for a lone token there are other kernels, which save
c7; beyond a ridge, by a knee at every octave, a token costs more: steps with prompts lie there and say
nothing of one more token before it), and a running correction per number of tokens for what is not
convex. Prices never fall with T or V.
Every step's time is learnt, several at once (`measured`).
"""

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from sdcontrol.core import Cost, FloatArray
from sdcontrol.estimators.loads import VerifyLoad
from sdcontrol.estimators.measured import SEEN_SHAPE, learn_steps
from sdcontrol.estimators.price import even_draft
from sdcontrol.estimators.pricing import (
    KNEES,
    PRIOR_ALONE,
    Pricing,
    featured,
    padded,
    priced,
    read_off,
    tabled,
)
from sdcontrol.estimators.regression import OnlineRegression
from sdcontrol.estimators.staircase import Stairs, interpolated, new_stairs, token_grid
from sdcontrol.estimators.uninformed import UninformedCost

__all__ = ["LearntForward"]

# Standard deviations of the coefficients, where a machine was told.
_SPREAD = np.append([0.5, 0.5, 0.5, 0.5, 0.2, 0.3, 0.3, 0.08], np.full(KNEES.shape, 0.5))
_RELUCTANCE = 2.0  # pull of measurements below which a knee is not believed in: noise has less
_UNTOLD = 2.0  # times as uncertain where nothing was: a token more may be all but free
_MOST_DRIFT = 1.4  # of the first load's price; a larger change of speed is noticed
_OF_PLAIN = np.isin(np.arange(_SPREAD.size), (1, 3, 4))  # what a step takes whatever its tokens
_MOST_PLAIN = 8.0  # times its share of the first load, by the prior, that it may be uncertain by
_KV_STEP = 1.25  # between the KV counts at which the prior is evaluated and kept
_LOG_KV_STEP = math.log(_KV_STEP)
_MOST_KEPT = 64


class LearntForward:
    """Seconds of one forward, from a prior and measurements."""

    def __init__(self, prior: Cost) -> None:
        self._prior = prior
        self._grid: FloatArray = token_grid()
        self._stairs: Stairs = new_stairs(self._grid)
        self._regression: OnlineRegression | None = None
        self._reference: FloatArray = PRIOR_ALONE  # features of the first load
        self._seen = np.zeros(SEEN_SHAPE, np.int64)
        self._kept: dict[tuple[int, int], FloatArray] = {}
        self._nearest: tuple[int, float, float, FloatArray, FloatArray] | None = None
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
        """Seconds that the first load takes now, per second of the prior.

        Where that is long gone nobody measures it, and its price may become anything: it is followed as far as
        a machine's speed may change without that everything is rescaled.
        """
        regression = self._regression
        if regression is None:
            return 1.0
        drift = regression.predict(self._reference) / regression.scale
        followed = min(max(drift, 1.0 / _MOST_DRIFT), _MOST_DRIFT)
        return followed * regression.scale / regression.units.item(0)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Of the prior, 1, T, V, B, T V / B, L V, -[T = 1] and T beyond each knee, in seconds; the prior alone
        before measurements.
        """
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

    def learn(self, steps: FloatArray) -> int:
        """Learn measurements in order, `[steps, 5]`: tokens, KV tokens, requests, longest draft, seconds.

        How many of them completed a change of speed.
        """
        self._table = None
        alike = [(row[2], _kv_index(row[1])) for row in steps.tolist()]
        changes = first = 0
        for _, part in groupby(alike):
            last = first + len(list(part))
            changes += self._learn_alike(steps[first:last])
            first = last
        return changes

    def _learn_alike(self, steps: FloatArray) -> int:
        """Of as many requests each, and KV counts between the same two at which the prior is kept."""
        kv_tokens, num_requests = steps.item(0, 1), int(steps[0, 2])
        low, high, share = self._nearest_priors(kv_tokens, num_requests)
        tables = self._grid, low, high, self._edges
        if self._regression is None:
            features = featured(tables, share, tuple(steps[0, :4].tolist()))
            features[6] = features[5]  # as if all drafts were as long
            self._reference = features
            # Where arithmetic alone counts, a token takes a knee's share of what a forward takes at the knee.
            units = np.concatenate((features[:7], (1.0,), KNEES))
            spread = self._spread(low, steps)
            guess = PRIOR_ALONE.copy()
            guess[-KNEES.size :] -= _RELUCTANCE * spread[-KNEES.size :] ** 2
            self._regression = OnlineRegression(units, guess, spread)
        prior = tables, _kv_counts(kv_tokens)
        return learn_steps(self._regression.filter, self._stairs, self._seen, prior, steps)

    def _spread(self, prior: FloatArray, steps: FloatArray) -> FloatArray:
        """Of the coefficients, `[features]`; `prior` on the token grid, at the first of `steps`.

        Untold, a first load that is mostly a prompt says little of a plain step, and a plain step is small
        beside it: as uncertain as the whole, it would be believed to take most of it.
        """
        if not isinstance(self._prior, UninformedCost):
            return _SPREAD
        tokens = np.array([steps.item(0, 2), steps.item(0, 0)])
        plain, whole = interpolated(tokens, self._grid, prior).tolist()
        share = np.where(_OF_PLAIN, min(_MOST_PLAIN * plain / whole, 1.0), 1.0)
        return np.asarray(_UNTOLD * share * _SPREAD)

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
        tables = self._grid, below, above, self._stairs[-1]
        if regression is None:
            return tables, (share, 0.0), PRIOR_ALONE
        return tables, (share, regression.scale), regression.coefficients

    def _nearest_priors(
        self, kv_tokens: float, num_requests: int
    ) -> tuple[FloatArray, FloatArray, float]:
        """The prior on the token grid at the two nearest kept KV counts; how near to the second.

        Contexts grow slowly, so that mostly they are those of the last call.
        """
        last = self._nearest
        if last is None or last[0] != num_requests or not 0.0 < last[1] < kv_tokens < last[2]:
            low, high = _kv_counts(kv_tokens)
            index = round(math.log(low) / _LOG_KV_STEP) if low > 0.0 else -1
            kept = self._kept_prior(index, num_requests)
            more = kept if low == 0.0 else self._kept_prior(index + 1, num_requests)
            last = self._nearest = num_requests, low, high, kept, more
        _, low, high, below, above = last
        return below, above, (kv_tokens - low) / (high - low) if low > 0.0 else 0.0

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


def _kv_counts(kv_tokens: float) -> tuple[float, float]:
    """The two nearest KV counts at which the prior is kept; 0 and infinity for none at all."""
    if kv_tokens < 1.0:
        return 0.0, math.inf
    low = _KV_STEP ** _kv_index(kv_tokens)
    return low, low * _KV_STEP


def _kv_index(kv_tokens: float) -> int:
    return math.floor(math.log(max(kv_tokens, 1.0)) / _LOG_KV_STEP)
