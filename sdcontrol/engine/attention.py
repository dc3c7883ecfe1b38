"""The place where a transformers model meets the paged cache.

transformers lets a function take over attention by name. Ours writes the new keys and values into
the cache and attends to pages instead of to what it was handed. What belongs to the current
forward lies in thread-local state, since some models do not pass keywords on to their attention.

Knows nothing of requests or drafts.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.packing import PackedBatch
from sdcontrol.engine.renamed import CACHES
from sdcontrol.engine.routes import Routes
from sdcontrol.errors import UnsupportedModel

__all__ = [
    "AttentionBackend",
    "ForwardCall",
    "QuerySink",
    "make_opaque",
    "make_opaque_to",
    "probing",
    "with_paged_attention",
]

ATTENTION_NAME = "sdcontrol_paged"

# Keywords that models hand to every attention function and that change nothing here: positions are
# in the queries and keys already, and the cache is ours.
_INERT_KEYWORDS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        *CACHES,
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "is_causal",
        "sliding_window",
        "logits_to_keep",
    }
)
_REFUSED_KEYWORDS = {
    "softcap": "attention logit soft-capping",
    "s_aux": "attention sinks",
    "head_mask": "head masks",
    "position_bias": "relative position bias",
    "alibi": "ALiBi position bias",
    "block_table": "another paged cache",
}


class AttentionBackend(Protocol):
    """Computes attention over the paged cache. One method, so that another kernel is one file."""

    def attend(
        self, layer: int, query: Tensor, cache: KVCache, batch: PackedBatch, scale: float
    ) -> Tensor:
        """Attention of packed queries `[heads, tokens, key_dim]`: `[tokens, heads, value_dim]`."""
        ...


class QuerySink(Protocol):
    """Keeps queries for page scoring."""

    def arrange(self, order: Sequence[int]) -> None:
        """Learn in which order the forward's segments are packed."""
        ...

    def store(self, layer: int, query: Tensor) -> None:
        """Take the packed queries `[heads, tokens, key_dim]` of one layer."""
        ...

    def slots(self, num_tokens: int) -> list[int]:
        """Where each packed token's query goes, segments in their own order; padding included."""
        ...

    def at(self, slots: Tensor) -> "QuerySink":
        """A sink into the slots `[tokens]` that stand in this tensor when it stores."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """All that the attention function needs to know of the forward that it is part of."""

    backend: AttentionBackend
    cache: KVCache
    batch: PackedBatch
    layer_of: Mapping[int, int]  # id of an attention module: its index in the cache
    queries: QuerySink | None = None


class _State(threading.local):
    call: ForwardCall | None = None
    probe: "list[ProbedLayer] | None" = None


_STATE = _State()
_routes = Routes(ATTENTION_NAME, lambda: _STATE.call is not None or _STATE.probe is not None)


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """An attention module, and the shape that it showed in a probe forward."""

    module: nn.Module
    shape: LayerShape


def _attention(  # noqa: PLR0917  transformers calls it so
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, key_dim], rotated
    key: Tensor,  # [1, kv_heads, tokens, key_dim], rotated
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: object,
) -> tuple[Tensor, None]:
    if _STATE.probe is not None:
        if attention_mask is not None:
            raise UnsupportedModel(
                f"{type(module).__name__}: a mask of the model's own is not supported by the paged "
                "attention path; decode this model with plain generate"
            )
        return _probe(_STATE.probe, module, (query, key, value), dropout, keywords)
    call = _STATE.call
    if call is None:
        raise RuntimeError("paged attention was called outside an engine's forward")
    num_tokens = call.batch.slots.shape[0]
    padding = query.shape[2] - num_tokens
    if padding:  # behind the packed tokens: see `ModelRunner`
        query, key, value = (each[:, :, :num_tokens] for each in (query, key, value))
    layer = call.layer_of[id(module)]
    # A model may rotate one of them in float32, and autocast changes what it likes.
    dtype, given = call.cache.layers[layer].dtype, value.dtype
    if not query.dtype == key.dtype == given == dtype:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    call.cache.write(layer, call.batch.slots, key[0], value[0])
    if call.queries is not None:
        call.queries.store(layer, query[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = call.backend.attend(layer, query[0], call.cache, call.batch, scale)
    if padding:
        out = functional.pad(out, (0, 0, 0, 0, 0, padding))
    return out.unsqueeze(0).to(given).contiguous(), None  # some models take views of it


AttentionInterface.register(ATTENTION_NAME, _attention)


def make_opaque_to(model: nn.Module) -> None:
    """See `make_opaque`, where somebody compiled `model` or a part of it."""
    if "torch._dynamo" in sys.modules and any(_is_compiled(part) for part in model.modules()):
        make_opaque()


def _is_compiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


@cache
def make_opaque() -> None:
    """Let `torch.compile` call attention as it stands, instead of looking inside. Loads the compiler."""
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_attention))


def with_paged_attention(
    configs: "tuple[PretrainedConfig, ...]", call: ForwardCall, forward: Callable[[], Tensor]
) -> Tensor:
    """`forward()`, in which the attention of the models with these configs goes through `call`.

    Flips the config attribute only: `set_attn_implementation` is slow and global. The configs are the
    user's, so other threads may compute with them meanwhile: see `_routes`. No context manager, of which
    an interrupt may enter one half.
    """
    try:
        _routes.enter(configs)
        _STATE.call = call
        return forward()
    finally:
        _STATE.call = None
        _routes.leave(configs)


def probing(model: PreTrainedModel, forward: Callable[[], object]) -> list[ProbedLayer]:
    """The attention layers that `forward` goes through, in order, and their shapes.

    Raises `UnsupportedModel` where a layer asks for what the paged path cannot honour.
    """
    seen: list[ProbedLayer] = []
    configs = attention_configs(model)
    try:
        _routes.enter(configs)
        _STATE.probe = seen
        forward()
    finally:
        _STATE.probe = None
        _routes.leave(configs)
    return seen


def attention_configs(model: PreTrainedModel) -> "tuple[PretrainedConfig, ...]":
    """Every config object that decides an attention implementation inside `model`."""
    found: dict[int, PretrainedConfig] = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            found[id(config)] = config
    return tuple(found.values())


def _probe(
    seen: list[ProbedLayer],
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    dropout: float,
    keywords: Mapping[str, object],
) -> tuple[Tensor, None]:
    query, key, value = tensors
    _check_keywords(module, keywords, dropout)
    window = keywords.get("sliding_window")
    shape = LayerShape(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        dtype=key.dtype,
        window=window if isinstance(window, int) and window > 0 else None,
    )
    seen.append(ProbedLayer(module, shape))
    shared = shape.num_heads // shape.num_kv_heads
    standin = value.repeat_interleave(shared, dim=1).transpose(1, 2)  # finite
    return standin.contiguous(), None


def _check_keywords(module: nn.Module, keywords: Mapping[str, object], dropout: float) -> None:
    name = type(module).__name__
    if dropout:
        raise UnsupportedModel(f"{name}: attention dropout {dropout} is active; call model.eval()")
    if getattr(module, "is_causal", True) is False or keywords.get("is_causal") is False:
        raise UnsupportedModel(
            f"{name}: attention that is not causal (cross- or encoder attention)"
        )
    for keyword, argument in keywords.items():
        if argument is None or argument is False or keyword in _INERT_KEYWORDS:
            continue
        feature = _REFUSED_KEYWORDS.get(keyword, f"the attention argument {keyword!r}")
        raise UnsupportedModel(
            f"{name}: {feature} is not supported by the paged attention path; "
            "decode this model with plain generate"
        )
