"""Rows of a file, each good or malformed: counted, the first few shown, refused beyond a share.

Knows lines and reasons; nothing of any format. A row is malformed where its parser raises
`RowError`; it is then left out, never repaired.
"""

import codecs
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from sdcontrol.errors import ConfigError, TraceError
from sdcontrol.traces.workload import SimulatedRequest, Workload

__all__ = [
    "ImportReport",
    "Imported",
    "MalformedRow",
    "RowError",
    "Rows",
    "check_plain",
    "count",
    "in_order",
    "json_object",
    "number",
    "opened",
    "text",
]

Parsed = TypeVar("Parsed")

_MOST_SHOWN = 5
_MOST_LINE_BYTES = 1 << 26


class RowError(ValueError):
    """Why a row is malformed; never leaves the importers."""


@dataclass(frozen=True, slots=True)
class MalformedRow:
    """Where, counted from 1, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What a file held. `notes` say what was in it and is not used."""

    path: str
    num_rows: int
    num_malformed: int
    malformed: tuple[MalformedRow, ...]  # the first few
    notes: tuple[str, ...] = ()

    def to_text(self) -> str:
        """For a terminal: a line, and one for each malformed row that is shown."""
        lines = [f"{self.path}: {self.num_rows} rows, {self.num_malformed} malformed"]
        lines += [f"  line {row.line}: {row.reason}" for row in self.malformed]
        if self.num_malformed > len(self.malformed):
            lines.append(f"  and {self.num_malformed - len(self.malformed)} more")
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True, slots=True)
class Imported:
    """A workload and what was left out of it."""

    workload: Workload
    report: ImportReport


class Rows(Generic[Parsed]):
    """The good rows of a file, parsed anew at every iteration.

    `parser` makes the parser of one reading, so that it may remember earlier rows; it is given each
    line without its end. Iterating raises `TraceError`, at the end of the file, where more than
    `max_malformed` of all rows were malformed. Blank lines are no rows; the first `skip` are none.
    """

    def __init__(
        self,
        path: Path | str,
        parser: Callable[[], Callable[[str, int], Parsed]],
        *,
        max_malformed: float,
        skip: int = 0,
    ) -> None:
        if not 0.0 <= max_malformed < 1.0:
            raise ConfigError(f"max_malformed {max_malformed}; give a share from 0 to below 1")
        self.path = Path(path)
        self._parser = parser
        self._max_malformed = max_malformed
        self._skip = skip

    def __iter__(self) -> Iterator[Parsed]:
        yield from self._read([])

    def check(self, *notes: str) -> ImportReport:
        """Read everything once and keep nothing. Raises `TraceError` for too many malformed rows."""
        malformed: list[MalformedRow] = []
        num_good = sum(1 for _ in self._read(malformed))
        total = num_good + len(malformed)
        if not num_good:
            raise TraceError(f"{self.path} has no rows; give a file with at least one request")
        shown = tuple(malformed[:_MOST_SHOWN])
        return ImportReport(str(self.path), total, len(malformed), shown, notes)

    def _read(self, malformed: list[MalformedRow]) -> Iterator[Parsed]:
        parse, num_good = self._parser(), 0
        for line, raw in self._lines():
            try:
                parsed = parse(_decoded(raw), line)
            except RowError as error:
                malformed.append(MalformedRow(line, str(error)))
                continue
            num_good += 1
            yield parsed
        if len(malformed) > self._max_malformed * (num_good + len(malformed)):
            shown = "; ".join(f"line {row.line}: {row.reason}" for row in malformed[:_MOST_SHOWN])
            raise TraceError(
                f"{self.path}: {len(malformed)} of {num_good + len(malformed)} rows are malformed, "
                f"more than {self._max_malformed:.3g} of them ({shown}); repair the file, or raise "
                "max_malformed"
            )

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with opened(self.path) as file:
            line = 0
            while raw := file.readline(_MOST_LINE_BYTES):
                line += 1
                if line == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if line > self._skip and raw.strip():
                    yield line, raw


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file, from its beginning. Raises `TraceError` where it cannot be read, or only once."""
    try:
        check_plain(path)
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def check_plain(path: Path) -> None:
    """Raise `TraceError` for a pipe or a device: a recording is read several times."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(
            f"{path} is no plain file, and is to be read several times; save it as one"
        )


def in_order(
    parse: Callable[[str, int], SimulatedRequest],
) -> Callable[[str, int], SimulatedRequest]:
    """`parse`, for requests that must not arrive before their predecessors."""
    latest = 0.0

    def parse_in_order(row: str, line: int) -> SimulatedRequest:
        nonlocal latest
        request = parse(row, line)
        if request.arrival_seconds < latest:
            raise RowError(f"arrives {latest - request.arrival_seconds:.6g} s before a row above")
        latest = request.arrival_seconds
        return request

    return parse_in_order


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8: {error.reason} at byte {error.start}") from error


def json_object(row: str) -> Mapping[str, object]:
    """A line's JSON object."""
    try:
        found = json.loads(row)
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON: {error.msg} at character {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, too deep a nest
        raise RowError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RowError(f"a JSON object was expected, not {type(found).__name__}")
    return found


def count(fields: Mapping[str, object], name: str, *, least: int = 0) -> int:
    """A whole number of at least `least`."""
    value = _present(fields, name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
        raise RowError(
            f"{name} is {_shown(value)}; a whole number of at least {least} was expected"
        )
    return value


def number(fields: Mapping[str, object], name: str) -> float:
    """A finite number of at least 0."""
    value = _present(fields, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"{name} is {_shown(value)}; a number was expected")
    if not 0.0 <= value < 1e15 or not math.isfinite(value):
        raise RowError(f"{name} is {_shown(value)}; a number from 0 to 1e15 was expected")
    return float(value)


def text(fields: Mapping[str, object], name: str) -> str:
    """A string with something in it."""
    value = _present(fields, name)
    if not isinstance(value, str) or not value:
        raise RowError(f"{name} is {_shown(value)}; a text was expected")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a pair, which JSON may escape
        raise RowError(f"{name} is no text: {error.reason} at {error.start}") from error
    return value


def _present(fields: Mapping[str, object], name: str) -> object:
    if name not in fields:
        raise RowError(f"{name} is missing")
    return fields[name]


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
