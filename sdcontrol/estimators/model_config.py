"""The shape that a `transformers` `config.json` describes.

Knows how configs of many models spell the same things; nothing of hardware.
"""

from collections.abc import Mapping

from sdcontrol.errors import ConfigError
from sdcontrol.estimators.model_shape import ModelShape

__all__ = ["from_config"]

_TIED_BY_DEFAULT = frozenset(
    {"gpt2", "opt", "bloom", "gemma", "gemma2", "gemma3", "gemma3_text", "falcon", "starcoder2"}
)
_UNGATED = frozenset(
    {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt"}
)
_PRICED_LAYERS = frozenset(
    {"attention", "full_attention", "sliding_attention", "chunked_attention", "dense", "sparse"}
)
_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8": 1.0,
    "int8": 1.0,
}


def from_config(config: Mapping[str, object], name: str | None = None) -> ModelShape:
    """The shape that a `transformers` `config.json`, parsed, describes.

    Raises `ConfigError` where a needed size is missing or the attention is of an unknown layout.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    kind = str(config.get("model_type", "model"))
    _check_layout(config, kind)
    hidden = _needed(config, "hidden_size", "n_embd", "d_model", "n_embed")
    heads = _needed(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = _needed(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    experts = _size(config, "num_local_experts", "num_experts", "n_routed_experts") or 0
    intermediate = _size(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    intermediate = intermediate or 4 * hidden
    window, sliding = _sliding(config, layers)
    storage = _storage(config)
    return ModelShape(
        name=name or str(config.get("_name_or_path") or kind),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_kv_heads(config, heads),
        head_dim=_size(config, "head_dim") or hidden // heads,
        intermediate_size=intermediate,
        vocab_size=_needed(config, "vocab_size"),
        is_head_tied=bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
        is_mlp_gated=kind not in _UNGATED,
        num_experts=experts,
        experts_per_token=_size(config, "num_experts_per_tok", "num_experts_per_token") or 0,
        expert_size=(_size(config, "moe_intermediate_size") or intermediate) if experts else 0,
        shared_expert_size=_shared_expert_size(config) if experts else 0,
        num_dense_layers=_dense_layers(config, layers) if experts else 0,
        weight_bytes=_weight_bytes(config, storage),
        head_bytes=storage,
        kv_bytes=storage,
        sliding_window=window,
        num_sliding_layers=sliding,
    )


def _check_layout(config: Mapping[str, object], kind: str) -> None:
    """Refuse what would be priced as something else."""
    kinds = config.get("layer_types")
    listed = {str(layer) for layer in kinds} if isinstance(kinds, list) else set()
    strange = sorted(listed - _PRICED_LAYERS)
    reason = None
    if config.get("kv_lora_rank"):
        reason = "latent attention is"
    elif strange:
        reason = f"layers of type {', '.join(strange)} are"
    elif config.get("interleave_moe_layer_step"):
        reason = "experts beside a shared one of the dense size are"
    if reason is not None:
        raise ConfigError(f"{kind}: {reason} not priced; write a ModelShape by hand")


def _size(config: Mapping[str, object], *names: str) -> int | None:
    """The first of these settings that is a number."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _needed(config: Mapping[str, object], *names: str) -> int:
    value = _size(config, *names)
    if value is None:
        raise ConfigError(f"config has no {names[0]}; it has {sorted(config)}")
    if value < 1:
        raise ConfigError(f"config has {names[0]} {value}; it must be at least 1")
    return value


def _kv_heads(config: Mapping[str, object], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _size(config, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def _storage(config: Mapping[str, object]) -> float:
    """Bytes per element of weights that are not quantised; bf16 where the config does not say."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return next((size for name, size in _BYTES.items() if name in dtype), 2.0)


def _weight_bytes(config: Mapping[str, object], storage: float) -> float:
    """Bytes per element as quantised; raises `ConfigError` for a method that is not known."""
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return storage
    bits = _size(quantisation, "bits", "w_bit") or _bits_of_groups(quantisation)
    if bits is not None:
        return bits / 8.0
    method = str(quantisation.get("quant_method", "")).lower()
    algorithm = str(quantisation.get("quant_algo", "")).lower()
    if quantisation.get("load_in_4bit") or "fp4" in method or "fp4" in algorithm:
        return 0.5
    if quantisation.get("load_in_8bit") or "fp8" in method or "fp8" in algorithm:
        return 1.0
    raise ConfigError(
        f"weights quantised by {method or algorithm or 'an unnamed method'} are of no known size; "
        "write a ModelShape by hand"
    )


def _bits_of_groups(quantisation: Mapping[str, object]) -> int | None:
    """Of compressed-tensors: the bits of the widest group of weights."""
    groups = quantisation.get("config_groups")
    if not isinstance(groups, Mapping):
        return None
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    sizes = [_size(own, "num_bits") for own in weights if isinstance(own, Mapping)]
    return max((size for size in sizes if size), default=None)


def _sliding(config: Mapping[str, object], layers: int) -> tuple[int | None, int]:
    """The window, and how many layers have it."""
    window = _size(config, "sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return None, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return window, sum("sliding" in str(kind) for kind in kinds)
    return window, layers


def _shared_expert_size(config: Mapping[str, object]) -> int:
    size = _size(config, "shared_expert_intermediate_size")
    if size is not None:
        return size
    shared = _size(config, "n_shared_experts", "num_shared_experts") or 0
    return shared * (_size(config, "moe_intermediate_size") or 0)


def _dense_layers(config: Mapping[str, object], layers: int) -> int:
    listed = config.get("mlp_only_layers")
    if isinstance(listed, list) and listed:
        return len(listed)
    step = _size(config, "decoder_sparse_step") or 1
    return _size(config, "first_k_dense_replace") or layers - layers // step
