"""Azure's public LLM inference traces: when requests came and how long they were.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Columns may stand in any order and others beside them. Knows nothing of texts or acceptance: these
are arrivals and lengths. Source: Azure Public Dataset, LLM inference traces of 2023 and 2024.
"""

import csv
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from sdcontrol.errors import TraceError
from sdcontrol.traces.importers.rows import Imported, RowError, Rows, in_order, opened
from sdcontrol.traces.workload import SimulatedRequest, Workload

__all__ = ["read_azure"]

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path | str, *, max_malformed: float = 0.01) -> Imported:
    """Arrivals and lengths, time counted from the first row.

    Timestamps without a zone are taken as UTC. Raises `TraceError` for a file without the columns,
    or with more than `max_malformed` of its rows malformed.
    """
    path = Path(path)
    places = _places(path)
    rows = Rows(path, lambda: in_order(_parser(places)), max_malformed=max_malformed, skip=1)
    report = rows.check()
    origin = {"format": "azure", "file": path.name, "rows": report.num_rows}
    return Imported(Workload(path.stem, (), lambda: rows, origin), report)


def _places(path: Path) -> tuple[int, ...]:
    """Where the columns stand."""
    with opened(path) as file:
        header = file.readline(1 << 16).decode("utf-8-sig", errors="replace").strip()
    try:
        names = [name.strip() for name in _fields(header)]
    except RowError:
        names = []
    if missing := [name for name in _COLUMNS if name not in names]:
        raise TraceError(
            f"{path} has no column {missing} in its first line; give a CSV with {','.join(_COLUMNS)}"
        )
    return tuple(names.index(name) for name in _COLUMNS)


def _fields(row: str) -> list[str]:
    try:
        (fields,) = csv.reader([row], strict=True)
    except (csv.Error, ValueError) as error:
        raise RowError(f"not CSV: {error}") from error
    return fields


def _parser(places: tuple[int, ...]) -> Callable[[str, int], SimulatedRequest]:
    start: float | None = None

    def parse(row: str, line: int) -> SimulatedRequest:
        nonlocal start
        fields = _fields(row)
        if len(fields) <= max(places):
            raise RowError(f"{len(fields)} fields; {max(places) + 1} were expected")
        moment, prompt, output = (fields[place].strip() for place in places)
        seconds = _seconds(moment)
        tokens = _tokens(prompt, _COLUMNS[1]), _tokens(output, _COLUMNS[2])
        start = seconds if start is None else start
        if seconds < start:
            raise RowError(f"TIMESTAMP {moment} is before the first row's")
        return SimulatedRequest(f"row-{line}", seconds - start, *tokens)

    return parse


def _seconds(moment: str) -> float:
    try:
        known = datetime.fromisoformat(moment)
    except ValueError as error:
        raise RowError(f"TIMESTAMP {moment[:40]!r} is no date and time") from error
    return (known if known.tzinfo else known.replace(tzinfo=UTC)).timestamp()


def _tokens(field: str, name: str) -> int:
    if not (field.isascii() and field.isdigit() and len(field) < 10 and int(field)):
        raise RowError(f"{name} is {field[:40]!r}; a whole number of at least 1 was expected")
    return int(field)
