"""Acceptance learnt offline: per arm a logistic regression on top of the online estimate.

Knows nothing of costs, plans or files. The online estimator is run over each run afresh, so that every
outcome is paired with what was believed before it. The log odds lie half way between the online estimate's
and the regression's: with other texts both err, differently. An arm keeps weights only where, on requests
that they were not fitted to, they beat the online estimate by more than a standard error. They are used
by `estimators/correction`, in the same compiled call as the plan; scikit-learn is needed to fit alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import columns_of
from sdcontrol.core import BatchView, FloatArray, Observation
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.estimators.correction import beside_of, correct
from sdcontrol.estimators.survival import Survival
from sdcontrol.extras import needed
from sdcontrol.policies.learned_features import NUM_FEATURES, ODDS, features, hazards_of

__all__ = ["ArmWeights", "Corrector", "Outcome", "fit_arms", "log_loss", "outcomes_of", "reached"]

IntArray = NDArray[np.int64]

# Per arm, of those accepted and of those not; with fewer the online estimate stands.
_LEAST_OUTCOMES = 10 * NUM_FEATURES
_LEAST_REQUESTS = 4
_FOLDS = 5
_STRENGTHS = (0.03, 0.1, 0.3)  # C of the regression: how far weights may go
_ODDS_SCALE = 30.0  # the online estimate's own weight is not held back
_SHARE = 0.5  # of the regression in the log odds; the rest is the online estimate's
_MARGIN = 0.25  # of a feature's trained range, beyond which a request is unlike any seen


@dataclass(frozen=True, slots=True)
class ArmWeights:
    """Of one arm: for `features`, and between which bounds they were found."""

    weights: FloatArray  # [features]
    low: FloatArray
    high: FloatArray

    def hazards(self, told: FloatArray, online: FloatArray) -> FloatArray:
        """Of `features` `[..., features]`; what is unlike anything trained on keeps `online` `[...]`."""
        is_known = ((told >= self.low) & (told <= self.high)).all(axis=-1)
        return np.where(is_known, _chances(told @ self.weights), online)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One verified draft token, and what was known before it."""

    request: tuple[int, str]  # number of its run, and id: traces name their requests alike
    features: FloatArray
    online: float  # hazard
    is_accepted: bool


class Corrector:
    """What was learnt, on top of an online estimate."""

    def __init__(self, learned: Mapping[str, ArmWeights]) -> None:
        self._learned = learned
        self._tables: dict[tuple[str, ...], FloatArray] = {}

    def corrected(
        self, view: BatchView, online: Mapping[str, FloatArray]
    ) -> Mapping[str, FloatArray]:
        """Survival by arm, `[requests, K]`, from the online ones; unchanged for arms without weights.

        Our own estimator's is corrected where it is computed.
        """
        if isinstance(online, Survival):
            return online.corrected(self._weights(online.arms))
        survival, columns, beside = dict(online), columns_of(view), beside_of(view)
        for row, arm in enumerate(columns.arms):
            if arm in survival and survival[arm].size:
                here = columns.match_tokens[[row]], columns.confidence[[row]]
                table = np.array([survival[arm]], np.float64)
                correction = self._weights((arm,)), beside
                correct(table, (columns.context_tokens, *here), correction)
                survival[arm] = table[0]
        return survival

    def _weights(self, arms: tuple[str, ...]) -> FloatArray:
        """See `Correction`."""
        table = self._tables.get(arms)
        if table is None:
            table = self._tables[arms] = np.full((len(arms), 3, NUM_FEATURES), np.nan)
            for row, arm in enumerate(arms):
                found = self._learned.get(arm)
                if found is not None:
                    table[row] = found.weights, found.low, found.high
        return table


def outcomes_of(
    run: Sequence[Observation], max_draft_tokens: int, number: int = 0
) -> Iterator[tuple[str, Outcome]]:
    """Arm and outcome of every draft token that verification reached; trees are left out.

    Runs of one `number` decoded the same requests.
    """
    estimator = AcceptanceEstimator(max_draft_tokens)
    for observation in run:
        view, survival = observation.view, estimator.survival(observation.view, max_draft_tokens)
        for arm, rows in survival.items() if observation.accepted_nodes is None else ():
            found = list(reached(observation, arm, rows.shape[1]))
            if not found:
                continue
            r, j, _ = np.array(found).T
            hazards = hazards_of(rows)
            told = features(view, arm, hazards)[r, j]  # a copy: the rest may go
            for (row, _, is_accepted), own, hazard in zip(found, told, hazards[r, j], strict=True):
                name = number, view.requests[row].id
                if np.isfinite(own).all():  # else a drafter said what no number can be
                    yield arm, Outcome(name, own, float(hazard), is_accepted)
        estimator.update(observation)


