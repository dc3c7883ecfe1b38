"""Which models can be decoded here, and how far.

Knows models and what a probe forward showed of them; nothing of caches, requests or drafts.
"""

import inspect
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from sdcontrol.engine.attention import ProbedLayer
from sdcontrol.errors import ConfigError, UnsupportedModel

__all__ = ["check_layers", "check_mode", "check_model", "max_positions", "most_tokens"]

_GROWING_ROPE = {"dynamic", "longrope"}
_MOST_UNUSED_POSITIONS = 8  # rows that a table has beside those of positions, such as OPT's two


def check_model(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for what is known without a forward, `ConfigError` in training mode."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name}: encoder-decoder models (cross-attention) are not supported"
        )
    check_mode(model)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{name}: forward takes no position_ids, so it cannot be packed")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(
            f"{name}: a recurrent or hybrid model keeps state that cannot be rolled back"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name}: no language-modelling head")


def check_mode(model: PreTrainedModel) -> None:
    """Raise `ConfigError` for a model that would drop out at random."""
    if model.training:
        raise ConfigError(f"{type(model).__name__} is in training mode; call model.eval() first")


def check_layers(model: PreTrainedModel, probed: Sequence[ProbedLayer]) -> None:
    """Raise `UnsupportedModel` unless every layer attends, once, and as its config says."""
    name = type(model).__name__
    expected = model.config.get_text_config().num_hidden_layers
    if not probed:
        raise UnsupportedModel(
            f"{name}: its attention does not go through transformers' AttentionInterface"
        )
    if len(probed) != expected or len({id(layer.module) for layer in probed}) != expected:
        raise UnsupportedModel(
            f"{name}: {len(probed)} attention layers seen for {expected} hidden layers; "
            "linear-attention, hybrid and weight-shared layers are not supported"
        )
    _check_windows(model, probed)


def _check_windows(model: PreTrainedModel, probed: Sequence[ProbedLayer]) -> None:
    """A model that limits what a layer sees by its mask alone does so in vain here: there is none."""
    config = model.config.get_text_config()
    common = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [common] * len(probed)
    for index, (kind, layer) in enumerate(zip(kinds, probed, strict=False)):
        is_limited = "sliding" in kind or "chunked" in kind
        if is_limited != (layer.shape.window is not None) or "chunked" in kind:
            raise UnsupportedModel(
                f"{type(model).__name__}: layer {index} is {kind} by its config, and was told a "
                f"window of {layer.shape.window or 'any'} tokens; decode this model with plain "
                "generate"
            )


def max_positions(model: PreTrainedModel) -> int | None:
    """The longest context that the rotary embedding stays a function of one token's position.

    `dynamic` and `longrope` scaling depend on the longest position in a forward, which a packed
    batch shares between requests; None where nothing depends on it.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # by layer type
    growing = [kind for kind in kinds if kind.get("rope_type") in _GROWING_ROPE]
    limits = [kind.get("original_max_position_embeddings") for kind in growing]
    return min((int(limit or config.max_position_embeddings) for limit in limits), default=None)


def most_tokens(model: PreTrainedModel) -> int | None:
    """The longest request, prompt and output, that `model` can decode in a batch; None: any.

    Where positions are looked up in a table the last token, which is not fed any more, may lie
    behind its end.
    """
    table, rope = _table_positions(model), max_positions(model)
    limits = (None if table is None else table + 1, rope)
    return min((limit for limit in limits if limit is not None), default=None)


def _table_positions(model: PreTrainedModel) -> int | None:
    """How many positions a table of learned ones has; None where there is none.

    An embedding that is not that of tokens, with as many rows as the config has positions.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    tokens = model.get_input_embeddings()
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens)
    extra = (table.num_embeddings - most for table in tables)
    return most if any(0 <= rows <= _MOST_UNUSED_POSITIONS for rows in extra) else None
