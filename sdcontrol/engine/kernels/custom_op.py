"""Attention as one opaque operator, for models whose layers are compiled.

`torch.compile` cannot look into a paged cache or a step's tables, and need not: in a compiled layer
stands `sdcontrol::attend`, and who runs the forward says what it does. One compilation serves every
number of tokens. Knows nothing of caches, batches or backends.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["attend", "handling"]

Handler = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]


class _State(threading.local):
    handler: Handler | None = None


_STATE = _State()


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Let `handler` compute the operator in this thread, inside the block.

    It takes what `attend` takes, and gives a tensor that shares no memory with its arguments.
    """
    before, _STATE.handler = _STATE.handler, handler
    try:
        yield
    finally:
        _STATE.handler = before


# The cache that a handler writes is no argument; whatever reads it comes after this output.
@torch.library.custom_op("sdcontrol::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    """Attention `[tokens, heads, value_dim]` of packed `query` `[heads, tokens, key_dim]`.

    `key` and `value` `[kv_heads, tokens, dim]` are those of the same tokens.
    """
    if _STATE.handler is None:
        raise RuntimeError("paged attention was called outside an engine's forward")
    return _STATE.handler(query, key, value, layer, scale)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    heads, num_tokens, _ = query.shape
    return query.new_empty(num_tokens, heads, value.shape[-1])
