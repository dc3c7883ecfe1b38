"""What a decoder-only model is made of: the counts that decide its FLOPs and bytes.

Knows nothing of hardware, weights, or where the counts come from.
"""

import reprlib
from dataclasses import dataclass

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.config_numbers import MOST

__all__ = ["ModelShape"]

_LIMITS: tuple[tuple[str, float, float | str], ...] = (  # the most may be another size
    ("num_layers", 1, MOST),
    ("hidden_size", 1, MOST),
    ("num_heads", 1, MOST),
    ("num_kv_heads", 1, "num_heads"),
    ("head_dim", 1, MOST),
    ("intermediate_size", 0, MOST),
    ("vocab_size", 1, MOST),
    ("num_experts", 0, MOST),
    ("expert_size", 0, MOST),
    ("shared_expert_size", 0, MOST),
    ("num_dense_layers", 0, "num_layers"),
    ("weight_bytes", 0.01, 16.0),
    ("head_bytes", 0.01, 16.0),
    ("kv_bytes", 0.01, 16.0),
    ("attention_bytes", 0.01, 16.0),
    ("sliding_window", 1, MOST),
    ("num_sliding_layers", 0, "num_layers"),
)


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
    attention_bytes: float | None = None  # per element of its projections; None: `weight_bytes`

    def __post_init__(self) -> None:
        for name, least, most in _LIMITS:
            value = getattr(self, name)
            limit = getattr(self, most) if isinstance(most, str) else most
            if value is not None and not least <= value <= limit:
                raise ConfigError(
                    f"shape {self.name!r} has {name} {reprlib.repr(value)}; it must be from {least:g} to {limit:g}"
                )
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
    def parameters_per_token(self) -> int:
        """Of all layers, what a token passes; the head, which not every token does, left out."""
        experts = self.experts_per_token * self.num_expert_layers * self.expert_parameters
        return self.always_read_parameters + experts

    @property
    def mlp_width_per_token(self) -> int:
        """Summed over the layers: elements of a token inside its MLP, or its experts and what is shared."""
        experts = self.experts_per_token * self.expert_size + self.shared_expert_size
        dense_layers = self.num_layers - self.num_expert_layers
        return dense_layers * self.intermediate_size + self.num_expert_layers * experts

    @property
    def extra_attention_bytes(self) -> float:
        """What the attention projections of all layers take beyond `weight_bytes` per element."""
        if self.attention_bytes is None:
            return 0.0
        extra = self.attention_bytes - self.weight_bytes
        return extra * self.num_layers * self.attention_parameters

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
