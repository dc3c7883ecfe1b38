"""The table of replays compared, in words and digits: the same for terminals and pages.

Knows rows; nothing of how a table is drawn.
"""

from dataclasses import dataclass

from sdcontrol.experiments.replay_summary import Comparison, Row
from sdcontrol.traces.replay_result import Interval

__all__ = ["Cell", "cells_of", "columns_of"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure, and its interval; empty where none is shown."""

    value: str
    interval: str = ""


def columns_of(comparison: Comparison) -> list[str]:
    """The headings after workload and policy. Rates are per second."""
    goodput = ["within limits/s"] if comparison.measure == "goodput" else []
    latencies = ["TTFT ms, p50", "p99", "TPOT ms, p50", "p99"]
    return ["of best", *goodput, "tokens/s", "tokens/s when busy", *latencies, "wasted", "off"]


def cells_of(row: Row, comparison: Comparison) -> list[Cell]:
    """What stands under them."""
    limits = comparison.measure == "goodput"
    return [
        Cell(f"{row.relative:.3f}"),
        *([_with_interval(row.goodput_tokens_per_second)] if limits else []),
        Cell(_digits(row.tokens_per_second)),
        _with_interval(row.tokens_per_busy_second),
        Cell(_digits(1e3 * row.ttft_median.value)),
        Cell(_digits(1e3 * row.ttft_p99.value)),
        _with_interval(row.tpot_median, 1e3),
        Cell(_digits(1e3 * row.tpot_p99.value)),
        Cell(f"{row.wasted_share:.0%}"),
        Cell(f"{row.off_share:.0%}"),
    ]


def _with_interval(found: Interval, scale: float = 1.0) -> Cell:
    value, low, high = (_digits(scale * x) for x in (found.value, found.low, found.high))
    return Cell(value, f"{low} to {high}")


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100.0 else f"{value:.3g}"
