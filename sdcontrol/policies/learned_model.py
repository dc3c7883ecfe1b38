"""What is learnt offline from observations, as a few arrays in a file.

Knows nothing of plans. Regressors of scikit-learn are fitted by `fit` and distilled: acceptance to
a vector per arm (`learned_acceptance`), step time to a few coefficients (`learned_cost`). So nothing
of scikit-learn runs while decoding: what was learnt goes into the compiled call that finds the plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sdcontrol.core import BatchView, FloatArray, Observation
from sdcontrol.errors import ConfigError
from sdcontrol.outcomes import DEPTH
from sdcontrol.policies.learned_acceptance import ArmWeights, fit_arms, outcomes_of
from sdcontrol.policies.learned_cost import KNOTS, LearnedCost, Run, fit_cost, timed_steps
from sdcontrol.policies.learned_features import NUM_FEATURES
from sdcontrol.policies.learned_speed import Speeds
from sdcontrol.policies.learned_trust import trust_of
from sdcontrol.skops_files import read_skops, write_skops

__all__ = ["LearnedModel", "fit", "load", "numbered", "save", "train"]

_VERSION = 4
_EMPTY = BatchView(0, (), 0)
_MARGIN = 0.25  # of the trained range, beyond which a step is unlike anything seen


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """What `fit` found. `low` and `high` bound the steps that it was found in."""

    cost: LearnedCost
    prices: bool  # whether `cost` stands beside the online cost
    cost_error: float  # mean absolute log error of held-out verifications
    acceptance: Mapping[str, ArmWeights]  # by arm; of others the online estimate stands
    low: FloatArray  # [4], of `_situation`
    high: FloatArray

    def knows(self, view: BatchView) -> bool:
        """Whether the step is like those it was trained on: batch, context, prefill.

        Of arms that were not learnt the online belief stands alone, beside what was learnt of others.
        """
        bounds = zip(self.low.tolist(), _situation(view), self.high.tolist(), strict=True)
        return all(low <= here <= high for low, here, high in bounds)

    def speeds(self) -> Speeds:
        """What follows the machine's speed, from the beginning of a run."""
        return Speeds(self.cost, self.cost_error)


def train(observations: Sequence[Observation], max_draft_tokens: int = DEPTH) -> LearnedModel:
    """`fit` to a single run."""
    return fit([observations], max_draft_tokens)


def fit(
    runs: Iterable[Run],
    max_draft_tokens: int = DEPTH,
    drawn: Sequence[Sequence[Run]] = (),
) -> LearnedModel:
    """Fit acceptance and step time to runs, the observations of each in order.

    `drawn`: of each run, its requests decoded again, as `traces.drawn` does; of those acceptance alone is learnt.
    Raises `ConfigError` where there is too little to learn from.
    """
    kept = [list(run) for run in runs]
    timed = [*chain.from_iterable(timed_steps(kept))]
    if len(timed) < 2 * KNOTS:
        raise ConfigError(
            f"{len(timed)} observations with requests and a finite time; training needs at least "
            f"{2 * KNOTS}"
        )
    situations = np.array([_situation(o.view) for o in timed], np.float64)
    low, high = situations.min(axis=0), situations.max(axis=0)
    spare = _MARGIN * np.maximum(high - low, np.maximum(high, 1.0) * 0.5)
    prices, error = trust_of(kept)
    return LearnedModel(
        cost=fit_cost(kept),
        prices=prices,
        cost_error=error,
        acceptance=fit_arms(
            pair
            for number, run in chain(enumerate(kept), numbered(drawn))
            for pair in outcomes_of(run, max_draft_tokens, number)
        ),
        low=low - spare,
        high=high + spare,
    )


def numbered(drawn: Sequence[Sequence[Run]]) -> list[tuple[int, Run]]:
    """Runs that were drawn, each with the number of the one whose requests it decoded."""
    return [(number, run) for number, again in enumerate(drawn) for run in again]


def save(model: LearnedModel, path: Path) -> None:
    """Write `model` as a skops file."""
    cost = model.cost
    state: dict[str, object] = {
        "version": _VERSION,
        "knots": cost.knots,
        "verify": cost.verify,
        "rounds": dict(cost.rounds),
        "overhead": float(cost.overhead),
        "padding": float(cost.padding),
        "prices": bool(model.prices),
        "cost_error": float(model.cost_error),
        "acceptance": {
            arm: np.array([learned.weights, learned.low, learned.high])
            for arm, learned in model.acceptance.items()
        },
        "low": model.low,
        "high": model.high,
    }
    write_skops(state, path)


def load(path: Path) -> LearnedModel:
    """Read what `save` wrote. Raises `ConfigError` for anything else, before it is built."""
    if not Path(path).is_file():
        raise ConfigError(f"no learned model at {str(path)!r}; train one and save it there")
    state = read_skops(path)
    version = state.get("version") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(version, int) or version != _VERSION:
        raise ConfigError(
            f"{str(path)!r} is no learned model of version {_VERSION}; train it again"
        )
    try:
        return _restored(state)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{str(path)!r} is damaged ({error!r}); train it again") from error


def _restored(state: dict[str, Any]) -> LearnedModel:
    """Raises `KeyError`, `TypeError` or `ValueError` for parts that are missing or misshapen."""
    knots, situation, weights = len(state["knots"]), len(_situation(_EMPTY)), NUM_FEATURES
    acceptance = {arm: _array(rows, (3, weights)) for arm, rows in state["acceptance"].items()}
    return LearnedModel(
        LearnedCost(
            _array(state["knots"], (knots,)),
            _array(state["verify"], (4 + knots,)),
            {family: _array(price, (4,)) for family, price in state["rounds"].items()},
            float(_array(state["overhead"], ())),
            float(_array(state["padding"], ())),
        ),
        _flag(state["prices"], "prices"),
        float(_array(state["cost_error"], ())),
        {arm: ArmWeights(*map(np.ascontiguousarray, rows)) for arm, rows in acceptance.items()},
        _array(state["low"], (situation,)),
        _array(state["high"], (situation,)),
    )


def _array(values: object, shape: tuple[int, ...]) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(f"numbers of shape {array.shape}, not {shape}")
    if not np.isfinite(array).all():
        raise ValueError("a number that is not finite")
    return array


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, not true or false")
    return value


def _situation(view: BatchView) -> tuple[float, float, float, float]:
    contexts = [request.context_tokens for request in view.requests]
    return len(contexts), max(contexts, default=0), sum(contexts), view.prefill_tokens
