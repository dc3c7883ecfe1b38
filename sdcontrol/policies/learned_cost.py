"""Step time learnt offline: few non-negative coefficients, fitted to observed steps.

    verify(T, V, B, L) = c0 + c1 V + c2 B + c3 T V / B + p L V + sum_k s_k max(T - knot_k, 0)
    round(B, V)        = base + each B + per_kv V, and a price per token of catch-up

L is the longest draft, to which attention may pad all requests.

Knows nothing of acceptance, plans' merits, files, or of how fast a machine is today: see
`learned_speed`. Pricing a step is a handful of products; scikit-learn is needed to fit alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray, Observation
from sdcontrol.estimators.loads import DraftLoad, VerifyLoad, draft_loads, verify_load
from sdcontrol.estimators.price import even_draft
from sdcontrol.extras import needed

__all__ = ["KNOTS", "LearnedCost", "fit_cost", "is_timed", "ramps_of", "timed_steps"]

KNOTS = 6
_LEAST_ROUNDS = 8  # steps in which a family drafted; with fewer the online price stands
_FITS = 8  # reweighted ones
_NEIGHBOURS = 8  # steps to either side, of which a step's speed is the median
_HUBER = 2.0  # of the typical residual, beyond which a step counts less

Run = Sequence[Observation]
_Rows = tuple[FloatArray, FloatArray]
"""Features `[steps, features]` and seconds `[steps]` of one run."""


@dataclass(frozen=True, slots=True)
class LearnedCost:
    """A `Cost` at the speed of the training runs: monotone in tokens, requests and KV."""

    knots: FloatArray  # [knots], tokens at which verification may become steeper
    verify: FloatArray  # [4 + knots]: constant, per V, per B, per T V / B, slope beyond each knot
    rounds: Mapping[str, FloatArray]  # by family, [4]: base, per request, per V, per catch-up token
    overhead: float
    padding: float = 0.0  # per L V

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One forward of the target, of tokens that are spread evenly over the requests."""
        padding = even_draft(num_tokens, num_requests) * self.padding_seconds(1.0)
        unpadded = self.unpadded_seconds(num_tokens, kv_tokens, num_requests)
        return np.asarray(unpadded + padding * np.asarray(kv_tokens))

    def padding_seconds(self, kv_tokens: float) -> float:
        """What a token more of the longest draft adds."""
        return self.padding * kv_tokens

    def unpadded_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One forward, padding to the longest draft left out."""
        tokens = np.asarray(num_tokens, np.float64)
        constant, per_kv, each, per_query = self.verify[:4].tolist()
        ramps = ramps_of(tokens.ravel(), self.knots, self.verify[4:]).reshape(tokens.shape)
        queries = tokens * (per_query / max(num_requests, 1))
        return np.asarray(
            ramps + (constant + each * num_requests) + (per_kv + queries) * np.asarray(kv_tokens)
        )

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round of a family in `rounds`."""
        base, each, per_kv, _ = self.rounds[family].tolist()
        return np.asarray(base + each * np.asarray(num_requests) + per_kv * np.asarray(kv_tokens))

    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        """To compute what a drafter's cache lacks, of a family in `rounds`."""
        return float(self.rounds[family][3]) * num_tokens

    def overhead_seconds(self) -> float:
        """The rest of a step."""
        return self.overhead

    def of_verification(self, load: VerifyLoad) -> float:
        """Seconds of an observed forward."""
        constant, per_kv, each, per_query, *slopes = self.verify.tolist()
        tokens, kv, requests = load.num_tokens, load.kv_tokens, load.num_requests
        seconds: float = constant + per_kv * kv + each * requests
        seconds += (
            per_query * tokens * kv / max(requests, 1) + self.padding * load.longest_draft * kv
        )
        for knot, slope in zip(self.knots.tolist(), slopes, strict=True):
            seconds += slope * max(tokens - knot, 0.0)
        return seconds

    def of_drafting(self, family: str, load: DraftLoad) -> float:
        """Seconds of all observed rounds of a family in `rounds`, catch-up included."""
        prices = self.rounds[family].tolist()
        seconds: float = sum(
            [price * amount for price, amount in zip(prices, _draft_features(load), strict=True)]
        )
        return seconds


@compiled("float64[::1](float64[::1], float64[::1], float64[::1])")
def ramps_of(tokens: FloatArray, knots: FloatArray, slopes: FloatArray) -> FloatArray:
    """Sum of slope times tokens beyond each knot, `[tokens]`."""
    seconds = np.zeros(len(tokens))
    for t in range(len(tokens)):
        for k in range(len(knots)):
            seconds[t] += slopes[k] * max(tokens[t] - knots[k], 0.0)
    return seconds


