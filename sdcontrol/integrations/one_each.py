"""What is given for each row of a batch, or for each prompt.

Knows lists and their lengths; nothing of what is in them.
"""

from collections.abc import Sequence

from sdcontrol.errors import ConfigError

__all__ = ["one_each"]


def one_each(name: str, values: object, number: int, of: str) -> list[object]:
    """`values` as a list of so many; of arrays and tensors the plain numbers.

    `of` says what there are: rows, prompts. Raises `ConfigError` for what is no list, or one of another length.
    """
    to_list = getattr(values, "tolist", None)
    given = values if to_list is None else to_list()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(f"{name}={given!r}; give a list, an entry for each of the {of}")
    if len(given) != number:
        raise ConfigError(f"{len(given)} {name} for {number} {of}; give one each")
    return list(given)
