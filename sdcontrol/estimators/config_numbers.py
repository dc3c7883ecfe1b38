"""Whole numbers of a parsed `config.json`, under whatever name a model gives them.

Knows nothing of what they mean.
"""

import reprlib
from collections.abc import Mapping

from sdcontrol.errors import ConfigError

__all__ = ["MOST", "needed_number", "whole_number"]

MOST = 10**9
"""Of anything that a model, a machine or a load is counted in: more is a slip of the pen."""


def whole_number(config: Mapping[str, object], *names: str) -> int | None:
    """The first of these settings that is a whole number, or a list with the same one for every layer.

    Raises `ConfigError` for a list of different ones: a shape has one layer, many times; and for a number
    that is beyond any model's.
    """
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value and all(map(_is_number, value)):
            if len(set(value)) > 1:
                raise ConfigError(
                    f"config has {name} {min(value)} to {max(value)}: layers of several sizes are not "
                    "priced; in a copy of it give the mean for all"
                )
            value = value[0]
        if isinstance(value, int) and _is_number(value):
            if abs(value) > MOST:
                raise ConfigError(f"config has {name} beyond {MOST}; give at most that")
            return value
    return None


def needed_number(config: Mapping[str, object], *names: str, most: int = MOST) -> int:
    """As `whole_number`; raises `ConfigError` where there is none, or none from 1 to `most`."""
    value = whole_number(config, *names)
    if value is None:
        given = next((name for name in names if config.get(name) is not None), None)
        if given is not None:
            raise ConfigError(
                f"config has {given} {reprlib.repr(config[given])}; it must be a whole number"
            )
        raise ConfigError(f"config has no {names[0]}; it has {sorted(config)}")
    if not 1 <= value <= most:
        raise ConfigError(f"config has {names[0]} {value}; it must be from 1 to {most}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
