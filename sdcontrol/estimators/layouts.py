"""Which layouts of decoder-only models a shape can stand for, and which it would misprice.

Knows the settings in a `config.json` that give a layout away; nothing of sizes. A shape prices layers of
attention over keys and values, each with a dense MLP or experts.
"""

from collections.abc import Mapping

from sdcontrol.errors import ConfigError

__all__ = ["check_layout"]

_PRICED_LAYERS = frozenset(
    {"attention", "full_attention", "sliding_attention", "chunked_attention", "dense", "sparse"}
)
_OTHER_LAYERS = "layers beside attention (state space, recurrent, linear, convolution)"
_PER_LAYER_EMBEDDINGS = "embeddings of every layer are"
_SEVERAL_SIZES = "layers of several sizes are"
_KINDS = {  # by model_type, where no setting tells
    "gemma4_text": _SEVERAL_SIZES,
    "gemma4_unified_text": _SEVERAL_SIZES,
    "falcon_h1": f"{_OTHER_LAYERS} are",  # beside attention within a layer
    "lfm2": f"{_OTHER_LAYERS} are",
    "lfm2_moe": f"{_OTHER_LAYERS} are",
    "mamba2": f"{_OTHER_LAYERS} are",
    "nemotron_h": f"{_OTHER_LAYERS} are",
    "recurrent_gemma": f"{_OTHER_LAYERS} are",
    "xlstm": f"{_OTHER_LAYERS} are",
    "jetmoe": "experts in attention are",
    "hrm_text": "layers that a token passes several times are",
}
_SETTINGS = {
    "kv_lora_rank": "latent attention is",
    "interleave_moe_layer_step": "experts beside a shared one of the dense size are",
    "hidden_size_per_layer_input": _PER_LAYER_EMBEDDINGS,
    "block_configs": _SEVERAL_SIZES,
    "per_layer_config": _SEVERAL_SIZES,
    "global_head_dim": _SEVERAL_SIZES,
    "attention_other_setting": _SEVERAL_SIZES,
    "num_kv_shared_layers": "layers that share keys and values are",
}
_OTHER_SETTINGS = (  # moot where `layer_types` lists the layers: Granite 4 has them without any such layer
    "attn_layer_indices",
    "attn_layer_period",
    "block_types",
    "conv_L_cache",
    "full_attention_interval",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "layers_block_type",
)
_OTHER_PREFIXES = ("mamba_", "ssm_")
_PLAIN_MLP = frozenset({"mptmlp", "dbrx_ffn", ""})
_REMEDY = (
    "give a config.json of the plain transformer that comes nearest to it, or in Python write a "
    "ModelShape by hand"
)


def check_layout(config: Mapping[str, object], kind: str, num_experts: int) -> None:
    """Refuse what would be priced as something else, with `ConfigError`.

    `config` is a parsed `config.json`, `kind` its `model_type`, `num_experts` what was understood of it.
    """
    reason = _KINDS.get(kind) or _strange_setting(config) or _strange_layers(config)
    if reason is None and not num_experts:
        reason = _unread_experts(config)
    if reason is not None:
        raise ConfigError(f"{kind}: {reason} not priced; {_REMEDY}")


def _strange_setting(config: Mapping[str, object]) -> str | None:
    for name, reason in _SETTINGS.items():
        if config.get(name):
            return reason
    if config.get("v_head_dim") not in (None, config.get("head_dim")):
        return "values of another size than keys are"
    heads = config.get("num_attention_heads_per_layer")
    if isinstance(heads, list) and any(count != heads[0] for count in heads):
        return _SEVERAL_SIZES
    mlp = config.get("ffn_config")
    if isinstance(mlp, Mapping) and str(mlp.get("ffn_type") or "") not in _PLAIN_MLP:
        return f"an MLP of type {mlp['ffn_type']} is"
    return None


def _strange_layers(config: Mapping[str, object]) -> str | None:
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        strange = sorted({str(layer) for layer in kinds} - _PRICED_LAYERS)
        return f"layers of type {', '.join(strange)} are" if strange else None
    flags = config.get("attn_type_list")  # of MiniMax: 1 is attention
    if isinstance(flags, list) and any(flag != 1 for flag in flags):
        return f"{_OTHER_LAYERS}, as attn_type_list tells, are"
    told = [
        name
        for name, value in config.items()
        if value and (name in _OTHER_SETTINGS or name.startswith(_OTHER_PREFIXES))
    ]
    return f"{_OTHER_LAYERS}, as {told[0]} tells, are" if told else None


def _unread_experts(config: Mapping[str, object]) -> str | None:
    """A number of experts under a name that nobody reads."""
    if config.get("is_moe") is False:
        return None
    for name, value in config.items():
        is_count = name.startswith(("num_", "n_", "moe_num_")) and name.endswith("experts")
        is_many = isinstance(value, list) or (isinstance(value, int) and value > 1)
        if is_count and is_many and "shared" not in name:
            return f"experts counted by {name} are"
    return None
