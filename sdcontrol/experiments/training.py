"""Learn a policy from recorded runs, and judge what was learnt on requests that it never saw.

Acceptance is cross-validated by request: a model is fitted to the rows of some requests and scored
on those of the others, against the online estimator, which learns along. Step time belongs to whole
steps, so it is cross-validated by stretches of a run. Knows observations; nothing of files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import numpy as np

from sdcontrol.core import BatchView, Observation, Plan
from sdcontrol.errors import ConfigError
from sdcontrol.policies.learned_model import HeldOut, LearnedModel, fit, report

__all__ = ["FEATURES", "SITUATION", "Scores", "TrainingReport", "learn"]

FEATURES = (
    "constant",
    "online estimate here",
    "first position",
    "position",
    "online estimate at the first position",
    "uncertainty of the online estimate",
    "context",
    "tokens generated",
    "temperature",
    "batch size",
    "KV tokens of the batch",
    "prompt tokens in the step",
    "match length",
    "drafter's confidence",
)
"""What the weights of `LearnedModel` are for, in the order of `learned_features.features`."""

SITUATION = ("batch size", "longest context", "KV tokens of the batch", "prompt tokens in the step")
"""What `LearnedModel.low` and `high` bound."""

_FOLDS = 5

Run = Sequence[Observation]


@dataclass(frozen=True, slots=True)
class Scores:
    """On what was held out: means over folds. Errors are medians of |predicted / measured - 1|."""

    num_folds: int
    outcomes: int  # verified draft tokens of held-out requests
    learned_log_loss: float
    online_log_loss: float
    steps: int
    learned_step_error: float
    online_step_error: float


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What was learnt, from what, how well, and where it must not be used."""

    num_runs: int
    num_steps: int
    num_requests: int
    scores: Scores
    weights: Mapping[str, Mapping[str, float]]  # by arm, then by feature
    arms: tuple[str, ...]  # seen drafting; with others the online estimate stands
    limits: Mapping[str, tuple[float, float]]  # lowest, highest; beyond, the online estimate stands

    @property
    def is_better(self) -> bool:
        """Whether held-out acceptance was foreseen better than online."""
        return self.scores.learned_log_loss < self.scores.online_log_loss

    def to_json(self) -> dict[str, object]:
        """Plain numbers."""
        return {"is_better_than_online": self.is_better, **asdict(self)}


def learn(runs: Sequence[Run], max_draft_tokens: int = 8) -> tuple[LearnedModel, TrainingReport]:
    """The model of all runs, and how such a model does on what it did not see.

    Raises `ConfigError` where there is too little to learn from, or to judge by.
    """
    names = sorted({name for run in runs for name in _requests(run)})
    if len(names) < 2:
        raise ConfigError(f"{len(names)} requests; training is judged by request, give at least 2")
    model = fit(runs, max_draft_tokens)
    return model, TrainingReport(
        num_runs=len(runs),
        num_steps=sum(len(run) for run in runs),
        num_requests=sum(len(_requests(run)) for run in runs),
        scores=_cross_validated(runs, names, max_draft_tokens),
        weights={
            arm: dict(zip(FEATURES, map(float, weights), strict=True))
            for arm, weights in sorted(model.weights.items())
        },
        arms=tuple(sorted(model.arms)),
        limits={
            name: (max(float(low), 0.0), float(high))
            for name, low, high in zip(SITUATION, model.low, model.high, strict=True)
        },
    )


def _cross_validated(runs: Sequence[Run], names: Sequence[str], max_draft_tokens: int) -> Scores:
    num_folds = min(_FOLDS, len(names))
    order = np.random.default_rng(0).permutation(len(names))
    acceptance, steps = [], []
    for fold in range(num_folds):
        held = {names[place] for place in order[fold::num_folds]}
        unseen = [_only(run, held) for run in runs]
        if _have_outcomes(unseen):
            model = fit([_only(run, set(names) - held) for run in runs], max_draft_tokens)
            acceptance.append(report(model, unseen, max_draft_tokens))
        others, stretches = _split(runs, fold, num_folds)
        if _have_outcomes(stretches):
            steps.append(report(fit(others, max_draft_tokens), stretches, max_draft_tokens))
    if not acceptance or not steps:
        raise ConfigError("no verified chains of draft tokens; train on traces that drafted")
    return _mean(acceptance, steps)


def _have_outcomes(runs: Sequence[Run]) -> bool:
    """Whether there are verified chains to score acceptance by."""
    return any(seen.accepted_nodes is None and any(seen.proposed) for run in runs for seen in run)


def _mean(acceptance: Sequence[HeldOut], steps: Sequence[HeldOut]) -> Scores:
    outcomes = [found.outcomes for found in acceptance]
    return Scores(
        num_folds=len(acceptance),
        outcomes=sum(outcomes),
        learned_log_loss=float(
            np.average([found.learned_log_loss for found in acceptance], weights=outcomes)
        ),
        online_log_loss=float(
            np.average([found.online_log_loss for found in acceptance], weights=outcomes)
        ),
        steps=sum(found.steps for found in steps),
        learned_step_error=fmean(found.learned_step_error for found in steps),
        online_step_error=fmean(found.online_step_error for found in steps),
    )


def _requests(run: Run) -> set[str]:
    return {request.id for observation in run for request in observation.view.requests}


def _split(runs: Sequence[Run], fold: int, num_folds: int) -> tuple[list[Run], list[Run]]:
    """Of every run its stretch number `fold`, and the rest; the rest comes first."""
    others: list[Run] = []
    stretches: list[Run] = []
    for run in runs:
        bounds = np.linspace(0, len(run), num_folds + 1).astype(int)
        begin, end = int(bounds[fold]), int(bounds[fold + 1])
        others += [[*run[:begin], *run[end:]]]
        stretches += [run[begin:end]]
    return others, stretches


def _only(run: Run, names: Iterable[str]) -> list[Observation]:
    """The run with only the rows of these requests. Times are still those of the whole steps."""
    kept = set(names)
    found = []
    for observation in run:
        rows = [row for row, r in enumerate(observation.view.requests) if r.id in kept]
        if rows:
            found.append(_with_rows(observation, rows))
    return found


def _with_rows(observation: Observation, rows: Sequence[int]) -> Observation:
    view, nodes = observation.view, observation.accepted_nodes
    confidence = observation.confidence
    return replace(
        observation,
        view=BatchView(
            view.step,
            tuple([view.requests[row] for row in rows]),
            view.free_kv_tokens,
            view.prefill_tokens,
        ),
        plan=Plan(tuple([observation.plan.choices[r] for r in rows]), observation.plan.reason),
        drafted=tuple([observation.drafted[row] for row in rows]),
        proposed=tuple([observation.proposed[row] for row in rows]),
        accepted=tuple([observation.accepted[row] for row in rows]),
        emitted=tuple([observation.emitted[row] for row in rows]),
        accepted_nodes=None if nodes is None else tuple([nodes[row] for row in rows]),
        confidence=None if confidence is None else tuple([confidence[row] for row in rows]),
        shadow={
            arm: tuple([seen[row] for row in rows]) for arm, seen in observation.shadow.items()
        },
    )
