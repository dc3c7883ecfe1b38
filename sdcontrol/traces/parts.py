"""Checked files: tables and headers that are whole or refused.

    parts/steps-000003-256-<sha256>.parquet       rows and digest are in the name

While a trace is written its tables grow part by part. A part appears under its name once it is
whole, by an atomic rename, so a process that dies leaves whole parts only. Each says inside which
trace, table and place it belongs to: a part that was moved, doubled, changed or lost is found.
Knows nothing of what the tables mean.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sdcontrol.extras import needed

with needed():
    import pyarrow as pa
    import pyarrow.parquet as pq

from sdcontrol.errors import SdcontrolError, TraceError
from sdcontrol.traces.schema import LATER_COLUMNS, FileFacts

__all__ = [
    "Part",
    "digest_of",
    "find_parts",
    "open_table",
    "open_whole",
    "parquet_options",
    "reading",
]
__all__ += ["replace_file", "table_bytes", "write_part"]

_KEY = "sdcontrol"
_NAME = re.compile(
    r"(?P<table>[a-z]+)-(?P<sequence>\d{6,9})-(?P<rows>\d{1,9})-(?P<sha>[0-9a-f]{64})"
)
_DAMAGE = (  # what a parser may make of bytes that it was not meant for
    SdcontrolError,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    pa.ArrowException,
)
_MOST_ROWS_PER_GROUP = 1 << 20
_MOST_BYTES_PER_GROUP = 1 << 30  # uncompressed
_MOST_VALUES_PER_COLUMN = 1 << 27  # of one row group

parquet_options: Mapping[str, object] = {
    "compression": "zstd",
    "compression_level": 3,
    "write_page_checksum": True,
    "write_statistics": False,  # nobody looks for rows by value
    "store_schema": False,  # the columns' types are Parquet's own
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a table."""

    path: Path
    sequence: int
    rows: int
    sha256: str


def write_part(folder: Path, name: str, sequence: int, table: pa.Table, trace_id: str) -> Part:
    """Write part number `sequence` of the table `name`."""
    place = {"trace": trace_id, "table": name, "sequence": sequence, "rows": table.num_rows}
    content = table_bytes(table, place)
    sha256 = hashlib.sha256(content).hexdigest()
    path = folder / f"{name}-{sequence:06}-{table.num_rows}-{sha256}.parquet"
    replace_file(path, content)
    return Part(path, sequence, table.num_rows, sha256)


def table_bytes(table: pa.Table, place: Mapping[str, object]) -> bytes:
    """A table as a file that says where it belongs."""
    sink = pa.BufferOutputStream()
    options = {**parquet_options, "use_dictionary": False}  # takes a third less; parts are merged
    with pq.ParquetWriter(sink, table.schema, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_KEY: json.dumps(place)})
    content: bytes = sink.getvalue().to_pybytes()
    return content


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is there in full, or as it was before."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def find_parts(folder: Path, name: str) -> list[Part]:
    """The parts of the table `name`, in order. Raises `TraceError` where one is lost or foreign."""
    found = [_part(path) for path in sorted(folder.iterdir()) if path.suffix != ".tmp"]
    parts = sorted((part for table, part in found if table == name), key=lambda part: part.sequence)
    for expected, part in enumerate(parts):
        if part.sequence != expected:
            what = "is there twice" if part.sequence < expected else "follows a part that is lost"
            raise TraceError(
                f"{part.path}: part {part.sequence} of {name} {what}; restore the folder, or "
                f"delete the parts of {name} from {min(expected, part.sequence)} on to read what "
                "stands before"
            )
    return parts


def _part(path: Path) -> tuple[str, Part]:
    match = _NAME.fullmatch(path.stem)
    if match is None or path.suffix != ".parquet":
        raise TraceError(f"{path} is no part of a trace; move it elsewhere")
    return match["table"], Part(path, int(match["sequence"]), int(match["rows"]), match["sha"])


def digest_of(path: Path) -> FileFacts:
    """Digest and size of a file."""
    with reading(path), path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileFacts(sha256=sha256, size_bytes=file.tell())


def open_table(part: Part, schema: pa.Schema, *, place: Mapping[str, object]) -> pq.ParquetFile:
    """The table of a part, if it has these columns and this place in its trace.

    Raises `TraceError` for another.
    """
    path = part.path
    if digest_of(path).sha256 != part.sha256:
        raise TraceError(f"{path} is damaged: its digest is not the recorded one; restore it")
    file = open_whole(path, schema, place=place)
    if file.metadata.num_rows != part.rows:
        raise TraceError(f"{path} has {file.metadata.num_rows} rows, not {part.rows}")
    return file


def open_whole(path: Path, schema: pa.Schema, *, place: Mapping[str, object]) -> pq.ParquetFile:
    """The same of a file whose digest and rows are not known; what is read of it is checked page by page."""
    with reading(path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
        if file.schema_arrow not in _schemas(schema):
            raise TraceError(f"{path} has other columns than this version of sdcontrol writes")
        known = json.loads((file.metadata.metadata or {}).get(_KEY.encode(), b"{}"))
        if any(known.get(key) != value for key, value in place.items()):
            raise TraceError(f"{path} belongs elsewhere: it says {known}, its place is {place}")
        _check_sizes(path, file.metadata)
        return file


def _schemas(schema: pa.Schema) -> list[pa.Schema]:
    """A table's, as this version writes it and as earlier ones did."""
    lacking = [LATER_COLUMNS[count:] for count in range(len(LATER_COLUMNS) + 1)]
    return [pa.schema([c for c in schema if c.name not in names]) for names in lacking]


def _check_sizes(path: Path, metadata: pq.FileMetaData) -> None:
    """Refuse what would not fit into memory, before it is read."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        values = max(group.column(i).num_values for i in range(group.num_columns))
        if (
            group.num_rows > _MOST_ROWS_PER_GROUP
            or group.total_byte_size > _MOST_BYTES_PER_GROUP
            or values > _MOST_VALUES_PER_COLUMN
        ):
            raise TraceError(
                f"{path}: row group {number} has {group.num_rows} rows, {values} values and "
                f"{group.total_byte_size} bytes; at most {_MOST_ROWS_PER_GROUP}, "
                f"{_MOST_VALUES_PER_COLUMN} and {_MOST_BYTES_PER_GROUP} are read"
            )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside becomes a `TraceError` that names `path`."""
    try:
        yield
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        line = str(error).partition("\n")[0]
        raise TraceError(f"{path} is damaged: {line}; restore it or record again") from error
