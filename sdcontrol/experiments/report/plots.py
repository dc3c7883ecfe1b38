"""Results as the data of plots: what the page's script draws.

Every plot is a JSON-able mapping with a `kind`; values are in base units (seconds, FLOP/s), rounded
to four digits. Arms are referred to by their place in the results. Knows nothing of pixels.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil, isfinite

from pydantic import JsonValue

from sdcontrol.experiments.report.quantities import label_of
from sdcontrol.experiments.report.tables import against_baseline, confidence_of
from sdcontrol.experiments.report.timeline import Bin, Choice
from sdcontrol.experiments.results import ArmResult, Interval, Results, StepSample

__all__ = [
    "TIMES",
    "block_plots",
    "choices_plot",
    "latency_plot",
    "lengths_plot",
    "ratios_plot",
    "roofline_plot",
    "step_time_plot",
    "throughput_plot",
    "time_plot",
]

Plot = dict[str, JsonValue]
Point = tuple[float | None, float | None]

_MOST_POINTS = 10_000  # of a plot: more only make the page heavy
TIMES = ("draft", "verify", "controller", "overhead")


def ratios_plot(results: Results, metric: str) -> Plot:
    """Ratio to the baseline by arm, with its interval."""
    names = [arm.name for arm in results.arms]
    rows: list[JsonValue] = [
        {
            "arm": names.index(comparison.arm),
            "verdict": comparison.verdict,
            **_interval(comparison.ratio),
        }
        for comparison in against_baseline(results, metric)
    ]
    return {
        "kind": "forest",
        "rows": rows,
        "baseline": results.baseline,
        "confidence": confidence_of(results),
    }


def throughput_plot(timelines: Sequence[Sequence[Bin]], width_seconds: float) -> Plot:
    """Output tokens per second over the arm's own time."""
    series = [
        _series(arm, _whole_stretches(bins, width_seconds)) for arm, bins in enumerate(timelines)
    ]
    return {
        "kind": "chart",
        "pick": "x",
        "x": _time_axis(timelines, width_seconds),
        "y": {"label": "Output", "unit": "tokens/s", "zero": True},
        "series": [*series],
    }


def _time_axis(timelines: Sequence[Sequence[Bin]], width_seconds: float) -> Plot:
    """One axis for both plots over time, whichever arms are shown."""
    end = max((b.start_seconds for bins in timelines for b in bins), default=0.0) + width_seconds
    return {"label": "Time in the arm's counted blocks", "unit": "s", "domain": [0, _round(end)]}


def _whole_stretches(bins: Sequence[Bin], width_seconds: float) -> list[list[Point]]:
    """Lines break where a bin is missing."""
    points = [(b.start_seconds + width_seconds / 2, b.tokens_per_second) for b in bins]
    stretches: list[list[Point]] = [[point] for point in points[:1]]
    for before, point in pairwise(points):
        if point[0] - before[0] > 1.5 * width_seconds:
            stretches.append([])
        stretches[-1].append(point)
    return stretches


def choices_plot(timelines: Sequence[Sequence[Bin]], width_seconds: float) -> Plot:
    """Shares of requests by drafter and length, over the same time."""
    choices = sorted(
        {choice for bins in timelines for b in bins for choice in b.shares}, key=_order
    )
    drafters = _drafters(choices)
    longest = max((choice.num_draft_tokens for choice in choices), default=1) or 1
    rows: list[JsonValue] = [
        {
            "arm": arm,
            "bins": [
                [
                    round(b.start_seconds / width_seconds),
                    [_round(b.shares.get(c, 0.0)) for c in choices],
                ]
                for b in bins
            ],
        }
        for arm, bins in enumerate(timelines)
        if bins
    ]
    return {
        "kind": "bands",
        "x": _time_axis(timelines, width_seconds),
        "width": _round(width_seconds),
        "drafters": list(drafters),
        "choices": [
            {
                "label": str(choice),
                "drafter": drafters.index(choice.drafter),
                "strength": _round(choice.num_draft_tokens / longest),
            }
            for choice in choices
        ],
        "rows": rows,
    }


def lengths_plot(arms: Sequence[ArmResult]) -> Plot:
    """Share of requests times steps by draft length, stacked by drafter."""
    choices = sorted((c for arm in arms for c in lengths_of(arm)), key=_order)
    drafters = _drafters(choices)
    rows: list[JsonValue] = []
    for index, arm in enumerate(arms):
        counts = lengths_of(arm)
        total = sum(counts.values())
        if total:
            bars: list[JsonValue] = [
                [choice.num_draft_tokens, drafters.index(choice.drafter), _round(count / total)]
                for choice, count in sorted(counts.items(), key=lambda item: _order(item[0]))
            ]
            rows.append({"arm": index, "bars": bars})
    longest = max((choice.num_draft_tokens for choice in choices), default=0)
    return {"kind": "bars", "drafters": list(drafters), "longest": longest, "rows": rows}


def lengths_of(arm: ArmResult) -> dict[Choice, int]:
    """Requests times steps by drafter and length."""
    return {
        Choice(drafter, int(length)): count
        for drafter, counts in arm.lengths.items()
        for length, count in counts.items()
        if count
    }


def _order(choice: Choice) -> tuple[bool, str, int]:
    return choice.num_draft_tokens > 0, choice.drafter, choice.num_draft_tokens


