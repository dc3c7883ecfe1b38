"""Packages that only some need: which extra brings each, and what to say where one is missing.

Knows names of packages; nothing of what they are for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from sdcontrol.errors import ConfigError

__all__ = ["check_installed", "missing", "needed"]

_EXTRAS = {
    "prometheus_client": "metrics",
    "pyarrow": "traces",
    "ray": "ray",
    "scipy": "learned",
    "sklearn": "learned",
    "skops": "learned",
}


def check_installed(package: str) -> None:
    """Raise `ConfigError` where `package`, which an extra brings, is missing: before work begins."""
    if find_spec(package) is None:
        raise _error(package)


def missing(error: Exception) -> ConfigError | None:
    """What to say instead of a failed import, if an extra brings what was imported."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ImportError) or package not in _EXTRAS:
        return None
    return _error(package)


@contextmanager
def needed() -> Iterator[None]:
    """Raise `ConfigError` instead of a failed import of what an extra brings."""
    try:
        yield
    except ImportError as error:
        told = missing(error)
        if told is None:
            raise
        raise told from error


def _error(package: str) -> ConfigError:
    return ConfigError(f"this needs {package}: pip install 'sdcontrol[{_EXTRAS[package]}]'")
