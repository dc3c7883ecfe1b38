"""Whole numbers of a parsed `config.json`, under whatever name a model gives them.

Knows nothing of what they mean.
"""

from collections.abc import Mapping

from sdcontrol.errors import ConfigError

__all__ = ["needed_number", "whole_number"]


def whole_number(config: Mapping[str, object], *names: str) -> int | None:
    """The first of these settings that is a whole number, or a list with the same one for every layer.

    Raises `ConfigError` for a list of different ones: a shape has one layer, many times.
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
            return value
    return None


def needed_number(config: Mapping[str, object], *names: str) -> int:
    """As `whole_number`; raises `ConfigError` where there is none, or none of at least 1."""
    value = whole_number(config, *names)
    if value is None:
        raise ConfigError(f"config has no {names[0]}; it has {sorted(config)}")
    if value < 1:
        raise ConfigError(f"config has {names[0]} {value}; it must be at least 1")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
