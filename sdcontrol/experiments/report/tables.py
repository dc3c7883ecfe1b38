"""Results as tables: what every claim and every plot of the page points to.

Knows the results and how numbers read; knows nothing of HTML.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sdcontrol.experiments.report.quantities import DASH, TIMES_SIGN, Scale, label_of, scale_of
from sdcontrol.experiments.results import ArmResult, Comparison, Interval, Results

__all__ = [
    "Cell",
    "Column",
    "Row",
    "Table",
    "acceptance_table",
    "against_baseline",
    "comparison_id",
    "comparison_table",
    "confidence_of",
    "metric_id",
    "metrics_table",
    "number",
    "ratios_table",
    "signs",
]

RATIO = Scale(1.0, TIMES_SIGN, 3)
NO_SIGN = "○"
_SIGNS = {"faster": "▲", "better": "▲", "slower": "▼", "worse": "▼"}


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in one place; `order` sorts the column, `kind` is a class of the style sheet."""

    text: str
    note: str = ""
    order: float | str = ""
    kind: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A head; numbers stand to the right."""

    text: str
    is_number: bool = True
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line; others link to its `id`."""

    cells: Sequence[Cell]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its caption; the first cell of every row is the row's head."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row] = field(default_factory=tuple)
    is_sortable: bool = False


def number(value: float | None, scale: Scale, note: str = "") -> Cell:
    """A number that sorts by its value."""
    return Cell(scale.text(value), note, -1e308 if value is None else value)


def signs(verdict: str) -> str:
    """A sign beside a verdict, so that colour is not all that tells."""
    return _SIGNS.get(verdict, NO_SIGN)


def comparison_id(comparison: Comparison, results: Results) -> str:
    """Anchor of a comparison's row."""
    return f"comparison-{results.comparisons.index(comparison)}"


def against_baseline(results: Results, metric: str) -> list[Comparison]:
    """Comparisons with the baseline, in the order of the arms; further pairs are left out."""
    names = [arm.name for arm in results.arms]
    found = [
        comparison
        for comparison in results.comparisons
        if comparison.metric == metric
        and comparison.baseline == results.baseline
        and comparison.arm in names
    ]
    return sorted(found, key=lambda comparison: names.index(comparison.arm))


def confidence_of(results: Results) -> str:
    """How sure the intervals of comparisons are: what alpha leaves, such as 95 %."""
    stopping = results.config.get("stopping")
    alpha = stopping.get("alpha") if isinstance(stopping, dict) else None
    return f"{100 * (1 - (alpha if isinstance(alpha, float) else 0.05)):g} %"


def ratios_table(results: Results, metric: str) -> Table:
    """The headline's numbers."""
    rows = [
        Row(
            [
                Cell(comparison.arm),
                number(comparison.ratio.value, RATIO),
                Cell(_interval(comparison.ratio, RATIO)),
                Cell(comparison.verdict, link=comparison_id(comparison, results)),
            ]
        )
        for comparison in against_baseline(results, metric)
    ]
    columns = [
        Column("Arm", is_number=False),
        Column("Ratio", unit=TIMES_SIGN),
        Column(f"{confidence_of(results)} interval", unit=TIMES_SIGN),
        Column("Verdict", is_number=False),
    ]
    return Table(f"{label_of(metric)}, ratio to {results.baseline}.", columns, rows)


def metrics_table(results: Results) -> Table:
    """Metrics by arm, each with its interval."""
    arms = [arm for arm in results.arms if arm.metrics]
    names = list(dict.fromkeys(name for arm in arms for name in arm.metrics))
    return Table(
        "Metrics by arm. Beneath each value its 95 % interval, by bootstrap over blocks. "
        "▲ better and ▼ worse than the baseline, corrected for the number of comparisons.",
        [Column("Metric", is_number=False), *(Column(arm.name) for arm in arms)],
        [_metric_row(results, arms, name, index) for index, name in enumerate(names)],
    )


def _metric_row(results: Results, arms: Sequence[ArmResult], name: str, index: int) -> Row:
    summaries = [arm.metrics.get(name) for arm in arms]
    present = [summary for summary in summaries if summary]
    scale = _scale_of_family(arms, name, present[0].unit)
    wish = {True: "higher is better", False: "lower is better", None: ""}
    head = Cell(
        label_of(name),
        ", ".join(filter(None, (scale.unit, wish[present[0].higher_is_better]))),
    )
    found = {c.arm: c for c in against_baseline(results, name)}
    cells = [
        _metric_cell(summary, scale, found.get(arm.name), results)
        for arm, summary in zip(arms, summaries, strict=True)
    ]
    return Row([head, *cells], f"metric-{index}")


