"""Fit a machine's efficiency and overheads on measured plain steps.

Knows nothing of speculation: steps without drafts teach it, and it prices the rest. Bandwidth
efficiency is searched; the overhead per layer and what a request adds to it follow by non-negative
least squares on relative errors. Steps of a single batch size cannot tell those two apart: the one per
layer is fitted then, the other stays as it is.

A request has one token in a plain step, so that nothing says whether it is the request or the token that
takes time. Half is taken for the one and half for the other: MagicDec's verifications of three tokens
(8xA100, 7 B) ask for a quarter to a half per token.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.roofline import Calibration, Forward

__all__ = ["LEAST_EFFICIENCY", "MOST_EFFICIENCY", "PlainStep", "fit", "read_plain_steps"]

_TOKEN_SHARE = 0.5  # of what a request of one token adds
LEAST_EFFICIENCY, MOST_EFFICIENCY = 0.25, 1.0  # of the bandwidth, that a fit may find

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
    count once. Raises `ConfigError` for a file without them, and for a row whose sizes are no whole
    numbers of at least 1 or whose time is not positive and finite.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or ()
        column = next((name for name in _SECONDS_COLUMNS if name in columns), None)
        if column is None or not {"batch_size", "context_tokens"} <= set(columns):
            raise ConfigError(
                f"{path} has columns {sorted(columns)}; it needs batch_size, context_tokens and "
                f"one of {', '.join(_SECONDS_COLUMNS)}"
            )
        steps = [_step_of(row, column, f"{path} line {reader.line_num}") for row in reader]
    return list(dict.fromkeys(steps))


def _step_of(row: Mapping[str, str | None], column: str, place: str) -> PlainStep:
    batch, context = (_size(row[name], name, place) for name in ("batch_size", "context_tokens"))
    seconds = _number(row[column]) * _SECONDS_COLUMNS[column]
    if not 0.0 < seconds < math.inf:
        raise ConfigError(f"{place}: {column} is {row[column]!r}; give a positive number")
    return PlainStep(batch, context, seconds)


def _size(text: str | None, name: str, place: str) -> int:
    """A whole number, however it is written."""
    size = _number(text)
    if not (size >= 1.0 and size.is_integer()):
        raise ConfigError(f"{place}: {name} is {text!r}; give a whole number of at least 1")
    return int(size)


def _number(text: str | None) -> float:
    """NaN for what is none."""
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def fit(forward: Forward, steps: Sequence[PlainStep]) -> Calibration:
    """The calibration under which `forward` explains `steps` best, in relative squares.

    Raises `ConfigError` for fewer than three steps or times that are not positive.
    """
    if len(steps) < 3:
        raise ConfigError(f"{len(steps)} different plain steps; give at least 3")
    if wrong := [step for step in steps if not 0.0 < step.seconds < math.inf]:
        raise ConfigError(f"a plain step took {wrong[0].seconds} s; give positive times")
    tried = np.linspace(LEAST_EFFICIENCY, MOST_EFFICIENCY, 76)
    fits = [_fit_at(forward, steps, efficiency) for efficiency in tried]
    return min(fits, key=lambda pair: pair[0])[1]


def _fit_at(
    forward: Forward, steps: Sequence[PlainStep], efficiency: float
) -> tuple[float, Calibration]:
    """(squared error, calibration) for one bandwidth efficiency."""
    batch = np.array([step.batch_size for step in steps], dtype=float)
    is_one_size = bool((batch == batch[0]).all())
    bare = replace(
        forward.calibration, bandwidth_efficiency=float(efficiency), layer_overhead_seconds=0.0
    )
    if not is_one_size:
        bare = replace(bare, token_overhead_seconds=0.0, request_overhead_seconds=0.0)
    kv_tokens = batch * np.array([step.context_tokens for step in steps], dtype=float)
    seconds = np.array([step.seconds for step in steps])
    base = replace(forward, calibration=bare).seconds(batch, kv_tokens, batch)
    layers = float(forward.shape.num_layers)
    varying = np.zeros_like(batch) if is_one_size else batch  # which tells the two apart
    features = layers * np.stack([np.ones_like(batch), varying], axis=1) / seconds[:, None]
    overheads, error = _non_negative_pair(features, 1.0 - base / seconds)
    per_layer, added = overheads.tolist()
    fitted = replace(
        bare,
        layer_overhead_seconds=per_layer,
        token_overhead_seconds=bare.token_overhead_seconds + _TOKEN_SHARE * added,
        request_overhead_seconds=bare.request_overhead_seconds + (1.0 - _TOKEN_SHARE) * added,
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
