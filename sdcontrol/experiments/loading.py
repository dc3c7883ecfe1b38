"""From a file, and what the command line overrides, to validated experiments.

Knows how pydantic's complaints map to places in the file; nothing of what the settings mean. Every
error reads "file:line:column: key: what is wrong; what to do".
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.document import Document, Path, parse_value, read_document
from sdcontrol.experiments.workload_settings import nearest

__all__ = ["experiment_of", "json_schema", "load_experiments"]

_MOST_RUNS = 1000
_LONGEST_NAME = 120


def load_experiments(path: FilePath, overrides: Sequence[str] = ()) -> list[Experiment]:
    """One experiment, or one per cell of its `matrix`, each with a name of its own.

    `overrides` are "a.b.c=value", where the value is YAML. Raises `ConfigError`.
    """
    document = read_document(path)
    for override in overrides:
        document = _overridden(document, override)
    whole = experiment_of(document)
    return [experiment_of(cell) for cell in _cells(document, whole)] if whole.matrix else [whole]


def experiment_of(document: Document) -> Experiment:
    """The validated experiment; raises `ConfigError` with the place of what is wrong."""
    if not isinstance(document.data, dict):
        raise ConfigError(
            f"{document.place(())}: no mapping; begin with a line such as name: my-comparison"
        )
    try:
        return Experiment.model_validate(document.data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise ConfigError(_message(document, _worst(found))) from error
    except RecursionError as error:
        raise ConfigError(f"{document.place(())}: nested too deeply; flatten it") from error


def json_schema() -> str:
    """The JSON schema of the file, for editors."""
    return json.dumps(_schema(), indent=1)


@cache
def _schema() -> Mapping[str, object]:
    return Experiment.model_json_schema()


# ---- overrides and sweeps


def _overridden(document: Document, override: str) -> Document:
    keys, equals, text = override.partition("=")
    place = f"--set {override}"
    if not equals or not all(keys.split(".")):
        raise ConfigError(f"{place}: no a.b.c=value; for example --set arms.0.policy.kind=off")
    return document.with_value(_keys(keys), parse_value(text, place), place=place)


def _keys(dotted: str) -> Path:
    return tuple(int(k) if k.isascii() and k.isdigit() else k for k in dotted.split("."))


def _cells(document: Document, whole: Experiment) -> Iterator[Document]:
    """The document once per combination of the matrix's values; the last key varies fastest."""
    place = document.place(("matrix",))
    number = math.prod(len(choices) for choices in whole.matrix.values())
    if not 1 <= number <= _MOST_RUNS:
        raise ConfigError(f"{place}: matrix: {number} runs; give 1 to {_MOST_RUNS} combinations")
    for dotted, choices in whole.matrix.items():
        _check_choices(document, dotted, choices)
    values = [tuple(enumerate(choices)) for choices in whole.matrix.values()]
    bare = document.with_value(("matrix",), {}, place=place)
    taken: set[str] = set()
    for run, combination in enumerate(itertools.product(*values), start=1):
        cell, parts = bare, [whole.name]
        for dotted, (index, value) in zip(whole.matrix, combination, strict=True):
            at = document.place(("matrix", dotted, index))
            cell = cell.with_value(_keys(dotted), value, place=at)
            parts.append(f"{dotted.rpartition('.')[2]}={_word(value, index)}")
        name = _free_name("-".join(parts), run, taken)
        yield cell.with_value(("name",), name, place=place)


def _check_choices(document: Document, dotted: str, choices: Sequence[object]) -> None:
    """Raise `ConfigError` for what is no key of a setting, and for a value that comes twice."""
    first = document.place(("matrix", dotted, 0))
    if not all(dotted.split(".")) or dotted.split(".")[0] in ("matrix", "name"):
        raise ConfigError(f"{first}: matrix: no key {dotted!r}; write one such as blocks")
    seen: set[str] = set()
    for index, value in enumerate(choices):
        text = json.dumps(value, sort_keys=True)
        if text in seen:
            at = document.place(("matrix", dotted, index))
            raise ConfigError(f"{at}: matrix.{dotted}: {_shown(value)} comes twice; remove one")
        seen.add(text)


def _free_name(name: str, run: int, taken: set[str]) -> str:
    """A folder's name that no run has yet, in a file system that knows no case either.

    One that is too long, or taken, is cut and gets the number of its run.
    """
    while len(name) > _LONGEST_NAME or name.casefold() in taken:
        name = f"{name[: _LONGEST_NAME - 10]}-{run}"
        run += _MOST_RUNS
    taken.add(name.casefold())
    return name


