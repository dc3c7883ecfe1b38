"""`trace.json`: read, checked, written.

The header carries a digest of itself, so that a changed one is found; which version it has is
looked at first, since a later one may be made otherwise.
"""

import hashlib
import json
import math
from pathlib import Path

from pydantic import ValidationError

from sdcontrol.errors import TraceError
from sdcontrol.traces.parts import reading, replace_file
from sdcontrol.traces.schema import SCHEMA_VERSION, TraceHeader

__all__ = ["HEADER", "read_header", "write_header"]

HEADER = "trace.json"
_DIGEST = "sha256"
_MOST_BYTES = 1 << 24


def write_header(folder: Path, header: TraceHeader) -> None:
    """Write `trace.json` at once: it is the old one or the new one. Raises `TraceError`."""
    fields = {name: _plain(value) for name, value in header.model_dump(mode="json").items()}
    text = json.dumps({**fields, _DIGEST: _digest(fields)}, indent=1, allow_nan=False)
    path = folder / HEADER
    try:
        replace_file(path, (text + "\n").encode())
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error


def read_header(folder: Path) -> TraceHeader:
    """The header of the trace in `folder`. Raises `TraceError` where it cannot be trusted."""
    path = folder / HEADER
    with reading(path):
        is_there = path.is_file()
    if not is_there:
        raise TraceError(f"no trace in {str(folder)!r}: it has no {HEADER}; give a trace's folder")
    with reading(path):
        if path.stat().st_size > _MOST_BYTES:
            raise TraceError(f"{path} has {path.stat().st_size} bytes; at most {_MOST_BYTES}")
        fields = json.loads(path.read_text("utf-8"))
    if not isinstance(fields, dict) or not isinstance(fields.get("schema_version"), int):
        raise TraceError(f"{path} is no header of a trace; give a trace's folder")
    if fields["schema_version"] != SCHEMA_VERSION:
        raise TraceError(
            f"{path} is of schema version {fields['schema_version']}, this sdcontrol reads "
            f"{SCHEMA_VERSION}; read it with the version that wrote it: {fields.get('versions')}"
        )
    return _checked(path, fields)


def _checked(path: Path, fields: dict[str, object]) -> TraceHeader:
    if fields.pop(_DIGEST, None) != _digest(fields):
        raise TraceError(f"{path} was changed after it was written; restore it")
    try:
        return TraceHeader.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise TraceError(f"{path}: {where}: {first['msg']}; record again") from error


def _plain(value: object) -> object:
    """As JSON has it: infinity, such as the budget of who sets no limit, as a word, which is read as the number."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _digest(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