def is_timed(observation: Observation) -> bool:
    """Whether anyone decoded in the step, in a time that can be."""
    seconds = observation.timing.total_seconds
    return bool(observation.view.requests) and bool(np.isfinite(seconds)) and seconds > 0.0


def timed_steps(runs: Sequence[Run]) -> list[list[Observation]]:
    """Of each run, the steps that took a time."""
    return [[one for one in run if is_timed(one)] for run in runs]


def fit_cost(runs: Sequence[Run]) -> LearnedCost:
    """Fit verification and rounds to the timings of runs, whose machines may differ in speed."""
    timed = timed_steps(runs)
    loads = [[verify_load(o) for o in run] for run in timed]
    tokens = np.array([load.num_tokens for run in loads for load in run], np.float64)
    knots = np.unique(np.quantile(np.append(tokens, 0.0), np.linspace(0.0, 0.9, KNOTS)))
    verify = [
        (
            np.array([_verify_features(load, knots) for load in run]),
            np.array([o.timing.verify_seconds for o in steps]),
        )
        for run, steps in zip(loads, timed, strict=True)
        if run
    ]
    *terms, padding = _robust(verify)
    drafting = _drafting(timed)
    overheads = [
        o.timing.controller_seconds + o.timing.overhead_seconds for run in timed for o in run
    ]
    return LearnedCost(
        knots=knots,
        verify=np.array(terms),
        rounds={
            family: _robust(rows)
            for family, rows in drafting.items()
            if sum(len(seconds) for _, seconds in rows) >= _LEAST_ROUNDS
        },
        overhead=float(np.median(overheads)),
        padding=float(padding),
    )


def _verify_features(load: VerifyLoad, knots: FloatArray) -> list[float]:
    tokens, kv, requests = load.num_tokens, load.kv_tokens, load.num_requests
    ramps = np.maximum(tokens - knots, 0.0).tolist()
    padding = load.longest_draft * kv
    return [1.0, kv, requests, tokens * kv / max(requests, 1), *ramps, padding]


def _draft_features(load: DraftLoad) -> list[float]:
    return [load.num_rounds, load.draft_tokens, load.kv_tokens, load.catch_up_tokens]


def _drafting(runs: Sequence[Run]) -> dict[str, list[_Rows]]:
    """By family, of every run in which it took time."""
    found: dict[str, list[_Rows]] = {}
    for run in runs:
        rows: dict[str, list[tuple[list[float], float]]] = {}
        for observation in run:
            for family, load in draft_loads(observation).items():
                seconds = observation.timing.draft_seconds.get(family, 0.0)
                if seconds > 0.0:
                    rows.setdefault(family, []).append((_draft_features(load), seconds))
        for family, pairs in rows.items():
            features, times = zip(*pairs, strict=True)
            found.setdefault(family, []).append((np.array(features, np.float64), np.array(times)))
    return found


def _robust(runs: Sequence[_Rows]) -> FloatArray:
    """Non-negative weights of least relative error, `[features]`.

    Measured times are first brought to one speed: a machine that is shared is slower for a while.
    Steps far off count less (Huber).
    """
    with needed():
        from sklearn.linear_model import LinearRegression

    features, seconds = (np.concatenate(parts) for parts in zip(*runs, strict=True))
    ends = np.cumsum([len(times) for _, times in runs])[:-1]
    scale = np.maximum(features.max(axis=0), 1e-12)
    floor = 1e-3 * max(float(np.median(seconds)), 1e-9)
    fitted = np.full(len(seconds), np.median(seconds))
    speed = trust = np.ones(len(seconds))
    coefficients = np.zeros(features.shape[1])
    for _ in range(_FITS):
        weight = np.sqrt(trust) / np.maximum(fitted, floor)
        fit = LinearRegression(fit_intercept=False, positive=True)
        fit.fit(features / scale * weight[:, None], seconds / speed * weight)
        coefficients = fit.coef_
        fitted = np.maximum(features / scale @ coefficients, floor)
        ratios = np.log(np.maximum(seconds, floor) / fitted)
        speed = _speeds(ratios, ends)
        residual = np.abs(ratios - np.log(speed))
        trust = np.minimum(1.0, _HUBER * max(float(np.median(residual)), 1e-3) / (residual + 1e-12))
    return np.asarray(coefficients / scale, dtype=np.float64)


def _speeds(ratios: FloatArray, ends: FloatArray) -> FloatArray:
    """How slow the machine was around each step; 1 at the median, of log-ratios `[steps]`."""
    levels = np.array([level for run in np.split(ratios, ends) for level in _medians(run)])
    return np.asarray(np.exp(levels - np.median(levels)))


def _medians(run: FloatArray) -> Iterator[float]:
    for place in range(len(run)):
        yield float(np.median(run[max(place - _NEIGHBOURS, 0) : place + _NEIGHBOURS + 1]))