def _scale_of_family(arms: Sequence[ArmResult], name: str, unit: str) -> Scale:
    """One unit for all percentiles of a metric: they are read beneath one another."""
    family = name.rpartition("_p")[0] if name.rpartition("_p")[2].isdigit() else name
    return scale_of(
        (
            summary.value
            for arm in arms
            for other, summary in arm.metrics.items()
            if other == name or other.startswith(f"{family}_p")
        ),
        unit,
    )


def _metric_cell(
    summary: Interval | None, scale: Scale, comparison: Comparison | None, results: Results
) -> Cell:
    if summary is None:
        return Cell(DASH)
    note = _interval(summary, scale)
    sign = signs(comparison.verdict) if comparison else ""
    if comparison is None or sign == NO_SIGN:
        return Cell(scale.text(summary.value), note)
    return Cell(
        scale.text(summary.value),
        note,
        kind="gain" if sign == "▲" else "loss",
        link=comparison_id(comparison, results),
    )


def _interval(interval: Interval, scale: Scale) -> str:
    return f"{scale.text(interval.low)} to {scale.text(interval.high)}"


def comparison_table(results: Results) -> Table:
    """One row for each arm, other arm and metric."""
    return Table(
        "Ratios inside each block, then over blocks. The signed-rank test's p is corrected for the "
        "number of comparisons and of looks. Press a column's head to sort.",
        [
            Column("Arm", is_number=False),
            Column("Against", is_number=False),
            Column("Metric", is_number=False),
            Column("Ratio", unit=TIMES_SIGN),
            Column(f"{confidence_of(results)} interval", unit=TIMES_SIGN),
            Column("p"),
            Column("p corrected"),
            Column("Blocks"),
            Column("Blocks needed"),
            Column("Verdict", is_number=False),
        ],
        [_comparison_row(results, comparison) for comparison in results.comparisons],
        is_sortable=True,
    )


def _comparison_row(results: Results, comparison: Comparison) -> Row:
    sign = signs(comparison.verdict)
    kind = {"▲": "gain", "▼": "loss"}.get(sign, "")
    needed = comparison.num_blocks_needed
    return Row(
        [
            Cell(comparison.arm, order=comparison.arm),
            Cell(comparison.baseline, order=comparison.baseline),
            Cell(
                label_of(comparison.metric),
                order=comparison.metric,
                link=metric_id(results, comparison.metric),
            ),
            number(comparison.ratio.value, RATIO),
            Cell(_interval(comparison.ratio, RATIO), order=comparison.ratio.low),
            Cell(_p_value(comparison.p_value), order=comparison.p_value),
            Cell(_p_value(comparison.p_adjusted), order=comparison.p_adjusted),
            Cell(str(comparison.num_blocks), order=comparison.num_blocks),
            Cell(DASH if needed is None else f"{needed:,}", order=-1 if needed is None else needed),
            Cell(f"{sign} {comparison.verdict}", kind=kind, order=comparison.verdict),
        ],
        comparison_id(comparison, results),
    )


def metric_id(results: Results, name: str) -> str:
    """Anchor of a metric's row; empty where there is none."""
    names = list(dict.fromkeys(known for arm in results.arms for known in arm.metrics))
    return f"metric-{names.index(name)}" if name in names else ""


def _p_value(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def acceptance_table(arms: Iterable[ArmResult]) -> Table:
    """What became of each drafter's tokens."""
    share = Scale(0.01, "%", 1)
    rows = []
    for arm in arms:
        for drafter, facts in arm.acceptance.items():
            by_position = (accepted / tested for tested, accepted in facts.by_position if tested)
            rows.append(
                Row(
                    [
                        Cell(arm.name, order=arm.name),
                        Cell(drafter, order=drafter),
                        *(
                            Cell(f"{count:,}", order=count)
                            for count in (facts.drafted, facts.proposed, facts.accepted)
                        ),
                        number(facts.accepted / (facts.proposed or 1), share),
                        number(facts.acceptance_length, Scale(1.0, "", 2)),
                        Cell(" · ".join(f"{rate:.0%}" for rate in by_position) or DASH),
                    ]
                )
            )
    return Table(
        "Draft tokens by arm and drafter. Acceptance length counts the bonus token; the last "
        "column is the share accepted of draft token 1, 2, 3 and so on, where it was tested.",
        [
            Column("Arm", is_number=False),
            Column("Drafter", is_number=False),
            Column("Drafted", unit="tokens"),
            Column("Proposed", unit="tokens"),
            Column("Accepted", unit="tokens"),
            Column("Acceptance", unit="%"),
            Column("Acceptance length", unit="tokens"),
            Column("By position", is_number=False),
        ],
        rows,
        is_sortable=True,
    )
