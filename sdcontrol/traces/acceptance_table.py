"""The acceptance table of a trace, as a file: a row for every request and drafter arm.

    request_id, arm, depth | accepted, match_tokens, ... : lists with an entry per output position

Parquet with zstd and a checksum in every page, in groups of requests; it is read group by group.
Knows outcomes and files; nothing of how outcomes are computed or used.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sdcontrol.extras import needed

with needed():
    import pyarrow as pa
    import pyarrow.parquet as pq

from sdcontrol.errors import TraceError
from sdcontrol.outcomes import DEPTH, ArmOutcomes

__all__ = ["TABLE_NAME", "AcceptanceTable", "AcceptanceTableWriter", "TableHeader"]

TABLE_NAME = "acceptance.parquet"
"""Within a trace's folder."""

_SCHEMA_VERSION: Literal[1] = 1
_KEY = b"sdcontrol.acceptance"
_OPTED_OUT = b"sdcontrol.opted_out"  # ids without a row, as JSON; tables of before lack it
_GROUP_REQUESTS = 64
_MOST_GROUP_ROWS = 1 << 16
_LISTS: Mapping[str, tuple[pa.DataType, str]] = {
    "accepted": (pa.uint8(), "uint8"),
    "match_tokens": (pa.uint8(), "uint8"),
    "max_draft_tokens": (pa.uint8(), "uint8"),
    "confidence": (pa.float32(), "float32"),
    "path": (pa.uint32(), "uint32"),
    "chain_nodes": (pa.uint8(), "uint8"),
}
_SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("arm", pa.string(), nullable=False),
        pa.field("depth", pa.uint8(), nullable=False),
        *(pa.field(name, pa.list_(kind)) for name, (kind, _) in _LISTS.items()),
    ]
)

_Array = NDArray[np.generic]

Outcomes = Mapping[str, ArmOutcomes]
"""By drafter arm."""


