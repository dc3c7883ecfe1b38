"""What a decoder-only model is made of: the counts that decide its FLOPs and bytes.

Knows nothing of hardware or weights. `SHAPES` holds common models, from their published
`config.json`; `from_config` reads any other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.errors import ConfigError, UnknownName

__all__ = ["SHAPES", "ModelShape", "by_name", "from_config"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One decoder-only transformer. Sizes in elements, storage in bytes per element."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of a dense layer's MLP
    vocab_size: int
    is_head_tied: bool = False  # the output head is the embedding table
    is_mlp_gated: bool = True  # three matrices instead of two
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    expert_size: int = 0  # intermediate size of one expert
    shared_expert_size: int = 0  # intermediate size of what every token passes beside its experts
    num_dense_layers: int = 0  # of a mixture of experts: layers without experts
    weight_bytes: float = 2.0  # per element, in the layers
    head_bytes: float = 2.0  # per element, in the embedding and the head
    kv_bytes: float = 2.0  # per element
    sliding_window: int | None = None
    num_sliding_layers: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_layers, self.hidden_size, self.num_heads, self.num_kv_heads)
        if (
            min(*counts, self.head_dim, self.vocab_size) < 1
            or min(self.weight_bytes, self.kv_bytes) <= 0
        ):
            raise ConfigError(f"shape {self.name!r} has a size that is not positive: {self}")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"shape {self.name!r}: {self.experts_per_token} of {self.num_experts} experts per "
                "token; set experts_per_token to between 1 and num_experts"
            )

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output projections."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return heads * self.head_dim * self.hidden_size

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer."""
        return self._mlp(self.expert_size)

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def always_read_parameters(self) -> int:
        """Of all layers, what every forward reads: attention, dense and shared MLPs, routers."""
        dense_layers = self.num_layers - self.num_expert_layers
        router = self.num_experts * self.hidden_size
        return (
            self.num_layers * self.attention_parameters
            + dense_layers * self._mlp(self.intermediate_size)
            + self.num_expert_layers * (self._mlp(self.shared_expert_size) + router)
        )

    @property
    def head_parameters(self) -> int:
        """Of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All of them, norms and biases left out."""
        experts = self.num_expert_layers * self.num_experts * self.expert_parameters
        tables = self.head_parameters * (1 if self.is_head_tied else 2)
        return self.always_read_parameters + experts + tables

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes

    def experts_touched(self, num_tokens: FloatArray | float) -> FloatArray:
        """Expected distinct experts of one layer that `num_tokens` tokens visit; same shape.

        Every token picks `experts_per_token` of `num_experts`, evenly and independently.
        """
        tokens = np.asarray(num_tokens, dtype=float)
        if not self.num_experts:
            return np.zeros_like(tokens)
        missed = (1.0 - self.experts_per_token / self.num_experts) ** tokens
        return np.asarray(self.num_experts * (1.0 - missed))

    def _mlp(self, intermediate_size: int) -> int:
        return (3 if self.is_mlp_gated else 2) * self.hidden_size * intermediate_size


def _dense(
    name: str, sizes: tuple[int, int, int, int, int, int, int], is_head_tied: bool = False
) -> ModelShape:
    """Layers, hidden, heads, KV heads, head dimension, intermediate, vocabulary."""
    return ModelShape(name, *sizes, is_head_tied=is_head_tied)


def _experts(
    name: str, sizes: tuple[int, int, int, int, int, int, int], experts: tuple[int, int, int]
) -> ModelShape:
    """As `_dense`, then experts, experts per token, size of an expert."""
    count, per_token, size = experts
    return ModelShape(
        name, *sizes, num_experts=count, experts_per_token=per_token, expert_size=size
    )


SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _dense("tinyllama-1.1b", (22, 2048, 32, 4, 64, 5632, 32000)),
        _dense("llama-2-7b", (32, 4096, 32, 32, 128, 11008, 32000)),
        _dense("llama-2-13b", (40, 5120, 40, 40, 128, 13824, 32000)),
        _dense("llama-2-70b", (80, 8192, 64, 8, 128, 28672, 32000)),
        _dense("llama-3-8b", (32, 4096, 32, 8, 128, 14336, 128256)),
        _dense("llama-3-70b", (80, 8192, 64, 8, 128, 28672, 128256)),
        _dense("llama-3.1-8b", (32, 4096, 32, 8, 128, 14336, 128256)),
        _dense("llama-3.1-70b", (80, 8192, 64, 8, 128, 28672, 128256)),
        _dense("llama-3.1-405b", (126, 16384, 128, 8, 128, 53248, 128256)),
        _dense("llama-3.2-1b", (16, 2048, 32, 8, 64, 8192, 128256), is_head_tied=True),
        _dense("llama-3.2-3b", (28, 3072, 24, 8, 128, 8192, 128256), is_head_tied=True),
        _dense("llama-3.3-70b", (80, 8192, 64, 8, 128, 28672, 128256)),
        ModelShape(
            "mistral-7b-v0.1",
            32,
            4096,
            32,
            8,
            128,
            14336,
            32000,
            sliding_window=4096,
            num_sliding_layers=32,
        ),
        _dense("mistral-7b", (32, 4096, 32, 8, 128, 14336, 32768)),
        _dense("mistral-nemo-12b", (40, 5120, 32, 8, 128, 14336, 131072)),
        _dense("mistral-small-24b", (40, 5120, 32, 8, 128, 32768, 131072)),
        _dense("mistral-large-123b", (88, 12288, 96, 8, 128, 28672, 32768)),
        _experts("mixtral-8x7b", (32, 4096, 32, 8, 128, 14336, 32000), (8, 2, 14336)),
        _experts("mixtral-8x22b", (56, 6144, 48, 8, 128, 16384, 32768), (8, 2, 16384)),
        _dense("qwen2.5-0.5b", (24, 896, 14, 2, 64, 4864, 151936), is_head_tied=True),
        _dense("qwen2.5-1.5b", (28, 1536, 12, 2, 128, 8960, 151936), is_head_tied=True),
        _dense("qwen2.5-3b", (36, 2048, 16, 2, 128, 11008, 151936), is_head_tied=True),
        _dense("qwen2.5-7b", (28, 3584, 28, 4, 128, 18944, 152064)),
        _dense("qwen2.5-14b", (48, 5120, 40, 8, 128, 13824, 152064)),
        _dense("qwen2.5-32b", (64, 5120, 40, 8, 128, 27648, 152064)),
        _dense("qwen2.5-72b", (80, 8192, 64, 8, 128, 29568, 152064)),
        _dense("qwen3-0.6b", (28, 1024, 16, 8, 128, 3072, 151936), is_head_tied=True),
        _dense("qwen3-1.7b", (28, 2048, 16, 8, 128, 6144, 151936), is_head_tied=True),
        _dense("qwen3-4b", (36, 2560, 32, 8, 128, 9728, 151936), is_head_tied=True),
        _dense("qwen3-8b", (36, 4096, 32, 8, 128, 12288, 151936)),
        _dense("qwen3-14b", (40, 5120, 40, 8, 128, 17408, 151936)),
        _dense("qwen3-32b", (64, 5120, 64, 8, 128, 25600, 151936)),
        _experts("qwen3-30b-a3b", (48, 2048, 32, 4, 128, 6144, 151936), (128, 8, 768)),
        _experts("qwen3-235b-a22b", (94, 4096, 64, 4, 128, 12288, 151936), (128, 8, 1536)),
    )
}

_ALIASES = {
    "llama-2-7b-32k": "llama-2-7b",
    "tinyllama": "tinyllama-1.1b",
    "mixtral": "mixtral-8x7b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small-3.1-24b": "mistral-small-24b",
    "mistral-small-3.2-24b": "mistral-small-24b",
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-1.5b": "qwen2.5-1.5b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2-72b": "qwen2.5-72b",
    "qwq-32b": "qwen2.5-32b",
}
_TUNED = re.compile(r"-(?:hf|instruct|chat|base|it|coder|math|thinking|\d{4})(?=-|$)")
_LARGE = re.compile(r"^mistral-large(-instruct)?-(2407|2411)$")  # later ones are other models
_REVISION = re.compile(r"-v\d+(?:\.\d+)?$")


def by_name(name: str) -> ModelShape:
    """The shape called `name`: case, an owner before "/", "-instruct" or the like, a date ("-2407") and
    a revision ("-v0.3") do not matter.

    Raises `UnknownName` for a model that is not in the table.
    """
    plain = name.lower().rpartition("/")[2].replace("_", "-").replace("meta-llama", "llama")
    plain = plain.replace("llama2", "llama-2").replace("llama3", "llama-3")
    plain = _LARGE.sub("mistral-large-123b", plain)
    plain = _TUNED.sub("", plain)
    if plain not in SHAPES:
        plain = _REVISION.sub("", plain)
    plain = _ALIASES.get(plain, plain)
    if plain not in SHAPES:
        raise UnknownName(
            f"model {name!r} is not known; use one of {', '.join(SHAPES)}, or a config.json"
        )
    return SHAPES[plain]


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