def _drafters(choices: Iterable[Choice]) -> tuple[str, ...]:
    """`off` and its like first, then drafters by name: the page's order of colours."""
    return tuple(dict.fromkeys(["off", *(choice.drafter for choice in choices)]))


def latency_plot(arms: Sequence[ArmResult], name: str) -> Plot:
    """Share of requests that took at most so long."""
    series = [
        _series(index, [[(value, place) for place, value in enumerate(arm.latencies[name])]])
        for index, arm in enumerate(arms)
        if arm.latencies.get(name)
    ]
    return {
        "kind": "chart",
        "pick": "y",
        "x": {"label": label_of(name), "unit": "s", "log": "auto", "zero": True},
        "y": {
            "label": "Share of requests",
            "unit": "%",
            "domain": [0, 100],
            "ticks": [0, 50, 90, 99],
        },
        "series": [*series],
    }


def step_time_plot(arms: Sequence[ArmResult]) -> Plot:
    """What a step was predicted to take, and took."""
    return _scatter(
        arms,
        ("predicted_seconds", "measured_seconds"),
        ({"label": "Predicted", "unit": "s"}, {"label": "Measured", "unit": "s"}),
    ) | {"isDiagonal": True}


def roofline_plot(arms: Sequence[ArmResult]) -> Plot:
    """Achieved FLOP/s by arithmetic intensity, beneath the machine's ceilings."""
    plot = _scatter(
        arms,
        ("intensity", "flops_per_second"),
        (
            {"label": "Arithmetic intensity", "unit": "FLOPs/byte"},
            {"label": "Achieved", "unit": "FLOP/s"},
        ),
    )
    roof = next((arm.roofline for arm in arms if arm.roofline), None)
    if roof:
        plot["roof"] = {
            "peak": _round(roof.peak_flops_per_second),
            "bandwidth": _round(roof.bandwidth_bytes_per_second),
            "ridge": _round(roof.ridge),
        }
    return plot


def _scatter(arms: Sequence[ArmResult], columns: tuple[str, str], axes: tuple[Plot, Plot]) -> Plot:
    pairs = [positive_pairs(arm.steps, *columns) for arm in arms]
    stride = max(1, ceil(sum(map(len, pairs)) / _MOST_POINTS))
    series = [
        _series(index, [points[::stride]]) | {"dots": True}
        for index, points in enumerate(pairs)
        if points
    ]
    x, y = ({**axis, "log": True} for axis in axes)
    return {"kind": "chart", "pick": "xy", "x": x, "y": y, "series": [*series]}


def positive_pairs(steps: StepSample, first: str, second: str) -> list[Point]:
    """Two columns side by side, where both are known and positive."""
    pairs = zip(getattr(steps, first), getattr(steps, second), strict=True)
    return [(a, b) for a, b in pairs if a and b and min(a, b) > 0 and isfinite(a * b)]


def time_plot(arms: Sequence[ArmResult]) -> Plot:
    """Where the time of the sampled steps went."""
    rows: list[JsonValue] = [
        {"arm": index, "parts": [_round(part) for part in parts]}
        for index, arm in enumerate(arms)
        if (parts := time_shares(arm.steps))
    ]
    return {"kind": "shares", "parts": list(TIMES), "rows": rows}


def time_shares(steps: StepSample) -> list[float]:
    """Shares of `TIMES`; empty where no step was sampled."""
    spent = [float(sum(getattr(steps, f"{part}_seconds"))) for part in TIMES]
    total = sum(spent)
    return [seconds / total for seconds in spent] if total else []


def block_plots(results: Results, series: Mapping[str, Mapping[int, Sequence[Point]]]) -> Plot:
    """Ratio to the baseline by block, for each metric; with the A/A ratios where there are any."""
    choices: list[JsonValue] = []
    for metric, by_arm in series.items():
        found = {c.arm: c for c in against_baseline(results, metric)}
        intervals: list[JsonValue] = [
            {"arm": arm, **_interval(found[results.arms[arm].name].ratio)}
            for arm in by_arm
            if results.arms[arm].name in found
        ]
        lines: list[JsonValue] = [_series(arm, [points]) for arm, points in by_arm.items()]
        choices.append({"label": label_of(metric), "series": lines, "intervals": intervals})
    drift: JsonValue = None
    if results.drift:
        points: list[JsonValue] = [
            [block, _round(ratio)] for block, ratio in results.drift.per_block
        ]
        drift = {"metric": label_of(results.drift.metric), "points": points}
    return {"kind": "blocks", "baseline": results.baseline, "choices": choices, "drift": drift}


def _interval(interval: Interval) -> dict[str, JsonValue]:
    """The page rounds these once more, to print them: from few digits it would round otherwise
    than the verdict and the tables do."""
    return {
        "value": _round(interval.value, 8),
        "low": _round(interval.low, 8),
        "high": _round(interval.high, 8),
    }


def _series(arm: int, stretches: Iterable[Iterable[Point]]) -> Plot:
    return {
        "arm": arm,
        "stretches": [[[_round(x), _round(y)] for x, y in points] for points in stretches],
    }


def _round(value: float | None, digits: int = 4) -> float | None:
    """Four digits are more than a pixel; JSON has no NaN."""
    return float(f"{value:.{digits}g}") if value is not None and isfinite(value) else None
