"""Which attention a config names, to whom: ours in the thread that asked for it, the user's in others.

transformers reads the name of an attention implementation from a config that all threads share, more
than once in a forward. Knows configs and names; nothing of attention itself.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from transformers import PretrainedConfig

__all__ = ["Routes"]

_ATTRIBUTE = "_attn_implementation_internal"  # where transformers keeps the name


class Routes:
    """Makes configs name another attention for a while, in threads of which `is_inside` holds.

    One object for one `name`. Code compiled by `torch.compile` takes the attribute as it is,
    whatever its thread.
    """

    def __init__(self, name: str, is_inside: Callable[[], bool]) -> None:
        self._name = name
        self._is_inside = is_inside
        self._lock = threading.Lock()
        self._depths: dict[int, int] = {}  # of configs that are routed now, by id
        self._own: dict[int, str | None] = {}  # what was named before, of all that ever were
        setattr(PretrainedConfig, _ATTRIBUTE, property(self._read, _write))

    def enter(self, configs: Sequence[PretrainedConfig]) -> None:
        """From here on our attention is what they name."""
        with self._lock:
            for config in configs:
                depth = self._depths.get(id(config), 0)
                if not depth:
                    self._own[id(config)] = config.__dict__[_ATTRIBUTE]
                    config.__dict__[_ATTRIBUTE] = self._name
                self._depths[id(config)] = depth + 1

    def leave(self, configs: Sequence[PretrainedConfig]) -> None:
        """They name what they named before, unless others are inside still."""
        with self._lock:
            for config in configs:
                depth = self._depths.pop(id(config)) - 1
                if depth:
                    self._depths[id(config)] = depth
                else:
                    config.__dict__[_ATTRIBUTE] = self._own[id(config)]

    def _read(self, config: PretrainedConfig) -> str | None:
        try:
            name: str | None = config.__dict__[_ATTRIBUTE]
        except KeyError:
            raise AttributeError(_ATTRIBUTE) from None
        if name != self._name or torch.compiler.is_compiling() or self._is_inside():
            return name
        return self._own.get(id(config), name)


def _write(config: PretrainedConfig, name: str | None) -> None:
    config.__dict__[_ATTRIBUTE] = name
