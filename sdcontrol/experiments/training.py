"""Learn a policy from recorded runs, and judge what was learnt on what it never saw.

Acceptance is cross-validated by request: weights are fitted to the draft tokens of some requests and
scored on those of the others. Step time belongs to whole steps, so it is cross-validated by stretches
of the runs. The online estimators learn along, from the beginning of each run. Knows observations;
nothing of files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

import numpy as np

from sdcontrol.core import FloatArray, Observation
from sdcontrol.errors import ConfigError
from sdcontrol.policies.learned_acceptance import (
    ArmWeights,
    Outcome,
    fit_arms,
    log_loss,
    outcomes_of,
)
from sdcontrol.policies.learned_cost import fit_cost, timed_steps
from sdcontrol.policies.learned_model import LearnedModel, fit, numbered
from sdcontrol.policies.learned_scores import HeldOut, step_errors, summary
from sdcontrol.policies.learned_trust import stretches, trust_of

__all__ = ["FEATURES", "SITUATION", "TrainingReport", "learn"]

FEATURES = (
    "constant",
    "online estimate here",
    "first position",
    "position",
    "online estimate at the first position",
    "uncertainty of the online estimate",
    "context",
    "tokens generated",
    "batch size",
    "KV tokens of the batch",
    "prompt tokens in the step",
    "temperature",
    "match length",
    "drafter's confidence",
)
"""What the weights of `ArmWeights` are for, in the order of `learned_features.features`."""

SITUATION = ("batch size", "longest context", "KV tokens of the batch", "prompt tokens in the step")
"""What `LearnedModel.low` and `high` bound."""

_FOLDS = 5

Run = Sequence[Observation]


@dataclass(frozen=True, slots=True)
class StepPrices:
    """What a step was learnt to take, seconds at the training runs' usual speed."""

    forward: float  # of one token of one request, at the shortest context
    per_further_token: float  # on average up to the most tokens of the training runs
    per_request: float
    per_1000_kv_tokens: float
    rounds: Mapping[str, float]  # by family, of one request
    is_used: bool  # beside the cost corrected online, in equal parts


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What was learnt, from what, how well, and where it must not be used."""

    num_runs: int
    num_steps: int
    num_requests: int
    num_drawn_steps: int  # that acceptance was learnt from too
    num_folds: int
    scores: HeldOut
    weights: Mapping[str, Mapping[str, float]]  # by arm, then by feature
    prices: StepPrices
    arms: tuple[str, ...]  # seen drafting; of others the online estimate stands
    limits: Mapping[str, tuple[float, float]]  # lowest, highest; beyond, the online estimate stands

    @property
    def is_better(self) -> bool:
        """Whether held-out acceptance was foreseen better than online."""
        return self.scores.learned_log_loss < self.scores.online_log_loss

    @property
    def prices_better(self) -> bool:
        """Whether held-out steps were priced better than online, by the mean log error."""
        return self.scores.learned_step_log_error < self.scores.online_step_log_error

    def to_json(self) -> dict[str, object]:
        """Plain numbers."""
        return {
            "is_better_than_online": self.is_better,
            "prices_better_than_online": self.prices_better,
            **asdict(self),
        }


def learn(
    runs: Sequence[Run], max_draft_tokens: int = 8, drawn: Sequence[Sequence[Run]] = ()
) -> tuple[LearnedModel, TrainingReport]:
    """The model of all runs, and how such a model does on what it did not see.

    Of `drawn`, by run its requests decoded again (`traces.drawn`), acceptance is learnt too; what is judged was
    recorded. Requests of different runs are different ones, whatever they are called. Raises `ConfigError` where
    there is too little to learn from, or to judge by.
    """
    names = sorted({(number, name) for number, run in enumerate(runs) for name in _requests(run)})
    again = numbered(drawn)
    if len(names) < 2:
        raise ConfigError(f"{len(names)} requests; training is judged by request, give at least 2")
    model = fit(runs, max_draft_tokens, drawn)
    return model, TrainingReport(
        num_runs=len(runs),
        num_steps=sum(len(run) for run in runs),
        num_requests=len(names),
        num_drawn_steps=sum(len(run) for _, run in again),
        num_folds=_FOLDS,
        scores=summary(
            _losses(
                _outcomes(enumerate(runs), max_draft_tokens),
                _outcomes(again, max_draft_tokens),
                names,
            ),
            _errors(model, runs),
        ),
        weights={
            arm: dict(zip(FEATURES, map(float, learned.weights), strict=True))
            for arm, learned in sorted(model.acceptance.items())
        },
        prices=_prices(model),
        arms=_arms_of(runs),
        limits={
            name: (max(float(low), 0.0), float(high))
            for name, low, high in zip(SITUATION, model.low, model.high, strict=True)
        },
    )


def _arms_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """Those that drafted, or were scored in shadow."""
    seen = [observation for run in runs for observation in run]
    drafted = {c.drafter for o in seen for c in o.plan.choices if c.drafter is not None}
    return tuple(sorted(drafted | {arm for o in seen for arm in o.shadow}))


def _outcomes(runs: Iterable[tuple[int, Run]], max_draft_tokens: int) -> list[tuple[str, Outcome]]:
    return [pair for number, run in runs for pair in outcomes_of(run, max_draft_tokens, number)]


def _losses(
    seen: Sequence[tuple[str, Outcome]],
    drawn: Sequence[tuple[str, Outcome]],
    names: Sequence[tuple[int, str]],
) -> FloatArray:
    """Of every draft token seen, `[tokens, 2]`: learned from other requests, and online."""
    if not seen:
        raise ConfigError("no verified chains of draft tokens; train on traces that drafted")
    order = np.random.default_rng(0).permutation(len(names))
    fold_of = {names[place]: number % _FOLDS for number, place in enumerate(order)}
    found = []
    for fold in range(_FOLDS):
        weights = fit_arms(p for p in chain(seen, drawn) if fold_of.get(p[1].request) != fold)
        held = [pair for pair in seen if fold_of[pair[1].request] == fold]
        found += [_pair_of_losses(outcome, weights.get(arm)) for arm, outcome in held]
    return np.array(found)


def _pair_of_losses(outcome: Outcome, learned: ArmWeights | None) -> tuple[float, float]:
    online = np.array(outcome.online)
    hazard = online if learned is None else learned.hazards(outcome.features, online)
    first, second = log_loss(
        np.array([hazard, online]), np.array([outcome.is_accepted] * 2)
    ).tolist()
    return first, second


def _errors(model: LearnedModel, runs: Sequence[Run]) -> FloatArray:
    """Of every step that was timed, `[steps, 2]`: by a cost that was fitted to other stretches, and online."""
    timed = timed_steps(runs)
    found = [np.empty((0, 2))]
    for rest, held in stretches(timed, _FOLDS):
        prices, error = trust_of(rest)
        fitted = replace(model, cost=fit_cost(rest), prices=prices, cost_error=error)
        found += [
            step_errors(fitted, run)[span.start : span.stop]
            for run, span in zip(timed, held, strict=True)
        ]
    return np.concatenate(found)


def _prices(model: LearnedModel) -> StepPrices:
    """The coefficients as prices that can be read."""
    cost, most_tokens = model.cost, float(max(model.cost.knots[-1], 2.0))
    one, most = (float(cost.verify_seconds(tokens, 0.0, 1)) for tokens in (1.0, most_tokens))
    return StepPrices(
        forward=one,
        per_further_token=(most - one) / (most_tokens - 1.0),
        per_request=float(cost.verify[2]),
        per_1000_kv_tokens=1000.0 * float(cost.verify[1]),
        rounds={family: float(price[0] + price[1]) for family, price in cost.rounds.items()},
        is_used=model.prices,
    )


def _requests(run: Run) -> set[str]:
    return {request.id for observation in run for request in observation.view.requests}
