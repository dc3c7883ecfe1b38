"""Fit a machine's efficiency and overheads on measured plain steps.

Knows nothing of speculation: steps without drafts teach it, and it prices the rest. Bandwidth
efficiency is searched; the overheads per layer and per request follow by non-negative least squares
on relative errors.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.roofline import Calibration, Forward

__all__ = ["PlainStep", "fit", "read_plain_steps"]

_SECONDS_COLUMNS = {
    "plain_seconds": 1.0,
    "plain_ms": 1e-3,
    "plain_ms_per_token": 1e-3,
    "seconds": 1.0,
    "ms": 1e-3,
}


@dataclass(frozen=True, slots=True)
class PlainStep:
    """One measured decoding step without drafts: one token for each of `batch_size` requests."""

    batch_size: int
    context_tokens: int  # of each request
    seconds: float


def read_plain_steps(path: Path) -> list[PlainStep]:
    """Plain steps from a CSV with `batch_size`, `context_tokens` and one of the columns of time.

    Those are `plain_seconds`, `plain_ms`, `plain_ms_per_token`, `seconds` or `ms`; repeated rows
    count once. Raises `ConfigError` for a file without them.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = set(rows[0]) if rows else set()
    column = next((name for name in _SECONDS_COLUMNS if name in columns), None)
    if column is None or not {"batch_size", "context_tokens"} <= columns:
        raise ConfigError(
            f"{path} has columns {sorted(columns)}; it needs batch_size, context_tokens and one of "
            f"{', '.join(_SECONDS_COLUMNS)}"
        )
    try:
        steps = [
            PlainStep(
                int(row["batch_size"]),
                int(row["context_tokens"]),
                float(row[column]) * _SECONDS_COLUMNS[column],
            )
            for row in rows
        ]
    except ValueError as error:
        raise ConfigError(f"{path} has a value that is no number ({error}); correct it") from error
    return list(dict.fromkeys(steps))


def fit(forward: Forward, steps: Sequence[PlainStep]) -> Calibration:
    """The calibration under which `forward` explains `steps` best, in relative squares.

    Raises `ConfigError` for fewer than three steps or times that are not positive.
    """
    if len(steps) < 3 or any(not step.seconds > 0.0 for step in steps):
        raise ConfigError(f"{len(steps)} plain steps; give at least 3, with positive times")
    fits = [_fit_at(forward, steps, efficiency) for efficiency in np.linspace(0.25, 1.0, 76)]
    return min(fits, key=lambda pair: pair[0])[1]


def _fit_at(
    forward: Forward, steps: Sequence[PlainStep], efficiency: float
) -> tuple[float, Calibration]:
    """(squared error, calibration) for one bandwidth efficiency."""
    bare = replace(
        forward.calibration,
        bandwidth_efficiency=float(efficiency),
        layer_overhead_seconds=0.0,
        token_overhead_seconds=0.0,
    )
    batch = np.array([step.batch_size for step in steps], dtype=float)
    kv_tokens = batch * np.array([step.context_tokens for step in steps], dtype=float)
    seconds = np.array([step.seconds for step in steps])
    base = replace(forward, calibration=bare).seconds(batch, kv_tokens, batch)
    layers = float(forward.shape.num_layers)
    features = layers * np.stack([np.ones_like(batch), batch], axis=1) / seconds[:, None]
    overheads, error = _non_negative_pair(features, 1.0 - base / seconds)
    fitted = replace(
        bare,
        layer_overhead_seconds=float(overheads[0]),
        token_overhead_seconds=float(overheads[1]),
    )
    return error, fitted


def _non_negative_pair(features: FloatArray, target: FloatArray) -> tuple[FloatArray, float]:
    """Non-negative least squares with two unknowns: the best feasible of all four supports."""
    candidates = [np.zeros(2)]
    for support in ([0], [1], [0, 1]):
        solution = np.zeros(2)
        solution[support] = np.linalg.lstsq(features[:, support], target, rcond=None)[0]
        if (solution >= 0.0).all():
            candidates.append(solution)
    errors = [float(np.sum((features @ solution - target) ** 2)) for solution in candidates]
    best = int(np.argmin(errors))
    return candidates[best], errors[best]
