"""Files that commands read and write: checked before work begins, with errors of one line.

Knows paths; nothing of what is in the files.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from sdcontrol.errors import ConfigError
from sdcontrol.extras import check_installed
from sdcontrol.whole_files import write_whole

__all__ = ["as_text", "check_writable", "find_trace", "write_json", "write_text"]

_STANDARD = "-"  # elsewhere standard input or output
_HEADER, _TABLE = "trace.json", ".parquet"  # of a trace, beside which other files may lie


def find_trace(given: str) -> Path:
    """The folder of a trace: as given, or of `bundled:NAME`.

    Raises `UnknownName`, and `ConfigError` where what reads traces is not installed.
    """
    check_installed("pyarrow")
    from sdcontrol.traces.bundled import trace_folder

    return trace_folder(given)


def check_writable(*paths: str | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise `ConfigError` where no file can be written at one of `paths`, or two files are one.

    `inputs` are what is read, paths and folders of traces among them, which no output may replace. A missing path is none;
    what is there and no plain file, such as a terminal, may stand there several times.
    """
    taken = {_place(given) for given in inputs if given is not None}
    for path in paths:
        if path is None:
            continue
        if path == _STANDARD:
            raise ConfigError(
                "- is no path of a file; give ./- for one of that name, or /dev/stdout"
            )
        if not Path(path).parent.is_dir() or Path(path).is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder, or is in none")
        if not any(os.access(where, os.W_OK) for where in (path, Path(path).parent)):
            raise ConfigError(
                f"{path} cannot be written: there is no permission; give another path"
            )
        place = _place(path)
        is_read = place in taken or (place.parent in taken and _is_of_trace(place))
        if is_read and (place.is_file() or not place.exists()):
            raise ConfigError(
                f"{path} cannot be written: it would replace what is read, or another output; give "
                "another path"
            )
        taken.add(place)


def _place(path: str | Path) -> Path:
    """Where it is, links followed; a link that leads to itself is its own place."""
    return Path(os.path.realpath(path))


def _is_of_trace(path: Path) -> bool:
    return path.name == _HEADER or path.suffix == _TABLE


def as_text(name: str) -> str:
    """A name, or path, with escapes in the place of bytes that are no text."""
    return name.encode("utf-8", "backslashreplace").decode()


def write_json(path: str, record: object) -> None:
    """Write a record, indented. Raises `ConfigError` where that fails."""
    write_text(path, json.dumps(record, ensure_ascii=False, indent=2) + "\n")


def write_text(path: str, text: str) -> None:
    """Write a file; what of a path is no text stands as an escape, as JSON has it. Raises `ConfigError`."""
    try:
        write_whole(Path(path), text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
