"""The tables beneath the plots: the numbers that were drawn.

Knows results, timelines and how numbers read; knows nothing of HTML or pixels.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sdcontrol.experiments.metrics import ratio_of
from sdcontrol.experiments.report.plots import (
    TIMES,
    Point,
    lengths_of,
    positive_pairs,
    time_shares,
)
from sdcontrol.experiments.report.quantities import TIMES_SIGN, Scale, label_of, scale_of
from sdcontrol.experiments.report.tables import Cell, Column, Row, Table, number
from sdcontrol.experiments.report.timeline import Bin
from sdcontrol.experiments.results import ArmResult, BlockFacts, Results

__all__ = [
    "block_ratios",
    "block_table",
    "choices_table",
    "latency_table",
    "lengths_table",
    "roofline_table",
    "step_time_table",
    "throughput_table",
    "time_table",
]

Timelines = Sequence[Sequence[Bin]]
BlockRatios = Mapping[str, Mapping[int, Sequence[Point]]]

_PERCENT = Scale(0.01, "%", 1)
_PERCENTILES = (0, 5, 10, 25, 50, 75, 90, 95, 99, 100)
_SOURCE = "All sampled steps stand in results.json."


def throughput_table(arms: Sequence[ArmResult], timelines: Timelines) -> Table:
    """Throughput by bin."""
    rate = scale_of((b.tokens_per_second for bins in timelines for b in bins), "")
    column = Column("Throughput", unit="tokens/s")
    return _timeline_table(
        "Throughput by time.",
        arms,
        timelines,
        column,
        lambda b: number(b.tokens_per_second, rate),
    )


def choices_table(arms: Sequence[ArmResult], timelines: Timelines) -> Table:
    """Choices by bin."""

    def most_chosen(b: Bin) -> Cell:
        most = sorted(b.shares.items(), key=lambda item: (-item[1], item[0]))[:3]
        return Cell(", ".join(f"{choice} {share:.0%}" for choice, share in most))

    column = Column("Most chosen, share of requests", is_number=False)
    title = "The three most frequent choices by time."
    return _timeline_table(title, arms, timelines, column, most_chosen)


def _timeline_table(
    title: str,
    arms: Sequence[ArmResult],
    timelines: Timelines,
    column: Column,
    cell: Callable[[Bin], Cell],
) -> Table:
    time = scale_of((b.start_seconds for bins in timelines for b in bins), "s")
    rows = [
        Row([Cell(arm.name), number(b.start_seconds, time), cell(b)])
        for arm, bins in zip(arms, timelines, strict=True)
        for b in bins
    ]
    columns = [Column("Arm", is_number=False), Column("From", unit=time.unit), column]
    return Table(title, columns, rows)


def block_ratios(results: Results, headline: str) -> BlockRatios:
    """Ratio to the baseline by metric, then arm, as (block, ratio); the headline comes first."""
    counted = [
        {b.block: b for b in arm.blocks if not (b.is_warmup or b.is_repeat)} for arm in results.arms
    ]
    base = next((i for i, arm in enumerate(results.arms) if arm.name == results.baseline), None)
    if base is None:
        return {}
    names = {name for blocks in counted for b in blocks.values() for name in b.metrics}
    found = {}
    for metric in sorted(names or {"tokens_per_second"}, key=lambda name: (name != headline, name)):
        by_arm = {
            arm: points
            for arm, blocks in enumerate(counted)
            if arm != base and (points := _ratios(blocks, counted[base], metric))
        }
        if by_arm:
            found[metric] = by_arm
    return found


def _ratios(
    blocks: Mapping[int, BlockFacts], base: Mapping[int, BlockFacts], metric: str
) -> list[Point]:
    def measured(block: BlockFacts) -> BlockFacts:
        speed = {metric: block.tokens_per_second}  # where nothing else was written down
        return block if block.metrics else block.model_copy(update={"metrics": speed})

    both = sorted(blocks.keys() & base.keys())
    found = [(at, ratio_of(metric, measured(blocks[at]), measured(base[at]))) for at in both]
    return [point for point in found if point[1] is not None]


def block_table(results: Results, series: BlockRatios) -> Table:
    """One row per metric and block, one column per arm, the A/A ratio last."""
    arms = sorted({arm for by_arm in series.values() for arm in by_arm})
    drift = dict(results.drift.per_block) if results.drift else {}
    ratio = Scale(1.0, TIMES_SIGN, 3)
    rows = []
    for metric, by_arm in series.items():
        repeated = drift if results.drift and results.drift.metric == metric else {}
        values = {arm: dict(points) for arm, points in by_arm.items()}
        for block in sorted(
            {int(b) for points in by_arm.values() for b, _ in points if b is not None}
        ):
            cells = [number(values.get(arm, {}).get(block), ratio) for arm in arms]
            again = [number(repeated.get(block), ratio)] if drift else []
            rows.append(Row([Cell(label_of(metric)), Cell(str(block)), *cells, *again]))
    columns = [
        Column("Metric", is_number=False),
        Column("Block"),
        *(Column(results.arms[arm].name, unit=TIMES_SIGN) for arm in arms),
        *([Column("A/A", unit=TIMES_SIGN)] if drift else []),
    ]
    return Table(f"Ratio to {results.baseline} inside each block.", columns, rows)


def lengths_table(arms: Sequence[ArmResult]) -> Table:
    """Counts and shares by arm, drafter and length."""
    rows = []
    for arm in arms:
        counts = lengths_of(arm)
        total = sum(counts.values()) or 1
        for choice, count in sorted(counts.items()):
            place = [Cell(arm.name), Cell(choice.drafter), Cell(str(choice.num_draft_tokens))]
            rows.append(Row([*place, Cell(f"{count:,}"), number(count / total, _PERCENT)]))
    columns = [
        Column("Arm", is_number=False),
        Column("Drafter", is_number=False),
        Column("Draft tokens"),
        Column(f"Requests {TIMES_SIGN} steps"),
        Column("Share", unit="%"),
    ]
    return Table("Requests times steps by drafter and length.", columns, rows)


def latency_table(arms: Sequence[ArmResult], name: str) -> Table:
    """Percentiles by arm."""
    measured = [arm for arm in arms if arm.latencies.get(name)]
    scale = scale_of((arm.latencies[name][50] for arm in measured), "s")
    rows = [
        Row([Cell(f"p{p}"), *(number(arm.latencies[name][p], scale) for arm in measured)])
        for p in _PERCENTILES
    ]
    columns = [Column("", is_number=False), *(Column(a.name, unit=scale.unit) for a in measured)]
    return Table(f"{label_of(name)} by percentile of requests.", columns, rows)


def time_table(arms: Sequence[ArmResult]) -> Table:
    """Shares of the time in steps."""
    rows = [
        Row([Cell(arm.name), *(number(share, _PERCENT) for share in shares)])
        for arm in arms
        if (shares := time_shares(arm.steps))
    ]
    columns = [
        Column("Arm", is_number=False),
        *(Column(name.capitalize(), unit="%") for name in TIMES),
    ]
    return Table("Shares of the time in sampled steps.", columns, rows)


def step_time_table(arms: Sequence[ArmResult]) -> Table:
    """How far off the predictions were."""
    rows = []
    for arm in arms:
        pairs = positive_pairs(arm.steps, "predicted_seconds", "measured_seconds")
        if not pairs:
            continue
        predicted, measured = np.asarray(pairs, dtype=float).T
        errors = predicted / measured - 1
        middle = (np.median(predicted), np.median(measured))
        scale = scale_of(map(float, middle), "s")
        rows.append(
            Row(
                [
                    Cell(arm.name),
                    Cell(f"{len(pairs):,}"),
                    *(Cell(scale.text_with_unit(float(value))) for value in middle),
                    number(float(np.median(errors)), _PERCENT),
                    number(float(np.median(np.abs(errors))), _PERCENT),
                    number(float(np.quantile(np.abs(errors), 0.9)), _PERCENT),
                ]
            )
        )
    columns = [
        Column("Arm", is_number=False),
        Column("Steps"),
        Column("Predicted, median"),
        Column("Measured, median"),
        Column("Error, median", unit="%"),
        Column("Size of error, median", unit="%"),
        Column("Size of error, p90", unit="%"),
    ]
    return Table(f"Predicted over measured, minus one. {_SOURCE}", columns, rows)


def roofline_table(arms: Sequence[ArmResult]) -> Table:
    """Where the steps lie against the ridge."""
    rows = []
    for arm in arms:
        pairs = positive_pairs(arm.steps, "intensity", "flops_per_second")
        if not pairs:
            continue
        intensity, speed = np.asarray(pairs, dtype=float).T
        low, middle, high = np.quantile(intensity, [0.1, 0.5, 0.9])
        scale = scale_of([float(high)], "FLOPs/byte")
        achieved = float(np.median(speed))
        roof = arm.roofline
        beneath = float(np.mean(intensity < roof.ridge)) if roof else None
        cells = [
            Cell(arm.name),
            Cell(f"{len(pairs):,}"),
            number(float(middle), scale, f"{scale.text(low)} to {scale.text(high)}"),
            Cell(scale_of([achieved], "FLOPs/s").text_with_unit(achieved)),
            number(roof.ridge if roof else None, scale),
            number(beneath, _PERCENT),
        ]
        rows.append(Row(cells))
    columns = [
        Column("Arm", is_number=False),
        Column("Steps"),
        Column("Intensity, median; p10 to p90", unit="FLOPs/byte"),
        Column("Achieved, median"),
        Column("Ridge", unit="FLOPs/byte"),
        Column("Steps left of the ridge", unit="%"),
    ]
    return Table(f"Steps against the machine's ceilings. {_SOURCE}", columns, rows)
