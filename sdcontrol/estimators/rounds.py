"""The drafting rounds of one family, priced by what rounds took.

Knows nothing of the target's forward. A round of B requests that read V KV tokens takes
`c0 + c1 B + c2 V`; a catch-up, which is part of the first round, makes that longer by a constant and by a
multiple of what was assumed of its tokens.
"""

from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.estimators.loads import DraftLoad
from sdcontrol.estimators.regression import OnlineRegression

__all__ = ["LearntRounds", "RoundPrice"]

_SPREAD_SHARE, _SPREAD_FLOOR = 0.5, 0.1
_SIZE_SPREAD = 0.5  # of all prices of rounds together: a drafter may be smaller than assumed
_CATCH_UP_SPREAD = 4.0  # what a catch-up takes is hardly known: of its tokens little was told
# What a catch-up of any length adds, and how uncertain that is: shares of a round's constant, and of all.
# Measured: 0.26 to 0.32 on CPUs, 0.4 on an H200, where the host is waited for once (docs/log.md).
_LATE_SHARE, _LATE_SPREAD, _LATE_FLOOR = 0.35, 0.3, 0.02
_FIRST_TRUST = (0.05, 0.1, 0.3)  # in the first measurements: a first use is often slow
_NEW_STEPS = 5  # measurements before a surprise is an outlier


@dataclass(frozen=True, slots=True)
class RoundPrice:
    """Seconds of one drafting round: `constant + per_request B + per_kv_token V`."""

    constant: float
    per_request: float
    per_kv_token: float

    def seconds(
        self, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """Of one round; arguments broadcast."""
        requests, kv = np.asarray(num_requests, float), np.asarray(kv_tokens, float)
        return np.asarray(self.constant + self.per_request * requests + self.per_kv_token * kv)

    def seconds_of(self, load: DraftLoad) -> float:
        """Of all rounds of a load, catch-up left out."""
        drafting = self.per_request * load.draft_tokens + self.per_kv_token * load.kv_tokens
        return self.constant * load.num_rounds + drafting


class LearntRounds:
    """Prices of one family, from an assumption and measurements.

    `per_caught_up_token` is what was assumed of one when rounds were first measured; only a change of speed
    moves it.
    """

    def __init__(self, assumed: RoundPrice, per_caught_up_token: float, first: DraftLoad) -> None:
        self._regression = _regression(assumed, first)
        self.price, self.per_caught_up_token = assumed, per_caught_up_token
        self._caught_up = [0] * _NEW_STEPS  # tokens of the longest catch-ups that were measured

    def catch_up_seconds(self, assumed: float) -> float:
        """Of a catch-up of which `assumed` seconds were assumed."""
        ratio, constant = self._regression.coefficients[3:].tolist()
        return float(constant + ratio * assumed)

    def rescale(self, factor: float) -> None:
        """Follow a machine that became slower by `factor`; what is assumed of catch-ups does already."""
        self._regression.units[3] *= factor
        self.per_caught_up_token *= factor
        self._regression.rescale(factor)
        self._read_off()

    def update(self, load: DraftLoad, assumed_catch_up_seconds: float, seconds: float) -> None:
        """Learn what all rounds of one step took together, catch-up included."""
        num_measured = self._num_comparable(load)
        self._regression.update(
            _features(load, assumed_catch_up_seconds),
            seconds,
            is_familiar=num_measured >= _NEW_STEPS,
            trust=_FIRST_TRUST[num_measured] if num_measured < len(_FIRST_TRUST) else 1.0,
        )
        self._read_off()

    def _num_comparable(self, load: DraftLoad) -> int:
        """Measurements that say what to expect of this one: after a long catch-up those with a quarter of it."""
        if load.catch_up_tokens <= load.draft_tokens:
            return self._regression.num_measured
        num = sum(4 * tokens >= load.catch_up_tokens for tokens in self._caught_up)
        self._caught_up = sorted([*self._caught_up, load.catch_up_tokens])[1:]
        return num

    def _read_off(self) -> None:
        self.price = RoundPrice(*self._regression.coefficients[:3].tolist())


def _features(load: DraftLoad, catch_up_seconds: float) -> FloatArray:
    rounds = load.num_rounds, load.draft_tokens, load.kv_tokens
    return np.array([*rounds, catch_up_seconds, load.catch_up_tokens > 0], dtype=float)


def _regression(assumed: RoundPrice, first: DraftLoad) -> OnlineRegression:
    """Relative to what the first load was assumed to take; where that is nothing, to measurements."""
    units = _features(first, 1.0)
    units[4] = 1.0
    parts = units[:3] * np.array([assumed.constant, assumed.per_request, assumed.per_kv_token])
    total = float(parts.sum())
    shares = parts / total if total > 0.0 else np.array([1.0, 0.0, 0.0])
    units[3] = total if total > 0.0 else 1.0  # one assumed second is one assumed second
    constant = shares.item(0) / first.num_rounds
    late, doubt = _LATE_SHARE * constant, _LATE_SPREAD * constant + _LATE_FLOOR
    spread = np.append(_SPREAD_SHARE * shares + _SPREAD_FLOOR, (_CATCH_UP_SPREAD, doubt))
    common = _SIZE_SPREAD * np.append(shares, (0.0, 0.0))
    prior = np.append(shares, (1.0, late))
    return OnlineRegression(units, prior, spread, scale=total or None, common=common)
