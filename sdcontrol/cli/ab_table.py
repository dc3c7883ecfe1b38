"""The terminal's version of a comparison's report: the same numbers, as tables.

Knows `Results`; measures and decides nothing.
"""

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from sdcontrol.experiments.metrics import METRICS
from sdcontrol.experiments.results import ArmResult, MetricSummary, Results

__all__ = ["tables"]

_MOST_ARMS = 5  # side by side: of more, names and numbers would be cut


def tables(results: Results) -> Iterator[Table]:
    """Metrics by arm, comparisons, and the machine's own noise where it was measured."""
    for first in range(0, len(results.arms) or 1, _MOST_ARMS):
        yield _metrics(results, results.arms[first : first + _MOST_ARMS])
    if results.comparisons:
        yield _comparisons(results)
    if results.drift is not None:
        yield _drift(results)


def _metrics(results: Results, arms: Sequence[ArmResult]) -> Table:
    measured = "simulated" if results.is_simulated else "live"
    title = f"{results.title}: means over {results.stopping.num_blocks} blocks, 95 % ({measured})"
    table = Table(title=escape(title))
    table.add_column("metric", no_wrap=True)
    for arm in arms:
        name = f"{arm.name} (failed)" if arm.failed else arm.name
        table.add_column(escape(name), justify="right", overflow="fold")
    for name in METRICS:
        cells = [arm.metrics.get(name) for arm in arms]
        if any(cells):
            table.add_row(name, *(_cell(cell) for cell in cells))
    return table


def _cell(metric: MetricSummary | None) -> str:
    if metric is None:
        return "-"
    scale, unit = (2**20, " MiB") if metric.unit == "bytes" else (1, "")
    value, low, high = (_digits(v / scale) for v in (metric.value, metric.low, metric.high))
    return f"{value}{unit} [dim]{low} to {high}[/dim]"


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _comparisons(results: Results) -> Table:
    table = Table(title="Ratios inside blocks")
    for column in ("arm / against", "metric"):
        table.add_column(column, overflow="fold")
    for column in ("ratio", "interval", "p, corrected", "blocks"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for found in results.comparisons:
        ratio = found.ratio
        table.add_row(
            escape(f"{found.arm} / {found.baseline}"),
            found.metric,
            f"{ratio.value:.3f}x",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            f"{found.p_adjusted:.2g}",
            str(found.num_blocks),
            found.verdict,
        )
    return table


def _drift(results: Results) -> Table:
    drift = results.drift
    assert drift is not None
    title = f"A/A: {results.baseline} twice in {len(drift.per_block)} blocks, {drift.metric}"
    table = Table(title=escape(title))
    for column in ("second over first", "interval", "noise of one block", "could show"):
        table.add_column(column, justify="right")
    shown = "-" if drift.smallest_ratio is None else f"{drift.smallest_ratio:.3f}x"
    ratio = drift.ratio
    interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
    table.add_row(f"{ratio.value:.3f}x", interval, f"{drift.noise:.1%}", shown)
    return table
