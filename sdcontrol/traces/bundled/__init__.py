"""Small traces of the bundled models, recorded by `python -m benchmarks.record_bundled`.

`mixed` is a longer run under `goodput`, with token ids, whose requests arrive one after another;
the others are short runs, one per policy.
"""

from pathlib import Path

from sdcontrol.errors import UnknownName
from sdcontrol.traces.header import HEADER

__all__ = ["bundled_trace", "bundled_traces", "trace_folder"]

_FOLDER = Path(__file__).parent
_BUNDLED = "bundled:"


def bundled_traces() -> tuple[str, ...]:
    """The names of the bundled traces."""
    return tuple(sorted(header.parent.name for header in _FOLDER.glob(f"*/{HEADER}")))


def bundled_trace(name: str = "mixed") -> Path:
    """The folder of a bundled trace. Raises `UnknownName` for another name."""
    if name not in bundled_traces():
        raise UnknownName(f"no bundled trace {name!r}; choose from {', '.join(bundled_traces())}")
    return _FOLDER / name


def trace_folder(given: str) -> Path:
    """The folder of a trace: as given, or of `bundled:NAME`. Raises `UnknownName`."""
    if given.startswith(_BUNDLED):
        return bundled_trace(given.removeprefix(_BUNDLED))
    return Path(given)
