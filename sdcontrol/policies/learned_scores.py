"""How well a learned policy foresees runs that it was not fitted to, beside what is learnt online.

What is scored is the belief that the policy would use: where a step is unlike the training data, that
is the online one. Both are asked before each step, with the same outcomes and the same steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sdcontrol.core import Cost, FloatArray
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.outcomes import DEPTH
from sdcontrol.policies.learned import Learned
from sdcontrol.policies.learned_acceptance import log_loss, reached
from sdcontrol.policies.learned_cost import Run, is_timed
from sdcontrol.policies.learned_features import hazards_of
from sdcontrol.policies.learned_model import LearnedModel
from sdcontrol.policies.learned_trust import observed_seconds

__all__ = ["HeldOut", "losses", "report", "step_errors", "summary"]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Of runs that a model was not fitted to.

    A step's error is its log-ratio of measured to forecast seconds. The median says how close the
    usual step is; the mean counts the far ones too, from which wrong plans come.
    """

    outcomes: int  # verified draft tokens
    learned_log_loss: float  # mean per outcome
    online_log_loss: float
    steps: int
    learned_step_error: float  # median of |measured / forecast - 1|
    online_step_error: float  # the corrected cost's
    learned_step_log_error: float  # mean of |log(measured / forecast)|
    online_step_log_error: float


def report(model: LearnedModel, runs: Iterable[Run], max_draft_tokens: int = DEPTH) -> HeldOut:
    """Score `model` on runs that it was not fitted to; estimators learn along, afresh in each.

    Raises `ConfigError` where there is nothing to score.
    """
    kept = list(runs)
    loss = [losses(model, run, max_draft_tokens) for run in kept]
    errors = [step_errors(model, run) for run in kept]
    nothing = np.empty((0, 2))
    return summary(np.concatenate([nothing, *loss]), np.concatenate([nothing, *errors]))


def summary(loss: FloatArray, errors: FloatArray) -> HeldOut:
    """Of `losses` and `step_errors`, put together."""
    scored = errors[np.isfinite(errors).all(axis=1)]
    if not len(loss) or not len(scored):
        raise ConfigError("no verified drafts with a finite time; report on runs that drafted")
    learned_loss, online_loss = loss.mean(axis=0).tolist()
    learned_median, online_median = np.median(np.abs(np.expm1(scored)), axis=0).tolist()
    learned_mean, online_mean = np.abs(scored).mean(axis=0).tolist()
    return HeldOut(
        outcomes=len(loss),
        learned_log_loss=learned_loss,
        online_log_loss=online_loss,
        steps=len(scored),
        learned_step_error=learned_median,
        online_step_error=online_median,
        learned_step_log_error=learned_mean,
        online_step_log_error=online_mean,
    )


def losses(model: LearnedModel, run: Run, max_draft_tokens: int = DEPTH) -> FloatArray:
    """Log loss of every verified draft token, `[tokens, 2]`: learned, online."""
    estimator, policy = AcceptanceEstimator(max_draft_tokens), Learned(model)
    found: list[FloatArray] = []
    for observation in run:
        view = observation.view
        before = estimator.survival(view, max_draft_tokens)
        after = policy.survival(view, before)
        for arm, rows in before.items() if observation.accepted_nodes is None else ():
            places = list(reached(observation, arm, rows.shape[1]))
            if places:
                r, j, accepted = np.array(places).T
                pair = hazards_of(after[arm])[r, j], hazards_of(rows)[r, j]
                found.append(np.column_stack([log_loss(h, accepted) for h in pair]))
        estimator.update(observation)
        policy.update(observation)
    return np.concatenate(found) if found else np.empty((0, 2))


def step_errors(model: LearnedModel, run: Run, prior: Cost | None = None) -> FloatArray:
    """log(measured / forecast) of every step, `[steps, 2]`: learned, and online from `prior`.

    NaN for steps without a time, and for the first, before which nobody can know the machine.
    """
    online, policy = OnlineCost(prior), Learned(model)
    errors = np.full((len(run), 2), np.nan)
    is_first = True
    for row, observation in zip(errors, run, strict=True):
        if is_timed(observation):
            costs = policy.cost(observation.view, online), online
            forecasts = [observed_seconds(observation, cost) for cost in costs]
            if not is_first and min(forecasts) > 0.0:
                row[:] = np.log(observation.timing.total_seconds / np.array(forecasts))
            is_first = False
        online.update(observation)
        policy.update(observation)
    return errors
