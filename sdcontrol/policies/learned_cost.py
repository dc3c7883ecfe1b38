"""Step time learnt offline: sums of non-negative ramps, fitted to observed steps.

Knows nothing of acceptance, plans' merits or files. Pricing a step is one small matrix product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray, Observation, family_of
from sdcontrol.estimators.price import round_kv_tokens

__all__ = ["KNOTS", "LearnedCost", "fit_cost"]

KNOTS = 6


@dataclass(frozen=True, slots=True)
class LearnedCost:
    """Step time as sums of non-negative ramps: monotone in tokens, requests and KV."""

    knots: FloatArray  # [knots], tokens at which verification may become steeper
    verify: FloatArray  # [3 + knots]: constant, per KV token, per request, slope beyond each knot
    rounds: Mapping[str, FloatArray]  # by family: base, per request, per KV token
    overhead: float

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One forward of the target."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        ramps = np.maximum(tokens[..., None] - self.knots, 0.0) @ self.verify[3:]
        fixed = self.verify[0] + self.verify[2] * num_requests
        return np.asarray(ramps + fixed + self.verify[1] * np.asarray(kv_tokens))

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round; a family never seen to take time takes none."""
        base, each, per_kv_token = self.rounds.get(family, np.zeros(3))
        return np.asarray(
            base + each * np.asarray(num_requests) + per_kv_token * np.asarray(kv_tokens)
        )

    def overhead_seconds(self) -> float:
        """The rest of a step."""
        return self.overhead


def fit_cost(observations: Sequence[Observation]) -> LearnedCost:
    """Fit verification and rounds to timings, all positive and finite."""
    tokens = np.array(
        [len(o.view.requests) + o.view.prefill_tokens + sum(o.proposed) for o in observations]
    ).astype(np.float64)
    knots = np.unique(np.quantile(np.append(tokens, 0.0), np.linspace(0.0, 0.9, KNOTS)))
    fixed = [
        (1.0, sum(q.context_tokens for q in o.view.requests), len(o.view.requests))
        for o in observations
    ]
    ramps = np.maximum(tokens[:, None] - knots, 0.0)
    seconds = np.array([o.timing.verify_seconds for o in observations])
    families = sorted({family for o in observations for family in o.timing.draft_seconds})
    overheads = [o.timing.controller_seconds + o.timing.overhead_seconds for o in observations]
    return LearnedCost(
        knots=knots,
        verify=_ramps(np.hstack([np.array(fixed, dtype=np.float64), ramps]), seconds),
        rounds={family: _train_rounds(observations, family) for family in families},
        overhead=float(np.median(overheads)),
    )


def _train_rounds(observations: Sequence[Observation], family: str) -> FloatArray:
    """Base, per request and per KV token of a round, from the time of all rounds of a step."""
    rows, seconds = [], []
    for observation in observations:
        members = [
            (n, round_kv_tokens(request, choice.drafter))
            for request, choice, n in zip(
                observation.view.requests,
                observation.plan.choices,
                observation.drafted,
                strict=True,
            )
            if choice.drafter is not None and family_of(choice.drafter) == family and n > 0
        ]
        if members and family in observation.timing.draft_seconds:
            drafts = sum(n for n, _ in members)
            reads = sum(n * kv_tokens for n, kv_tokens in members)
            rows.append((float(max(n for n, _ in members)), float(drafts), float(reads)))
            seconds.append(observation.timing.draft_seconds[family])
    return _ramps(np.array(rows), np.array(seconds)) if rows else np.zeros(3)


def _ramps(features: FloatArray, seconds: FloatArray) -> FloatArray:
    """Non-negative weights of least relative error."""
    from sklearn.linear_model import LinearRegression

    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    weight = 1.0 / np.maximum(seconds, np.median(seconds) * 0.1 + 1e-12)
    fit = LinearRegression(fit_intercept=False, positive=True)
    fit.fit(features / scale * weight[:, None], seconds * weight)
    return np.asarray(fit.coef_ / scale, dtype=np.float64)
