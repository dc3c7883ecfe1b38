"""Arrays, numbers and strings in a skops file: nothing is unpickled, and no other type is built.

skops itself would build estimators, generators and functions too, of files that name them.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

from sdcontrol.errors import ConfigError
from sdcontrol.extras import needed
from sdcontrol.whole_files import write_whole

__all__ = ["read_skops", "write_skops"]

_BUILT = {
    ("builtins", "dict", "DictNode"),
    ("builtins", "list", "ListNode"),
    ("builtins", "str", "JsonNode"),  # numbers and truth values too
    ("builtins", "str", "TypeNode"),  # of the keys of a dict
    ("numpy", "ndarray", "NdArrayNode"),
}
"""By module, name, and what skops builds it with."""
_MOST_BYTES = 1 << 26  # of all that a file unpacks to


def write_skops(state: dict[str, object], path: Path) -> None:
    """Write `state`, which holds arrays, numbers and strings. Raises `OSError`; what was there stays then."""
    with needed(), _aliases_hidden():
        from skops.io import dumps

    write_whole(path, dumps(state))


def read_skops(path: Path) -> object:
    """What `write_skops` wrote. Raises `ConfigError` for anything else, before it is built."""
    with needed(), _aliases_hidden():
        from skops.io import load

    try:
        foreign = sorted({*_foreign(_schema(path))})
        state: object = None if foreign else load(path, trusted=[])
    except Exception as error:
        raise ConfigError(f"{str(path)!r} is no readable skops file: {error}") from error
    if foreign:
        raise ConfigError(f"{str(path)!r} holds {foreign}; only arrays and numbers are loaded")
    return state


def _schema(path: Path) -> object:
    """What the file says it holds. Raises where it would unpack to more than any that was written."""
    with ZipFile(path) as archive:
        num_bytes = sum(entry.file_size for entry in archive.infolist())
        if num_bytes > _MOST_BYTES:
            raise ValueError(f"it unpacks to {num_bytes} bytes, more than {_MOST_BYTES}")
        return json.loads(archive.read("schema.json"))


def _foreign(node: object) -> Iterator[str]:
    """The types in a schema, at any depth, that are not built here."""
    if isinstance(node, dict):
        kind = node.get("__module__"), node.get("__class__"), node.get("__loader__")
        if "__loader__" in node and kind not in _BUILT:
            yield f"{kind[0]}.{kind[1]}"
        for part in node.values():
            yield from _foreign(part)
    if isinstance(node, list):
        for part in node:
            yield from _foreign(part)


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
