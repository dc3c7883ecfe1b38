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
        self._inside: dict[int, set[int]] = {}  # threads, by the id of a config that is routed now
        self._own: dict[int, str | None] = {}  # what was named before, of all that ever were
        setattr(PretrainedConfig, _ATTRIBUTE, property(self._read, _write))

    def enter(self, configs: Sequence[PretrainedConfig]) -> None:
        """From here on our attention is what they name. Once a thread; who is interrupted in here leaves too."""
        thread = threading.get_ident()
        with self._lock:
            for config in configs:
                self._inside.setdefault(id(config), set()).add(thread)
                named = config.__dict__[_ATTRIBUTE]
                if named != self._name:
                    self._own[id(config)] = named
                    config.__dict__[_ATTRIBUTE] = self._name

    def leave(self, configs: Sequence[PretrainedConfig]) -> None:
        """They name what they named before, unless other threads are inside still."""
        thread = threading.get_ident()
        with self._lock:
            for config in configs:
                threads = self._inside.setdefault(id(config), set())
                threads.discard(thread)
                if not threads:
                    if config.__dict__[_ATTRIBUTE] == self._name:
                        config.__dict__[_ATTRIBUTE] = self._own[id(config)]
                    self._inside.pop(id(config))

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
