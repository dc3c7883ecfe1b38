"""Acceptance and step time learnt offline from observations, as a few arrays.

Knows nothing of plans. Regressors of scikit-learn are fitted by `train` and distilled: acceptance is
a logistic regression per arm on top of the online estimate, step time a non-negative combination of
ramps. So inference is a few small matrix products per step. Files are skops; nothing is unpickled,
and a file that holds any type beyond arrays, numbers and strings is refused.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sdcontrol.core import BatchView, Belief, FloatArray, Observation
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.estimators.price import step_seconds
from sdcontrol.policies.learned_cost import KNOTS, LearnedCost, fit_cost
from sdcontrol.policies.learned_features import features, hazards_of

__all__ = ["HeldOut", "LearnedCost", "LearnedModel", "fit", "load", "report", "save", "train"]

_VERSION = 2
_TRUSTED: tuple[str, ...] = ()  # types that a file may hold beyond skops's own safe ones
_LEAST_OUTCOMES = 50  # per arm; with fewer the online estimate stands
_MARGIN = 0.25  # of the trained range, beyond which a step is unlike anything seen


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """What `train` found. `low` and `high` bound the steps that it was found in."""

    cost: LearnedCost
    weights: Mapping[str, FloatArray]  # by arm, for `features`
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
                hazards = hazards_of(rows)
                scores = features(view, arm, hazards) @ self.weights[arm]
                learnt = np.cumprod(1.0 / (1.0 + np.exp(-scores)), axis=1)
                corrected[arm] = np.where(rows > 0.0, learnt, 0.0)
        return corrected


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How a model predicts runs that it was not fitted to, beside what is learnt online."""

    outcomes: int  # verified draft tokens
    learned_log_loss: float  # mean per outcome
    online_log_loss: float
    steps: int
    learned_step_error: float  # median of |predicted / measured - 1|
    online_step_error: float  # the corrected cost's


def train(observations: Sequence[Observation], max_draft_tokens: int = 8) -> LearnedModel:
    """`fit` to a single run."""
    return fit([observations], max_draft_tokens)


def fit(runs: Iterable[Sequence[Observation]], max_draft_tokens: int = 8) -> LearnedModel:
    """Fit acceptance and step time to runs, the observations of each in order.

    The online estimator is run over each of them afresh, so that each outcome is paired with what
    was believed before it. Only drafts that verification reached are outcomes. Raises
    `ConfigError` where there is too little to learn from.
    """
    kept = [list(run) for run in runs]
    timed = [o for run in kept for o in run if _is_timed(o)]
    if len(timed) < 2 * KNOTS:
        raise ConfigError(
            f"{len(timed)} observations with requests and a finite time; training needs at least "
            f"{2 * KNOTS}"
        )
    situations = np.array([_situation(o.view) for o in timed])
    low, high = situations.min(axis=0), situations.max(axis=0)
    spare = _MARGIN * np.maximum(high - low, np.maximum(high, 1.0) * 0.5)
    drafted = {c.drafter for o in timed for c in o.plan.choices if c.drafter is not None}
    return LearnedModel(
        cost=fit_cost(timed),
        weights=_train_acceptance(kept, max_draft_tokens),
        low=low - spare,
        high=high + spare,
        arms=frozenset(drafted | {arm for o in timed for arm in o.shadow}),
    )


def report(
    model: LearnedModel, runs: Iterable[Sequence[Observation]], max_draft_tokens: int = 8
) -> HeldOut:
    """Score `model` on runs that it was not fitted to; estimators learn along, afresh in each."""
    losses: list[tuple[float, float]] = []
    errors: list[tuple[float, float]] = []
    for run in runs:
        estimator, online = AcceptanceEstimator(max_draft_tokens), OnlineCost()
        for o in run:
            if _is_timed(o):
                costs = (
                    step_seconds(o.view, o.plan, model.cost),
                    step_seconds(o.view, o.plan, online),
                )
                learned, corrected = (abs(c / o.timing.total_seconds - 1.0) for c in costs)
                errors.append((learned, corrected))
            before = estimator.survival(o.view, max_draft_tokens)
            after = model.survival(o.view, Belief(before, online))
            for arm, rows in before.items() if o.accepted_nodes is None else ():
                pair = hazards_of(after[arm]), hazards_of(rows)
                for r, j, is_accepted in _outcomes(o, arm, rows.shape[1]):
                    chances = (h[r, j] if is_accepted else 1.0 - h[r, j] for h in pair)
                    learned, corrected = (-float(np.log(chance)) for chance in chances)
                    losses.append((learned, corrected))
            estimator.update(o)
            online.update(o)
    if not losses or not errors:
        raise ConfigError("no verified drafts with a finite time; report on runs that drafted")
    loss, error = np.mean(losses, axis=0), np.median(errors, axis=0)
    return HeldOut(
        len(losses), float(loss[0]), float(loss[1]), len(errors), float(error[0]), float(error[1])
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


def _train_acceptance(
    runs: Sequence[Sequence[Observation]], max_draft_tokens: int
) -> dict[str, FloatArray]:
    from sklearn.linear_model import LogisticRegression

    told: dict[str, list[FloatArray]] = defaultdict(list)
    outcomes: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        estimator = AcceptanceEstimator(max_draft_tokens)
        for observation in run:
            survival = estimator.survival(observation.view, max_draft_tokens)
            for arm, rows in survival.items() if observation.accepted_nodes is None else ():
                found = _outcomes(observation, arm, rows.shape[1])
                if found:
                    table = features(observation.view, arm, hazards_of(rows))
                    told[arm] += [table[r, j] for r, j, _ in found]
                    outcomes[arm] += [float(is_accepted) for _, _, is_accepted in found]
            estimator.update(observation)
    weights = {}
    for arm, seen in outcomes.items():
        if len(seen) >= _LEAST_OUTCOMES and 0.0 < np.mean(seen) < 1.0:
            model = LogisticRegression(fit_intercept=False, C=10.0, max_iter=500)
            model.fit(np.array(told[arm]), np.array(seen))
            weights[arm] = np.asarray(model.coef_[0], dtype=np.float64)
    return weights


def _outcomes(observation: Observation, arm: str, depth: int) -> list[tuple[int, int, bool]]:
    """Request, position and outcome of every draft token of `arm` that verification reached."""
    return [
        (r, j, j < accepted)
        for r, (choice, proposed, accepted) in enumerate(
            zip(observation.plan.choices, observation.proposed, observation.accepted, strict=True)
        )
        if choice.drafter == arm
        for j in range(min(proposed, accepted + 1, depth))
    ]
