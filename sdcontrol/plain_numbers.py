"""Settings whose numbers are numbers.

pydantic takes true and false for 1 and 0. Knows nothing of what is set.
"""

from collections.abc import Iterator, Mapping
from typing import get_args

from pydantic import BaseModel, model_validator

__all__ = ["PlainNumbers"]


class PlainNumbers(BaseModel):
    """A model that refuses a truth value for a number, in lists and mappings too."""

    @model_validator(mode="before")
    @classmethod
    def _mark_truth_values(cls, data: object) -> object:
        """Fields refuse what is marked, each in its own words and at its own place."""
        if not isinstance(data, Mapping):
            return data
        fields = cls.model_fields
        are_numbers = {name for name in fields if _is_number(fields[name].annotation)}
        return {
            name: _marked(value) if name in are_numbers else value for name, value in data.items()
        }


class _TruthValue:
    """Shown as what it was."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)


def _is_number(annotation: object) -> bool:
    """Whether it is made of numbers, and of no truth values."""
    parts = [*_parts(annotation)]
    return (int in parts or float in parts) and bool not in parts


def _parts(annotation: object) -> Iterator[object]:
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _parts(part)


def _marked(value: object) -> object:
    """The same with truth values marked, at any depth."""
    if isinstance(value, bool):
        return _TruthValue(value)
    if isinstance(value, Mapping):
        return {_marked(key): _marked(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(part) for part in value]
    return value
