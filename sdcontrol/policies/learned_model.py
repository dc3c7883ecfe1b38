"""Acceptance and step time learnt offline from observations, as a few arrays.

Knows nothing of plans. Regressors of scikit-learn are fitted by `train` and distilled: acceptance is
a logistic regression per arm on top of the online estimate, step time a non-negative combination of
ramps. So inference is a few small matrix products per step. Files are skops; nothing is unpickled,
and a file that holds any type beyond arrays, numbers and strings is refused.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sdcontrol.core import BatchView, Belief, FloatArray, Observation, RequestView, family_of
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.estimators.price import round_kv_tokens

__all__ = ["LearnedCost", "LearnedModel", "load", "save", "train"]

_VERSION = 1
_TRUSTED: tuple[str, ...] = ()  # types that a file may hold beyond skops's own safe ones
_KNOTS = 6
_LEAST_OUTCOMES = 50  # per arm; with fewer the online estimate stands
_MARGIN = 0.25  # of the trained range, beyond which a step is unlike anything seen


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


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """What `train` found. `low` and `high` bound the steps that it was found in."""

    cost: LearnedCost
    weights: Mapping[str, FloatArray]  # by arm, for `_features`
    low: FloatArray  # [4], of `_situation`
    high: FloatArray
    arms: frozenset[str] = field(default_factory=frozenset)  # seen drafting

    def knows(self, view: BatchView) -> bool:
        """Whether the step is like those it was trained on: arms, batch, context, prefill."""
        offered = {arm for request in view.requests for arm in request.drafters}
        situation = _situation(view)
        inside = (situation >= self.low).all() and (situation <= self.high).all()
        return bool(inside) and offered <= self.arms

    def survival(self, view: BatchView, belief: Belief) -> dict[str, FloatArray]:
        """`belief.survival` corrected by what was learnt; unchanged for arms without weights."""
        corrected = dict(belief.survival)
        for arm, rows in belief.survival.items():
            if arm in self.weights and rows.size:
                hazards = _hazards(rows)
                scores = _features(view, arm, hazards) @ self.weights[arm]
                learnt = np.cumprod(1.0 / (1.0 + np.exp(-scores)), axis=1)
                corrected[arm] = np.where(rows > 0.0, learnt, 0.0)
        return corrected


def train(observations: Sequence[Observation], max_draft_tokens: int = 8) -> LearnedModel:
    """Fit acceptance and step time. Raises `ConfigError` where there is too little to learn from.

    The online estimator is run over the observations in order, so that each outcome is paired with
    what was believed before it. Only drafts that verification reached are outcomes.
    """
    timed = [o for o in observations if _is_timed(o)]
    if len(timed) < 2 * _KNOTS:
        raise ConfigError(
            f"{len(timed)} observations with requests and a finite time; training needs at least "
            f"{2 * _KNOTS}"
        )
    situations = np.array([_situation(o.view) for o in timed])
    low, high = situations.min(axis=0), situations.max(axis=0)
    spare = _MARGIN * np.maximum(high - low, np.maximum(high, 1.0) * 0.5)
    drafted = {c.drafter for o in timed for c in o.plan.choices if c.drafter is not None}
    return LearnedModel(
        cost=_train_cost(timed),
        weights=_train_acceptance(timed, max_draft_tokens),
        low=low - spare,
        high=high + spare,
        arms=frozenset(drafted | {arm for o in timed for arm in o.shadow}),
    )


def save(model: LearnedModel, path: Path) -> None:
    """Write `model` as a skops file."""
    from skops.io import dump

    cost = model.cost
    state: dict[str, object] = {
        "version": _VERSION,
        "knots": cost.knots,
        "verify": cost.verify,
        "rounds": dict(cost.rounds),
        "overhead": float(cost.overhead),
        "weights": dict(model.weights),
        "low": model.low,
        "high": model.high,
        "arms": sorted(model.arms),
    }
    dump(state, path)


def load(path: Path) -> LearnedModel:
    """Read what `save` wrote. Raises `ConfigError` for anything else, before it is built."""
    from skops.io import get_untrusted_types
    from skops.io import load as read

    if not Path(path).is_file():
        raise ConfigError(f"no learned model at {str(path)!r}; train one and save it there")
    try:
        foreign = sorted(set(get_untrusted_types(file=path)) - set(_TRUSTED))
        if foreign:
            raise ConfigError(f"{str(path)!r} holds {foreign}; only arrays and numbers are loaded")
        state = read(path, trusted=list(_TRUSTED))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{str(path)!r} is not a learned model: {error}") from error
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise ConfigError(
            f"{str(path)!r} is no learned model of version {_VERSION}; train it again"
        )
    cost = LearnedCost(state["knots"], state["verify"], state["rounds"], state["overhead"])
    return LearnedModel(
        cost, state["weights"], state["low"], state["high"], frozenset(state["arms"])
    )


def _situation(view: BatchView) -> FloatArray:
    contexts = [request.context_tokens for request in view.requests] or [0]
    return np.array([len(view.requests), max(contexts), sum(contexts), view.prefill_tokens], float)


def _is_timed(observation: Observation) -> bool:
    seconds = observation.timing.total_seconds
    return bool(observation.view.requests) and bool(np.isfinite(seconds)) and seconds > 0.0


def _hazards(survival: FloatArray) -> FloatArray:
    """P(position j is accepted | those before it are), `[requests, K]`, inside (0, 1)."""
    before = np.hstack([np.ones((len(survival), 1)), survival[:, :-1]])
    return np.clip(survival / np.maximum(before, 1e-9), 0.01, 0.99)


def _features(view: BatchView, arm: str, hazards: FloatArray) -> FloatArray:
    """`[requests, K, features]`: what was believed, where in the draft, and what request it is."""
    requests, depth = hazards.shape
    facts = np.array([_facts(request, arm, len(view.requests)) for request in view.requests])
    features = np.empty((requests, depth, 4 + facts.shape[1]))
    position = np.arange(depth)
    features[..., 0] = 1.0
    features[..., 1] = np.log(hazards / (1.0 - hazards))
    features[..., 2] = position == 0
    features[..., 3] = position / 8.0
    features[..., 4:] = facts[:, None]
    return features


def _facts(request: RequestView, arm: str, batch: int) -> tuple[float, ...]:
    hint = request.hints.get(arm)
    match = hint.match_tokens if hint is not None else None
    confidence = hint.confidence if hint is not None else None
    return (
        np.log1p(request.context_tokens) / 10.0,
        np.log1p(request.generated_tokens) / 10.0,
        request.temperature,
        np.log1p(batch) / 5.0,
        0.0 if match is None else np.log1p(match) / 3.0,
        0.0 if confidence is None else confidence - 0.5,
    )


def _train_acceptance(
    observations: Sequence[Observation], max_draft_tokens: int
) -> dict[str, FloatArray]:
    from sklearn.linear_model import LogisticRegression

    estimator = AcceptanceEstimator(max_draft_tokens)
    features: dict[str, list[FloatArray]] = defaultdict(list)
    outcomes: dict[str, list[float]] = defaultdict(list)
    for observation in observations:
        survival = estimator.survival(observation.view, max_draft_tokens)
        if observation.accepted_nodes is None:
            for arm, rows in survival.items():
                _collect(observation, arm, rows, features[arm], outcomes[arm])
        estimator.update(observation)
    weights = {}
    for arm, seen in outcomes.items():
        if len(seen) >= _LEAST_OUTCOMES and 0.0 < np.mean(seen) < 1.0:
            fit = LogisticRegression(fit_intercept=False, C=10.0, max_iter=500)
            fit.fit(np.array(features[arm]), np.array(seen))
            weights[arm] = np.asarray(fit.coef_[0], dtype=np.float64)
    return weights


def _collect(
    observation: Observation,
    arm: str,
    survival: FloatArray,
    features: list[FloatArray],
    outcomes: list[float],
) -> None:
    drafting = [r for r, c in enumerate(observation.plan.choices) if c.drafter == arm]
    if not drafting:
        return
    table = _features(observation.view, arm, _hazards(survival))
    for r in drafting:
        accepted = observation.accepted[r]
        for j in range(min(observation.proposed[r], accepted + 1, table.shape[1])):
            features.append(table[r, j])
            outcomes.append(float(j < accepted))


def _train_cost(observations: Sequence[Observation]) -> LearnedCost:
    tokens = np.array(
        [len(o.view.requests) + o.view.prefill_tokens + sum(o.proposed) for o in observations]
    ).astype(np.float64)
    knots = np.unique(np.quantile(np.append(tokens, 0.0), np.linspace(0.0, 0.9, _KNOTS)))
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
