"""Arrays, numbers and strings in a skops file: nothing is unpickled, and no other type is built."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from sdcontrol.errors import ConfigError
from sdcontrol.extras import needed
from sdcontrol.whole_files import write_whole

__all__ = ["read_skops", "write_skops"]


def write_skops(state: dict[str, object], path: Path) -> None:
    """Write `state`, which holds arrays, numbers and strings. Raises `OSError`; what was there stays then."""
    with needed(), _aliases_hidden():
        from skops.io import dumps

    write_whole(path, dumps(state))


def read_skops(path: Path) -> object:
    """What `write_skops` wrote. Raises `ConfigError` for anything else, before it is built."""
    with needed(), _aliases_hidden():
        from skops.io import get_untrusted_types, load

    try:
        foreign = sorted(get_untrusted_types(file=path))
        state: object = None if foreign else load(path, trusted=[])
    except Exception as error:
        raise ConfigError(f"{str(path)!r} is no readable skops file: {error}") from error
    if foreign:
        raise ConfigError(f"{str(path)!r} holds {foreign}; only arrays and numbers are loaded")
    return state


@contextmanager
def _aliases_hidden() -> Iterator[None]:
    """Without modules that were made by hand to import others once they are asked for a name.

    When it is imported, skops asks every module for many. Those of transformers 5.17 import all its
    image processors then, which without Pillow ends in a `NameError`.
    """
    aliases = {name: module for name, module in [*sys.modules.items()] if _is_alias(module)}
    for name in aliases:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(aliases)


def _is_alias(module: ModuleType) -> bool:
    own = getattr(module, "__dict__", {})
    return own.get("__spec__") is None and "__getattr__" in own
