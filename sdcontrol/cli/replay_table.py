"""Replays compared, as a table for terminals. Knows cells; simulates and decides nothing."""

from rich.markup import escape
from rich.table import Table

from sdcontrol.experiments.replay_cells import Cell, cells_of, columns_of
from sdcontrol.experiments.replay_summary import Comparison

__all__ = ["table_of"]


def table_of(comparison: Comparison, title: str) -> Table:
    """One row per source and policy; the source is named where there are several."""
    caption = f"best first: {comparison.words}; 95 % intervals"
    table = Table(title=escape(title), caption=caption)
    has_sources = len({row.source for row in comparison.rows}) > 1
    for name in ["workload", "policy"] if has_sources else ["policy"]:
        table.add_column(name, overflow="fold")
    for name in columns_of(comparison):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        names = [row.source, row.policy] if has_sources else [row.policy]
        table.add_row(*map(escape, names), *map(_text, cells_of(row, comparison)))
    return table


def _text(cell: Cell) -> str:
    return f"{cell.value} [dim]{cell.interval}[/dim]" if cell.interval else cell.value
