"""How far to trust a learned step time: as far as it foresees steps that it was not fitted to.

Knows costs and observations; nothing of acceptance, policies or files. Both forecasts of a step are
made before it, for the work that it did, and learn from it afterwards, from the run's beginning on.
"""

from collections.abc import Sequence

import numpy as np

from sdcontrol.core import Choice, Cost, FloatArray, Observation, Plan
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.estimators.loads import verify_load
from sdcontrol.estimators.price import (
    catch_up_seconds,
    catch_up_tokens,
    drafting_seconds,
    forward_seconds,
)
from sdcontrol.policies.learned_cost import LearnedCost, Run, fit_cost, timed_steps
from sdcontrol.policies.learned_speed import MixedCost, Speeds

__all__ = ["observed_seconds", "stretches", "trust_of"]

_FOLDS = 3
_TOLERANCE = 1.05  # of the online error: held-out stretches are of runs that it has learnt from


def observed_seconds(observation: Observation, cost: Cost) -> float:
    """What `cost` asks for the work that was done: what was drafted, what was submitted."""
    view, load = observation.view, verify_load(observation)
    done = Plan(
        tuple(
            Choice.off() if choice.drafter is None else Choice.of(choice.drafter, n)
            for choice, n in zip(observation.plan.choices, observation.drafted, strict=True)
        )
    )
    seconds = forward_seconds(
        cost, load.num_tokens, load.kv_tokens, load.num_requests, load.longest_draft
    )
    drafting = sum(drafting_seconds(view, done, cost).values())
    catching_up = sum(
        catch_up_seconds(cost, family, tokens)
        for family, tokens in catch_up_tokens(view, done).items()
    )
    return seconds + drafting + catching_up + cost.overhead_seconds()


def stretches(runs: Sequence[Run], num_folds: int) -> list[tuple[list[Run], list[range]]]:
    """By fold: the runs without one stretch of each, and which steps those stretches are.

    Folds without which nothing is left are left out.
    """
    folds = []
    for fold in range(num_folds):
        rest: list[Run] = []
        held = []
        for run in runs:
            bounds = np.linspace(0, len(run), num_folds + 1).astype(int)
            begin, end = int(bounds[fold]), int(bounds[fold + 1])
            rest += [run[:begin], run[end:]]
            held.append(range(begin, end))
        folds.append(([part for part in rest if part], held))
    return [(rest, held) for rest, held in folds if rest]


def trust_of(runs: Sequence[Run]) -> tuple[bool, float]:
    """Whether the learned forecast should stand beside the online one, and its own error.

    It should unless the mean of both was clearly worse on held-out stretches than the online forecast,
    which has learnt from all that came before. The error is the mean absolute log-ratio of measured to
    learned verifications there.
    """
    timed = timed_steps(runs)
    found = [np.empty((0, 5))]
    for rest, held in stretches(timed, _FOLDS):
        cost = fit_cost(rest)
        found += [
            _forecasts(cost, run)[span.start : span.stop]
            for run, span in zip(timed, held, strict=True)
        ]
    table = np.concatenate(found)
    measured, online, learned, weight, surprise = table[np.isfinite(table).all(axis=1)].T
    if not len(measured):
        return False, 0.0
    alone = np.abs(measured - online).mean()
    together = np.abs(measured - online - weight * (learned - online)).mean()
    return bool(together <= _TOLERANCE * alone), float(np.abs(surprise).mean())


def _forecasts(cost: LearnedCost, run: Run) -> FloatArray:
    """Log seconds `[steps, 5]`: measured, forecast online, forecast by `cost`, whose weight and surprise follow.

    NaN for the first step, before which nobody can know the machine.
    """
    online, speeds = OnlineCost(), Speeds(cost, typical_error=np.inf)
    rows = np.full((len(run), 5), np.nan)
    for row, observation in zip(rows, run, strict=True):
        costs: tuple[Cost, Cost] = online, MixedCost(speeds, online, is_alone=True)
        forecasts = [observed_seconds(observation, c) for c in costs]
        is_first, weight = not speeds.is_measured, speeds.weight
        surprise = speeds.update(observation)
        if not is_first and min(forecasts) > 0.0:
            logs = np.log([observation.timing.total_seconds, *forecasts])
            row[:] = *logs, weight, surprise
        online.update(observation)
        speeds.hear(online)
    return rows