class TableHeader(BaseModel):
    """What a table is of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = _SCHEMA_VERSION
    arms: tuple[str, ...] = Field(description="every arm that any request has")
    verification: str = Field(description="under which it is exact: coupled, greedy included")
    trace_id: str = ""
    depth: int = Field(DEPTH, ge=1, le=32)


class AcceptanceTableWriter:
    """Writes a table, request by request. It gets its name when it is closed, not before."""

    def __init__(self, path: Path | str, header: TableHeader) -> None:
        self.path = Path(path)
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._rows: list[dict[str, object]] = []
        self._num_requests = 0
        self._opted_out: list[str] = []
        self._arms = frozenset(header.arms)
        metadata = {_KEY: header.model_dump_json().encode()}
        with self._writing():
            self._file = pq.ParquetWriter(
                self._partial,
                _SCHEMA.with_metadata(metadata),
                compression="zstd",
                write_page_checksum=True,
            )

    def add(self, request_id: str, outcomes: Outcomes) -> None:
        """One request; one without outcomes opted out. Raises `TraceError` for an arm that the header does not name."""
        if not outcomes:
            self._opted_out.append(request_id)
        for arm, found in outcomes.items():
            if arm not in self._arms:
                raise TraceError(
                    f"request {request_id!r} has the arm {arm!r}, the table only "
                    f"{sorted(self._arms)}; name every arm in the header"
                )
            lists = {name: getattr(found, name) for name in _LISTS}
            self._rows.append({"request_id": request_id, "arm": arm, "depth": found.depth, **lists})
        self._num_requests += 1
        if self._num_requests % _GROUP_REQUESTS == 0:
            self._flush()

    def close(self) -> None:
        """Finish the file and give it its name. Raises `TraceError` where that fails, and leaves none."""
        try:
            self._flush()
            with self._writing():
                self._file.add_key_value_metadata({_OPTED_OUT: json.dumps(self._opted_out)})
                self._file.close()
                self._partial.replace(self.path)
        except TraceError:
            self._drop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._drop()

    def _drop(self) -> None:
        with suppress(OSError, pa.ArrowException):  # of a disk that is full
            self._file.close()
        self._partial.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise TraceError(f"{self.path} cannot be written: {error}") from error

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = {name: [row[name] for row in self._rows] for name in _SCHEMA.names}
        arrays = [pa.array(columns[field.name], type=field.type) for field in _SCHEMA]
        with self._writing():
            self._file.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA))
        self._rows.clear()


class AcceptanceTable:
    """A table in a file. Raises `TraceError` where it cannot be trusted."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._file = pq.ParquetFile(self.path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise TraceError(f"{self.path} is no acceptance table: {error}") from error
        self.header = self._read_header()
        self._opted_out = self._read_opted_out()
        self._group_of: dict[str, int] | None = None
        self._cached_group = -1
        self._cached: dict[str, dict[str, ArmOutcomes]] = {}

    def __iter__(self) -> Iterator[tuple[str, Outcomes]]:
        """Every request with its outcomes, in the order of writing; one group in memory."""
        seen: set[str] = set()
        for group in range(self._file.metadata.num_row_groups):
            for request_id, outcomes in self._read_group(group).items():
                if request_id in seen:
                    raise TraceError(f"{self.path}: request {request_id!r} stands there twice")
                seen.add(request_id)
                yield request_id, outcomes

    def of(self, request_id: str) -> Outcomes:
        """The outcomes of one request; none where it has none. Quick in the order of writing."""
        group = self._groups().get(request_id)
        if group is None:
            return {}
        if group != self._cached_group:
            self._cached, self._cached_group = self._read_group(group), group
        return self._cached[request_id]

    def knows(self, request_id: str) -> bool:
        """Whether the table is of this request, too, though it may have opted out.

        True of every request where the table is from before those were listed.
        """
        opted_out = self._opted_out
        return opted_out is None or request_id in opted_out or request_id in self._groups()

    def _groups(self) -> Mapping[str, int]:
        if self._group_of is None:
            self._group_of = self._index()
        return self._group_of

    def _read_opted_out(self) -> frozenset[str] | None:
        text = (self._file.metadata.metadata or {}).get(_OPTED_OUT)
        if text is None:
            return None
        try:
            return frozenset(TypeAdapter(list[str]).validate_json(text))
        except ValidationError as error:
            raise TraceError(f"{self.path}: its header cannot be read: {error}") from error

    def _read_header(self) -> TableHeader:
        if self._file.schema_arrow.remove_metadata() != _SCHEMA:
            raise TraceError(f"{self.path} does not have the columns of an acceptance table")
        if self._file.metadata.num_row_groups and any(
            self._file.metadata.row_group(group).num_rows > _MOST_GROUP_ROWS
            for group in range(self._file.metadata.num_row_groups)
        ):
            raise TraceError(f"{self.path} has a group of more than {_MOST_GROUP_ROWS} rows")
        text = (self._file.schema_arrow.metadata or {}).get(_KEY, b"{}")
        try:
            facts = json.loads(text)
            if isinstance(facts, dict) and facts.get("schema_version", 1) != _SCHEMA_VERSION:
                raise TraceError(
                    f"{self.path} has version {facts['schema_version']}, this sdcontrol reads "
                    f"{_SCHEMA_VERSION}; upgrade sdcontrol or make the table again"
                )
            return TableHeader.model_validate(facts)
        except (ValidationError, ValueError) as error:
            raise TraceError(f"{self.path}: its header cannot be read: {error}") from error

    def _index(self) -> dict[str, int]:
        """The group of every request."""
        found: dict[str, int] = {}
        for group in range(self._file.metadata.num_row_groups):
            for request_id in dict.fromkeys(self._table(group, ["request_id"])[0].to_pylist()):
                if request_id in found:
                    raise TraceError(f"{self.path}: request {request_id!r} stands there twice")
                found[request_id] = group
        return found

    def _table(self, group: int, columns: list[str] | None = None) -> pa.Table:
        try:
            return self._file.read_row_group(group, columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise TraceError(f"{self.path}: group {group} is damaged: {error}") from error

    def _read_group(self, group: int) -> dict[str, dict[str, ArmOutcomes]]:
        table = self._table(group)
        ids, arms, depths = (table[name].to_pylist() for name in ("request_id", "arm", "depth"))
        lists = {name: _arrays(table[name], kind) for name, (_, kind) in _LISTS.items()}
        requests: dict[str, dict[str, ArmOutcomes]] = {}
        for row, (request_id, arm) in enumerate(zip(ids, arms, strict=True)):
            outcomes = requests.setdefault(request_id, {})
            if arm in outcomes or lists["accepted"][row] is None:
                raise TraceError(
                    f"{self.path}: request {request_id!r}, arm {arm!r} stands there twice, or "
                    "without counts"
                )
            values = {name: found[row] for name, found in lists.items()}
            outcomes[arm] = ArmOutcomes(depth=depths[row], **values)  # type: ignore[arg-type]
        return requests


def _arrays(column: pa.ChunkedArray, kind: str) -> list[_Array | None]:
    """One array, or None, per row."""
    found: list[_Array | None] = []
    for scalar in column.combine_chunks():
        values = scalar.values
        if values is not None and values.null_count:
            raise TraceError("a list of the acceptance table has gaps")
        found.append(None if values is None else np.asarray(values.to_numpy(), dtype=kind))
    return found