def _word(value: object, index: int) -> str:
    """A value as a piece of a file's name."""
    text = re.sub(r"[^A-Za-z0-9.]+", ".", str(value)).strip(".")
    return text if text and len(text) <= 24 else str(index)


# ---- errors


def _worst(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """Unknown keys first: a misspelt one makes others missing."""
    return min(errors, key=lambda error: error["type"] != "extra_forbidden")


def _message(document: Document, error: ErrorDetails) -> str:
    path, rest = _located(document.data, error["loc"])
    if error["type"] == "extra_forbidden":
        valid = tuple(sorted(_properties(document.data, path[:-1])))
        problem = f"no such key; {nearest(str(path[-1]), valid)}"
    elif error["type"] == "missing":
        problem = f"{'.'.join(map(str, rest)) or 'a key'} is missing; add it there"
    elif error["type"] == "value_error":  # one of ours, or a policy's: it names the remedy
        path = _deeper(document.data, path, error["msg"])
        problem = error["msg"].removeprefix("Value error, ")
    else:
        remedy = _remedy(document.data, path, error["type"])
        if error["type"] == "string_type" and isinstance(error["input"], int | float):
            remedy += ", in quotes"
        problem = f"{_shown(error['input'])}: {error['msg']}; {remedy}"
    shown = ".".join(map(str, path))
    return f"{document.place(path)}: {shown + ': ' if shown else ''}{problem}"


def _located(data: object, loc: Sequence[str | int]) -> tuple[Path, Path]:
    """The part of `loc` that stands in the data, and what is left; tags of unions are dropped."""
    path: list[str | int] = []
    rest: list[str | int] = []
    node: Any = data
    for part in loc:
        is_key = isinstance(node, dict) and part in node
        is_index = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if not rest and (is_key or is_index):
            path.append(part)
            node = node[part]
        elif part not in ("closed", "open", "recorded", "[key]", "int", "str"):
            rest.append(part)
    return tuple(path), tuple(rest)


def _deeper(data: object, path: Path, message: str) -> Path:
    """A policy says in words which of its settings is wrong: point at that line."""
    node = _node(data, path)
    if path[-1:] == ("policy",) and isinstance(node, dict):
        for key in node:
            if repr(key) in message or f" {key}=" in message:
                return (*path, key)
        return (*path, "kind") if "kind" in node else path
    return path


def _node(data: Any, path: Path) -> object:
    for key in path:
        data = data[key]
    return data


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _remedy(data: object, path: Path, kind: str) -> str:
    if kind in ("union_tag_invalid", "literal_error"):
        return "choose one of those"
    for part in _schemas(data, path):
        description = part.get("description")
        if isinstance(description, str) and "properties" not in part:
            return f"give {description}"
    return "sdcontrol ab --schema says what goes there"


def _properties(data: object, path: Path) -> set[str]:
    """The keys that may stand in the mapping at `path`."""
    node = _node(data, path)
    kind = node.get("kind") if isinstance(node, dict) else None
    found = [part for part in _schemas(data, path) if isinstance(part.get("properties"), dict)]
    same = [part for part in found if _kind(part) == kind] or found
    return {str(name) for part in same for name in _mapping(part["properties"])}


def _kind(part: Mapping[str, object]) -> object:
    return _mapping(_mapping(part["properties"]).get("kind")).get("const")


def _schemas(data: object, path: Path) -> list[Mapping[str, object]]:
    """The schemas that a value at `path` may have, unions taken apart."""
    found = _alternatives(_schema())
    for key in path:
        nexts: list[object] = []
        for part in found:
            if isinstance(key, int):
                nexts.append(part.get("items"))
                continue
            properties = _mapping(part.get("properties"))
            nexts.append(properties.get(key, part.get("additionalProperties")))
        found = [deeper for part in nexts for deeper in _alternatives(_mapping(part))]
    return found


def _alternatives(part: Mapping[str, object]) -> list[Mapping[str, object]]:
    reference = part.get("$ref")
    if isinstance(reference, str):
        name = reference.rpartition("/")[2]
        target = _mapping(_mapping(_schema().get("$defs")).get(name))
        described = {k: v for k, v in part.items() if k == "description"}
        return _alternatives({**target, **described})
    found = [part]
    for union in ("anyOf", "oneOf"):
        options = part.get(union)
        if isinstance(options, list):
            found += [deeper for option in options for deeper in _alternatives(_mapping(option))]
    return found


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
