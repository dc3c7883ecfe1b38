"""Fit a machine's efficiencies and overheads on measured plain steps.

Knows nothing of speculation: steps without drafts teach it, and it prices the rest. What shares of the
bandwidth weights and KV reach, and how long all-reduces take beside what the link says, is searched;
the overhead per layer and what a request adds to it follow by non-negative least squares on relative
errors. Steps of a single batch size cannot tell those two apart: the one per layer is fitted then, the
other stays as it is.

Plain steps leave much open. Weights take as long in all of them, and so do a layer's launches: nothing
says which of the two it was, but a smaller model has fewer bytes in a layer, and as many launches. So
what is usual counts as evidence (`_unusual`): weights reach most of the bandwidth, attention about as
much, all-reduces take what the link says. It weighs little where measurements say something, and
of weights still less with experts: more of them are read, the more tokens there are, and launches are not.

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

__all__ = [
    "LEAST_EFFICIENCY",
    "MOST_EFFICIENCY",
    "OF_SEEN_CEILINGS",
    "PlainStep",
    "fit",
    "read_plain_steps",
]

OF_SEEN_CEILINGS = Calibration(bandwidth_efficiency=0.9, compute_efficiency=0.9)
"""What is reached of ceilings that were measured; 0.8 and 0.7 are for a vendor's."""

_TOKEN_SHARE = 0.5  # of what a request of one token adds
LEAST_EFFICIENCY, MOST_EFFICIENCY = 0.25, 1.0  # of the bandwidth, that a fit may find
_USUAL_EFFICIENCY = 0.88  # of matrix products that read their weights once
# The squared relative error of a step that being off by a factor of e is worth:
_WEIGHTS_DOUBT, _KV_DOUBT, _REDUCE_DOUBT = 0.02, 0.002, 0.005
_REDUCE_SCALES = np.geomspace(0.2, 5.0, 15)

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
        columns = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
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
    measured = _Measured(forward, steps)
    anywhere = np.linspace(LEAST_EFFICIENCY, MOST_EFFICIENCY, 51)
    scales = _REDUCE_SCALES if forward.tensor_parallel > 1 else (1.0,)
    found = min(
        (measured.fit(anywhere, anywhere, float(scale)) for scale in scales),
        key=lambda fit: fit.misfit,
    )
    weights, kv = _around(found.weights), _around(found.kv)
    return measured.calibration(measured.fit(weights, kv, found.reduce_scale))


def _around(efficiency: float) -> FloatArray:
    """Finer, up to its neighbours on the first grid."""
    near = efficiency + np.linspace(-0.0135, 0.0135, 19)
    return np.clip(near, LEAST_EFFICIENCY, MOST_EFFICIENCY)


def _unusual(
    weights: FloatArray, kv: FloatArray, reduce_scale: float, weights_doubt: float
) -> FloatArray:
    """What speaks against these efficiencies before anything is measured, `[weights, kv]`."""
    of_weights = weights_doubt * np.log(weights / _USUAL_EFFICIENCY) ** 2
    of_kv = _KV_DOUBT * np.log(kv / weights[:, None]) ** 2
    return np.asarray(of_weights[:, None] + of_kv + _REDUCE_DOUBT * math.log(reduce_scale) ** 2)


@dataclass(frozen=True, slots=True)
class _Fit:
    """One that explains the steps, and how badly."""

    misfit: float  # mean squared relative error, and what is unusual
    weights: float  # shares of the bandwidth
    kv: float
    reduce_scale: float
    per_layer: float  # seconds
    added: float  # seconds per layer, by a request with its token


class _Measured:
    """Steps, and what `forward` takes for them beside its overheads."""

    def __init__(self, forward: Forward, steps: Sequence[PlainStep]) -> None:
        self._batch = np.array([step.batch_size for step in steps], dtype=float)
        self._kv_tokens = self._batch * [step.context_tokens for step in steps]
        self._seconds = np.array([step.seconds for step in steps])
        bare = replace(forward.calibration, layer_overhead_seconds=0.0, all_reduce_scale=1.0)
        varying = self._batch
        if (self._batch == self._batch[0]).all():
            varying = np.zeros_like(self._batch)
        else:
            bare = replace(bare, token_overhead_seconds=0.0, request_overhead_seconds=0.0)
        self._forward = replace(forward, calibration=bare)
        layers = forward.shape.num_layers / self._seconds
        self._features = np.stack([layers, layers * varying])
        self._weights_doubt = _WEIGHTS_DOUBT
        if forward.shape.num_experts:  # read by the step: measurements say how fast
            self._weights_doubt /= len(steps)

    def fit(self, weights: FloatArray, kv: FloatArray, reduce_scale: float) -> _Fit:
        """The best with one of these efficiencies each, and all-reduces that take so much longer."""
        by_weights = [self._parts(reached) for reached in weights.tolist()]
        reading = np.stack([sum(parts.values()) - parts["kv"] for parts in by_weights])
        attending = np.stack([self._parts(reached)["kv"] for reached in kv.tolist()])
        reducing_more = by_weights[0]["all-reduces"] * (reduce_scale - 1.0)
        base = reading[:, None] + attending + reducing_more
        overheads, squares = _non_negative_pair(self._features, 1.0 - base / self._seconds)
        misfit = squares / len(self._seconds)
        misfit += _unusual(weights, kv, reduce_scale, self._weights_doubt)
        best = np.unravel_index(np.argmin(misfit), misfit.shape)
        per_layer, added = overheads[best].tolist()
        reached = float(weights[best[0]]), float(kv[best[1]])
        return _Fit(float(misfit[best]), *reached, reduce_scale, per_layer, added)

    def calibration(self, fit: _Fit) -> Calibration:
        """What a forward is priced by."""
        bare = self._forward.calibration
        return replace(
            bare,
            bandwidth_efficiency=fit.weights,
            kv_efficiency=fit.kv,
            all_reduce_scale=fit.reduce_scale,
            layer_overhead_seconds=fit.per_layer,
            token_overhead_seconds=bare.token_overhead_seconds + _TOKEN_SHARE * fit.added,
            request_overhead_seconds=bare.request_overhead_seconds
            + (1.0 - _TOKEN_SHARE) * fit.added,
        )

    def _parts(self, reached: float) -> dict[str, FloatArray]:
        bare = replace(
            self._forward.calibration, bandwidth_efficiency=reached, kv_efficiency=reached
        )
        forward = replace(self._forward, calibration=bare)
        return forward.part_seconds(self._batch, self._kv_tokens, self._batch)


def _non_negative_pair(features: FloatArray, target: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Non-negative least squares with two unknowns, for many targets at once.

    `features` `[2, steps]`, `target` `[..., steps]`; returns the unknowns `[..., 2]` and the squared
    errors `[...]`: the best feasible of all four supports.
    """
    gram, moments = features @ features.T, target @ features.T
    best, without = np.zeros_like(moments), np.sum(target**2, axis=-1)
    errors = without
    for support in ([0], [1], [0, 1]):
        own = gram[np.ix_(support, support)]
        if np.linalg.matrix_rank(own) < len(support):
            continue
        found = np.zeros_like(moments)
        found[..., support] = np.linalg.solve(own, moments[..., support, None])[..., 0]
        error = without - np.sum(found * moments, axis=-1)
        is_better = (found >= 0.0).all(axis=-1) & (error < errors)
        best = np.where(is_better[..., None], found, best)
        errors = np.where(is_better, error, errors)
    return best, errors
