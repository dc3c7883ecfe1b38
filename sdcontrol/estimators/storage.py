"""How large weights, keys and values are as stored, from a parsed `config.json`.

Knows dtypes and how methods of quantisation spell their bits; nothing of layouts. Quantised weights come
in groups with a scale, which is counted: `bits / 8` bytes per element, and a group's scale and zero point
over its size.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sdcontrol.errors import ConfigError
from sdcontrol.estimators.config_numbers import whole_number

__all__ = ["DTYPE_BYTES", "Storage", "storage_of"]

DTYPE_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8": 1.0,
    "int8": 1.0,
}
"""Per element, by the name of a dtype or a part of it."""

_Config = Mapping[str, object]
_SCALE_BYTES = 2.0  # of a group of integers, float16
_SMALL_SCALE_BYTES = 1.0  # of a group of floats, in 8 bits
_MXFP4 = 0.5 + _SMALL_SCALE_BYTES / 32  # groups of 32 (OCP Microscaling, 2023)
_NVFP4 = 0.5 + _SMALL_SCALE_BYTES / 16  # groups of 16
_NF4 = 0.5 + 4.0 / 64  # groups of 64 with a float32 (Dettmers et al. 2023, section 3)
_NF4_TWICE = 0.5 + 1.0 / 64 + 4.0 / (64 * 256)  # whose scales are quantised, too
_KEPT = (  # modules that are left as they were
    "modules_to_not_convert",
    "llm_int8_skip_modules",
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "exclude",
)
_PARENTS = ("model.", "model.language_model.", "language_model.model.", "")
_PROJECTIONS = ("q_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes per element."""

    weights: float  # in the layers
    attention: float  # of the attention projections
    head: float  # of the embedding and the head
    kv: float


def storage_of(config: _Config, num_layers: int) -> Storage:
    """What a parsed `config.json` says; bf16 where it says nothing.

    Raises `ConfigError` for weights that are quantised by a method of no known size.
    """
    plain = _plain_bytes(config)
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return Storage(plain, plain, plain, plain)
    weights = _weight_bytes(quantisation)
    kept = _kept_attention(quantisation, num_layers)
    attention = kept * plain + (1.0 - kept) * weights
    return Storage(weights, attention, plain, _kv_bytes(quantisation) or plain)


def _plain_bytes(config: _Config) -> float:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return next((size for name, size in DTYPE_BYTES.items() if name in dtype), 2.0)


def _weight_bytes(quantisation: _Config) -> float:
    bits = whole_number(quantisation, "bits", "w_bit")
    if bits is not None:
        return _grouped_bytes(bits, quantisation)
    method = str(quantisation.get("quant_method", "")).lower()
    algorithm = str(quantisation.get("quant_algo", "")).lower()
    found = (
        _bytes_of_groups(quantisation)
        or _bytes_of_name(method)
        or _bytes_of_name(algorithm)
        or _bytes_of_bitsandbytes(quantisation)
        or _bytes_of_torchao(quantisation)
        or _bytes_of_hqq(quantisation)
    )
    if found is None:
        raise ConfigError(
            f"weights quantised by {method or algorithm or 'an unnamed method'} are of no known size; "
            'say it in the quantization_config of a copy of config.json: "bits": 4'
        )
    return found


def _grouped_bytes(bits: int, settings: _Config) -> float:
    """Of integers with a scale, and a zero point of as many bits, per group."""
    group = whole_number(settings, "group_size", "q_group_size") or 0
    return bits / 8.0 + ((_SCALE_BYTES + bits / 8.0) / group if group > 0 else 0.0)


def _bytes_of_name(name: str) -> float | None:
    if "fp4" in name:
        return _MXFP4 if "mxfp4" in name else _NVFP4
    return 1.0 if "fp8" in name else None


def _bytes_of_bitsandbytes(quantisation: _Config) -> float | None:
    if quantisation.get("load_in_4bit"):
        return _NF4_TWICE if quantisation.get("bnb_4bit_use_double_quant") else _NF4
    return 1.0 if quantisation.get("load_in_8bit") else None


def _bytes_of_groups(quantisation: _Config) -> float | None:
    """Of compressed-tensors: of the widest group of weights."""
    groups = quantisation.get("config_groups")
    if not isinstance(groups, Mapping):
        return None
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    sizes = [_bytes_of_scheme(own) for own in weights if isinstance(own, Mapping)]
    return max((size for size in sizes if size), default=None)


def _bytes_of_scheme(scheme: _Config) -> float | None:
    bits = whole_number(scheme, "num_bits")
    if bits is None:
        return None
    group = whole_number(scheme, "group_size") or 0
    scale = _SMALL_SCALE_BYTES if scheme.get("type") == "float" else _SCALE_BYTES
    zero = bits / 8.0 if scheme.get("symmetric") is False else 0.0
    return bits / 8.0 + ((scale + zero) / group if group > 0 else 0.0)


def _bytes_of_torchao(quantisation: _Config) -> float | None:
    """Of `int4_weight_only`, or `{"default": {"_type": "Int4WeightOnlyConfig", "_data": {...}}}`."""
    kind, settings = quantisation.get("quant_type"), quantisation.get("quant_type_kwargs")
    if isinstance(kind, Mapping) and isinstance(kind.get("default"), Mapping):
        kind, settings = kind["default"].get("_type"), kind["default"].get("_data")
    bits = re.findall(r"(?:int|float)(\d)", str(kind).lower())  # the weights' are the last
    if not bits:
        return None
    return _grouped_bytes(int(bits[-1]), settings if isinstance(settings, Mapping) else {})


def _bytes_of_hqq(quantisation: _Config) -> float | None:
    own = quantisation.get("quant_config")
    own = own.get("weight_quant_params", own) if isinstance(own, Mapping) else quantisation
    bits = whole_number(own, "nbits") if isinstance(own, Mapping) else None
    return None if bits is None else _grouped_bytes(bits, own)


def _kv_bytes(quantisation: _Config) -> float | None:
    """Of compressed-tensors and modelopt; None where they leave keys and values as they are."""
    scheme = quantisation.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return _bytes_of_scheme(scheme)
    algorithm = str(quantisation.get("kv_cache_quant_algo") or "").lower()
    return 1.0 if algorithm == "int8" else _bytes_of_name(algorithm)


# ---- modules that are not quantised


def _kept_attention(quantisation: _Config, num_layers: int) -> float:
    """Share of the attention projections that are not quantised."""
    try:
        patterns = [re.compile(pattern) for pattern in _kept_patterns(quantisation)]
    except re.error as error:
        raise ConfigError(
            f"quantization_config names modules by {error.pattern!r}, which is no regular expression: "
            f"{error}"
        ) from error
    if not patterns:
        return 0.0
    kept = [
        any(
            pattern.search(f"{parent}layers.{layer}.self_attn.{projection}")
            for pattern in patterns
            for parent in _PARENTS
        )
        for layer in range(num_layers)
        for projection in _PROJECTIONS
    ]
    return sum(kept) / len(kept)


def _kept_patterns(quantisation: _Config) -> Iterator[str]:
    """As regular expressions: "re:..." are some, others name a module, a part of one, or many by "*"."""
    for name in _KEPT:
        listed = quantisation.get(name)
        for given in listed if isinstance(listed, list) else ():
            text = str(given)
            if text.startswith("re:"):
                yield "^" + text.removeprefix("re:")
            else:
                yield r"(?:^|\.)" + re.escape(text).replace(r"\*", ".*") + r"(?:\.|$)"
