"""A YAML file as data, and where each value of it stands.

    document = read_document(path)          data, places
    document = document.with_value(("arms", 0, "policy"), "off", place="--set ...")

Knows YAML, its lines and columns; nothing of experiments. Unlike YAML 1.1, only true and false are
booleans: `off` is a policy. A day or a time is a word, 010 is no eight. A key that comes twice is refused.
"""

import copy
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath

import yaml

from sdcontrol.errors import ConfigError

__all__ = ["Document", "Path", "parse_value", "read_document"]

Path = tuple[str | int, ...]
_MOST_NODES = 20_000
_DEEPEST = 60
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"


class _Loader(yaml.SafeLoader):
    """`off` and its like, days and times are words; so is 010, which fields of numbers take for ten."""


_READ_HERE = {f"{_TAG}{name}" for name in ("bool", "int", "float", "timestamp")}
_FORMS = {  # of plain values, and what they may begin with
    "bool": (r"true|false", "tf"),
    "int": (r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+|0b[01_]+", "-+0123456789"),
    "float": (
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag not in _READ_HERE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_form, _beginnings) in _FORMS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"^({_form})$"), list(_beginnings))


@dataclass(frozen=True, slots=True)
class Document:
    """Data, and the place ("file:line:column") of every value in it."""

    data: object
    places: Mapping[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """The place of a value, or of the nearest thing around it that has one."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places[path]

    def with_value(self, path: Path, value: object, *, place: str) -> "Document":
        """A copy in which the value at `path` is another; what is no mapping on the way becomes one.

        Raises `ConfigError` where the path leads through something that has no such entry.
        """
        data, keys = copy.deepcopy(self.data), [*path]
        node = data
        for depth, key in enumerate(path):
            if isinstance(node, dict):
                keys[depth] = str(key)  # those of a mapping are words, also the 8 of a schedule
            if depth + 1 < len(path):
                node = _entry(node, keys[depth], tuple(keys[: depth + 1]), place)
        path = tuple(keys)
        _set(node, path, value, place)
        places = {p: at for p, at in self.places.items() if p[: len(path)] != path}
        return Document(data, {**places, path: place})


def read_document(path: FilePath) -> Document:
    """Raises `ConfigError`, naming the place, for what is no YAML."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}:1:1: no UTF-8 text: {error.reason}; save it as UTF-8") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}:1:1: cannot be read: {reason}; give a YAML file") from error
    return _parse(text, str(path))


def parse_value(text: str, place: str) -> object:
    """A value as YAML has it: "3" is a number, "off" a word."""
    return _parse(text, place).data


def _parse(text: str, name: str) -> Document:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise ConfigError(_at_character(text, name, error)) from error
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(None, {(): f"{name}:1:1"})
        return _Reader(loader, name).read(node)
    except yaml.reader.ReaderError as error:
        raise ConfigError(_at_character(text, name, error)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
        problem = " ".join(str(error.problem or error.context).split())
        raise ConfigError(f"{name}:{at}: no YAML: {problem}; mend it there") from error
    except RecursionError as error:
        raise ConfigError(f"{name}:1:1: nested too deeply; flatten it") from error
    finally:
        loader.dispose()


def _at_character(text: str, name: str, error: yaml.reader.ReaderError) -> str:
    before = text[: error.position]
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    return f"{name}:{line}:{column}: a character that YAML does not allow; remove it"


class _Reader:
    """Values and places of a tree of nodes; aliases may not blow it up."""

    def __init__(self, loader: _Loader, name: str) -> None:
        self._loader = loader
        self._name = name
        self._places: dict[Path, str] = {}

    def read(self, root: yaml.Node) -> Document:
        data = self._value(root, ())
        return Document(data, {**self._places, (): self._place(root)})

    def _value(self, node: yaml.Node, path: Path) -> object:
        self._places.setdefault(path, self._place(node))
        if len(path) > _DEEPEST or len(self._places) > _MOST_NODES:
            raise ConfigError(
                f"{self._place(node)}: more than {_DEEPEST} levels or {_MOST_NODES} values (do "
                "aliases repeat each other?); make it smaller"
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if key_node.tag == _MERGE:
                raise ConfigError(f"{place}: merge keys (<<) are not read; write the keys out")
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, Hashable) or key is None:
                raise ConfigError(f"{place}: a key must be a word; rename it")
            name = str(key)
            if name in found:
                first = self._places[(*path, name)].rpartition(":")[0].rpartition(":")[2]
                raise ConfigError(
                    f"{place}: {name!r} was given in line {first} already; remove one of them"
                )
            self._places[(*path, name)] = place
            found[name] = self._value(value_node, (*path, name))
        return found

    def _scalar(self, node: yaml.Node) -> object:
        try:
            value: object = self._loader.construct_object(node)
            str(value)  # a number of too many digits is none: nobody could be told of it
        except (ValueError, OverflowError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{self._place(node)}: no such value: {reason}; mend it") from error
        return value

    def _place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _entry(node: object, key: str | int, path: Path, place: str) -> object:
    """The part of `node` that further keys lead into; a missing or plain one becomes a mapping."""
    if isinstance(node, dict) and isinstance(key, str):
        if not isinstance(node.get(key), dict | list):
            node[key] = {}
        return node[key]
    if isinstance(node, list) and isinstance(key, int) and key < len(node):
        if not isinstance(node[key], dict | list):
            node[key] = {}
        return node[key]
    raise ConfigError(f"{place}: there is no {'.'.join(map(str, path))}; {_has(node)}")


def _set(node: object, path: Path, value: object, place: str) -> None:
    """Another `kind` has other settings: those of the old one go."""
    key = path[-1]
    if isinstance(node, dict) and isinstance(key, str):
        if key == "kind" and node.get("kind") != value:
            node.clear()
        node[key] = value
    elif isinstance(node, list) and isinstance(key, int) and key < len(node):
        node[key] = value
    else:
        raise ConfigError(f"{place}: there is no {'.'.join(map(str, path))}; {_has(node)}")


def _has(node: object) -> str:
    if isinstance(node, list):
        return f"the list has entries 0 to {len(node) - 1}" if node else "the list is empty"
    if isinstance(node, dict):
        return f"there are {', '.join(sorted(map(str, node)))}"
    return "what stands there has no parts; replace it as a whole"