def reached(observation: Observation, arm: str, depth: int) -> Iterator[tuple[int, int, bool]]:
    """Request, position and outcome of every draft token of `arm` that verification reached."""
    columns = observation.plan.choices, observation.proposed, observation.accepted
    for r, (choice, proposed, accepted) in enumerate(zip(*columns, strict=True)):
        if choice.drafter == arm:
            for j in range(min(proposed, accepted + 1, depth)):
                yield r, j, j < accepted


def fit_arms(seen: Iterable[tuple[str, Outcome]]) -> dict[str, ArmWeights]:
    """By arm, from its outcomes; none where the online estimate alone foresees better."""
    outcomes: Mapping[str, list[Outcome]] = defaultdict(list)
    for arm, outcome in seen:
        outcomes[arm].append(outcome)
    fitted = {arm: _fit_arm(found) for arm, found in outcomes.items()}
    return {arm: learned for arm, learned in fitted.items() if learned is not None}


def log_loss(hazards: FloatArray, is_accepted: FloatArray) -> FloatArray:
    """Of every outcome."""
    return np.asarray(-np.log(np.where(is_accepted > 0.0, hazards, 1.0 - hazards)))


def _fit_arm(seen: Sequence[Outcome]) -> ArmWeights | None:
    told = np.array([outcome.features for outcome in seen])
    accepted = np.array([outcome.is_accepted for outcome in seen], np.float64)
    index = {name: place for place, name in enumerate(sorted({o.request for o in seen}))}
    request = np.array([index[outcome.request] for outcome in seen], np.int64)
    rarer = min(accepted.sum(), len(seen) - accepted.sum())
    if rarer < _LEAST_OUTCOMES or len(index) < _LEAST_REQUESTS:
        return None
    online = log_loss(np.array([outcome.online for outcome in seen]), accepted)
    gains = {
        strength: _sure_gain(online - _held_out_losses(told, accepted, request, strength), request)
        for strength in _STRENGTHS
    }
    strength = max(gains, key=lambda c: gains[c])
    if gains[strength] <= 0.0:
        return None
    low, high = told.min(axis=0), told.max(axis=0)
    spare = _MARGIN * (high - low)
    return ArmWeights(_regressed(told, accepted, strength), low - spare, high + spare)


def _held_out_losses(
    told: FloatArray, accepted: FloatArray, request: IntArray, strength: float
) -> FloatArray:
    """Of every outcome, by weights that its request had no part in."""
    fold = np.random.default_rng(0).permutation(int(request.max()) + 1)[request] % _FOLDS
    odds = told[:, ODDS].copy()
    for held in np.unique(fold):
        rest = fold != held
        if np.ptp(accepted[rest]) > 0.0:
            odds[~rest] = told[~rest] @ _regressed(told[rest], accepted[rest], strength)
    return log_loss(_chances(odds), accepted)


def _sure_gain(gains: FloatArray, request: IntArray) -> float:
    """The mean less a standard error; outcomes of one request are not independent."""
    by_request = np.bincount(request, gains)
    spread = float(by_request.std(ddof=1)) * len(by_request) ** 0.5
    return float(gains.sum() - spread) / len(gains)


def _regressed(told: FloatArray, accepted: FloatArray, strength: float) -> FloatArray:
    with needed():
        from sklearn.linear_model import LogisticRegression

    scale = np.ones(told.shape[1])
    scale[ODDS] = _ODDS_SCALE
    model = LogisticRegression(fit_intercept=False, C=strength, max_iter=500)
    model.fit(told * scale, accepted)
    weights = np.asarray(_SHARE * model.coef_[0] * scale, dtype=np.float64)
    weights[ODDS] += 1.0 - _SHARE
    return weights


def _chances(odds: FloatArray) -> FloatArray:
    return np.asarray(np.clip(1.0 / (1.0 + np.exp(-odds)), 0.01, 0.99))
