"""Replays over time, as shapes to draw: throughput, latencies, what was chosen when.

Knows results and a rectangle of 720 x 200; nothing of HTML. Every plot has its numbers beside it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.traces.replay_result import ReplayResult

__all__ = ["HEIGHT", "WIDTH", "Plot", "Shape", "plots_of"]

WIDTH, HEIGHT = 720, 200
_BINS = 60


@dataclass(frozen=True, slots=True)
class Shape:
    """One line or area: what it is of, its colour's number, its SVG path."""

    name: str
    color: int
    path: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Shapes over time; `ticks` are heights in the rectangle with what they stand for."""

    title: str
    unit: str
    kind: str  # line, area
    shapes: tuple[Shape, ...]
    ticks: tuple[tuple[float, str], ...]
    seconds: float  # that the width stands for


@dataclass(frozen=True, slots=True)
class _Curve:
    name: str
    color: int
    values: FloatArray  # [bins]; NaN: nothing to say
    floor: FloatArray | None = None  # [bins], under an area; None: a line


def plots_of(results: Sequence[ReplayResult]) -> list[Plot]:
    """Of the policies on one workload, in the order given."""
    begin = min((r.series[0].start_seconds for r in results if r.series), default=0.0)
    seconds = max((r.seconds for r in results), default=0.0) or 1.0
    edges = begin + np.linspace(0.0, seconds, _BINS + 1)
    lines = {
        ("Throughput", "output tokens/s"): [_throughput(r, edges) for r in results],
        ("Time to first token", "ms, mean by arrival"): [
            _latency(r, "ttft_seconds", edges) for r in results
        ],
        ("Time per output token", "ms, mean by arrival"): [
            _latency(r, "tpot_seconds", edges) for r in results
        ],
    }
    plots = [
        _plot(
            title,
            unit,
            [_Curve(r.policy, i, v) for i, (r, v) in enumerate(zip(results, values, strict=True))],
            seconds,
        )
        for (title, unit), values in lines.items()
    ]
    arms = sorted({arm for r in results for point in r.series for arm in point.draft_tokens})
    colors = {arm: color for color, arm in enumerate(arms, start=1)}  # 0 is that of "off"
    return plots + [plot for r in results for plot in _choices(r, edges, seconds, colors)]


def _throughput(result: ReplayResult, edges: FloatArray) -> FloatArray:
    """By bin; nothing after the end of the run."""
    tokens = _summed(result, edges, [point.output_tokens for point in result.series])
    rate = tokens / (edges[1] - edges[0])
    return np.where(edges[:-1] < edges[0] + result.seconds, rate, math.nan)


def _latency(result: ReplayResult, name: str, edges: FloatArray) -> FloatArray:
    times, kept = result.times, result.times.having(name)
    arrivals, values = times["arrival_seconds"][kept], 1e3 * times[name][kept]
    places = np.clip(np.searchsorted(edges, arrivals, side="right") - 1, 0, _BINS - 1)
    sums, counts = (np.bincount(places, w, minlength=_BINS) for w in (values, None))
    return np.asarray(np.divide(sums, counts, out=np.full(_BINS, math.nan), where=counts > 0))


def _choices(
    result: ReplayResult, edges: FloatArray, seconds: float, colors: Mapping[str, int]
) -> Iterator[Plot]:
    """Draft tokens per step, stacked by drafter; none for a policy that never drafts."""
    arms = sorted({arm for point in result.series for arm in point.draft_tokens})
    steps = np.maximum(_summed(result, edges, [point.steps for point in result.series]), 1.0)
    floor = np.zeros(_BINS)
    curves = []
    for arm in arms:
        drafted = [point.draft_tokens.get(arm, 0) for point in result.series]
        top = floor + _summed(result, edges, drafted) / steps
        curves.append(_Curve(arm, colors[arm], top, floor))
        floor = top
    if curves:
        yield _plot(f"What {result.policy} chose", "draft tokens per step", curves, seconds)


def _summed(result: ReplayResult, edges: FloatArray, values: Sequence[float]) -> FloatArray:
    """Values of the series' points, by the bin in which they begin."""
    starts = [point.start_seconds for point in result.series]
    places = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, _BINS - 1)
    return np.bincount(places, np.asarray(values, dtype=float), minlength=_BINS).astype(float)


def _plot(title: str, unit: str, curves: Sequence[_Curve], seconds: float) -> Plot:
    highest = max((float(np.nanmax(c.values, initial=0.0)) for c in curves), default=0.0)
    step = _nice(highest / 4.0)
    top = step * max(math.ceil(highest / step), 1)
    heights = [place * step for place in range(round(top / step) + 1)]
    return Plot(
        title,
        unit,
        "line" if curves[0].floor is None else "area",
        tuple(Shape(c.name, c.color, _path(c, top)) for c in curves),
        tuple((_y(height, top), f"{height:g}") for height in heights),
        seconds,
    )


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least `step`."""
    if step <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def _path(curve: _Curve, top: float) -> str:
    """The line through the middles of the bins; of an area, there and back along its floor."""
    there = [
        f"{(place + 0.5) * WIDTH / _BINS:.1f},{_y(value, top):.1f}"
        for place, value in enumerate(curve.values)
        if not math.isnan(value)
    ]
    if curve.floor is None:
        return f"M{' '.join(there)}" if there else ""
    back = [
        f"{(place + 0.5) * WIDTH / _BINS:.1f},{_y(curve.floor[place], top):.1f}"
        for place in reversed(range(_BINS))
    ]
    return f"M{' '.join([*there, *back])}Z"


def _y(value: float, top: float) -> float:
    return HEIGHT * (1.0 - value / top)
