"""The shape that a `transformers` `config.json` describes.

Knows how configs of many models spell the same things, and what they leave to the defaults of their
`model_type` (of transformers 5); nothing of hardware.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sdcontrol.estimators.attention_windows import windows_of
from sdcontrol.estimators.config_numbers import needed_number, whole_number
from sdcontrol.estimators.layouts import check_layout
from sdcontrol.estimators.model_shape import ModelShape
from sdcontrol.estimators.storage import storage_of

__all__ = ["from_config"]

_Config = Mapping[str, object]
_MOST_LAYERS = 10_000


def _kinds(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TIED_BY_DEFAULT = _kinds(
    "biogpt bloom cohere cohere2 cohere2_moe cpmant ctrl ernie4_5 ernie4_5_moe falcon gemma gemma2 gemma3 "
    "gemma3_text gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_swa modernbert-decoder mpt openai-gpt "
    "opt smollm3 starcoder2 vaultgemma xglm"
)
_UNGATED = _kinds(
    "apertus arcee biogpt bloom codegen ctrl falcon fuyu gpt2 gpt_bigcode gpt_neo gpt_neox "
    "gpt_neox_japanese gptj jais2 mpt nanochat nemotron openai-gpt opt persimmon phi starcoder2 xglm"
)
_SHARED_EXPERTS = (
    "n_shared_experts",
    "num_shared_experts",
    "num_shared_expert",
    "moe_num_shared_experts",
)
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
)


def from_config(config: Mapping[str, object], name: str | None = None) -> ModelShape:
    """The shape that a `transformers` `config.json`, parsed, describes.

    Raises `ConfigError` where a needed size is missing, where layers differ in size, and where the layout
    is one that a shape would misprice (latent attention, state space, embeddings of every layer, ...).
    """
    config = _flattened(config)
    kind = str(config.get("model_type", "model"))
    experts = _experts(config)
    check_layout(config, kind, experts)
    hidden = needed_number(config, "hidden_size", "n_embd", "d_model", "n_embed")
    heads = needed_number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers = needed_number(config, *names, most=_MOST_LAYERS)
    intermediate = _intermediate_size(config, kind, hidden, experts)
    mixture = _mixture(config, experts, intermediate, layers)
    window, sliding = windows_of(config, kind, layers)
    storage = storage_of(config, layers)
    return ModelShape(
        name=name or str(config.get("_name_or_path") or kind),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_kv_heads(config, heads),
        head_dim=whole_number(config, "head_dim") or hidden // heads,
        intermediate_size=intermediate,
        vocab_size=needed_number(config, "vocab_size"),
        is_head_tied=bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
        is_mlp_gated=kind not in _UNGATED,
        num_experts=mixture.num_experts,
        experts_per_token=mixture.experts_per_token,
        expert_size=mixture.expert_size,
        shared_expert_size=mixture.shared_expert_size,
        num_dense_layers=mixture.num_dense_layers,
        weight_bytes=storage.weights,
        head_bytes=storage.head,
        kv_bytes=storage.kv,
        sliding_window=window,
        num_sliding_layers=sliding,
        attention_bytes=storage.attention if storage.attention != storage.weights else None,
    )


def _flattened(config: _Config) -> _Config:
    """Of a model of several kinds of input the text's part; of DBRX and MPT the nested settings, too."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    for name in ("attn_config", "ffn_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping):
            config = {**nested, **config}
    return config


def _intermediate_size(config: _Config, kind: str, hidden: int, num_experts: int) -> int:
    if kind == "granitemoehybrid" and not num_experts:
        return needed_number(config, "shared_intermediate_size")  # the one MLP that is left
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dim_ff", "dff")
    size = whole_number(config, *names)
    return size or (whole_number(config, "expansion_ratio") or 4) * hidden


def _kv_heads(config: _Config, heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
    return whole_number(config, *names) or heads


# ---- experts


@dataclass(frozen=True, slots=True)
class _Mixture:
    """As in `ModelShape`; of a dense model all 0."""

    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    num_dense_layers: int = 0


def _experts(config: _Config) -> int:
    if config.get("is_moe") is False:
        return 0
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return whole_number(config, *names) or 0


def _mixture(config: _Config, num_experts: int, intermediate: int, layers: int) -> _Mixture:
    if not num_experts:
        return _Mixture()
    size = whole_number(config, "moe_intermediate_size") or intermediate
    shared = whole_number(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    if shared is None:
        shared = size * (whole_number(config, *_SHARED_EXPERTS) or 0)
    return _Mixture(
        num_experts=num_experts,
        experts_per_token=whole_number(config, *_EXPERTS_PER_TOKEN) or 0,
        expert_size=size,
        shared_expert_size=shared,
        num_dense_layers=_dense_layers(config, layers),
    )


def _dense_layers(config: _Config, layers: int) -> int:
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and kinds:
        return kinds[:layers].count("dense")
    given = config.get("mlp_only_layers")
    listed = given if isinstance(given, list) else []
    first = whole_number(config, "first_k_dense_replace", "moe_layer_start_index") or 0
    last = whole_number(config, "moe_layer_end_index")
    end = layers if last is None or last < 0 else min(last + 1, layers)
    step = whole_number(config, "decoder_sparse_step", "moe_layer_interval") or 1
    mixed = (layer for layer in range(max(first, 0), end) if layer not in listed)
    return layers - sum((layer + 1) % step == 0 for layer in mixed)
