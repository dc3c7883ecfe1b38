"""What a step must read and compute at least, what fits in memory, and what self-drafting may gain.

Arithmetic over shapes; knows no torch and measures nothing. A floor is the larger of two times:
weights and KV over the measured copy bandwidth, and FLOPs over the measured matrix rate. Norms,
activations, logits and launches are left out: they are what a measured step has on top.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sdcontrol.estimators.shapes import ModelShape

__all__ = ["Load", "Need", "Rates", "acceptance_length", "attention_bytes", "floor_seconds", "kv_bytes",
           "score_bytes", "self_drafting_bound", "step_bytes", "step_flops", "weight_bytes"]  # fmt: skip

_GB = 1e9
_PAGE = 16
_QUERIES_KEPT = 2 * _PAGE + 65  # of a request: two pages and a draft, as the engine's scorer keeps


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device was measured to do."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Need:
    """What a cell takes of a device's memory, in bytes, by what takes it."""

    parts: Mapping[str, float]
    free_bytes: float

    @property
    def num_bytes(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def lack(self) -> str | None:
        """Why the cell is left out, with the numbers; None where it fits."""
        if self.num_bytes <= self.free_bytes:
            return None
        parts = ", ".join(f"{name} {size / _GB:.1f}" for name, size in self.parts.items())
        free = f"{self.free_bytes / _GB:.1f} GB free"
        return f"needs {self.num_bytes / _GB:.1f} GB ({parts}), {free}"


@dataclass(frozen=True, slots=True)
class Load:
    """A step: requests that all have the same context, and what each computes."""

    batch_size: int
    context_tokens: int
    tokens_per_request: float = 1.0

    @property
    def num_tokens(self) -> float:
        """Tokens computed by the step."""
        return self.batch_size * self.tokens_per_request

    @property
    def kv_tokens(self) -> int:
        """Tokens of all contexts."""
        return self.batch_size * self.context_tokens


def weight_bytes(shape: ModelShape) -> float:
    """All weights, as they lie in memory."""
    tables = shape.head_parameters * (1 if shape.is_head_tied else 2)
    layers = (shape.num_parameters - tables) * shape.weight_bytes + shape.extra_attention_bytes
    return layers + tables * shape.head_bytes


def kv_bytes(shape: ModelShape, num_tokens: float) -> float:
    """Keys and values of `num_tokens` in all layers."""
    return num_tokens * shape.kv_bytes_per_token


def score_bytes(shape: ModelShape, num_tokens: float, num_requests: int) -> float:
    """What scored pages take: two bounds of each page's keys, and the latest queries."""
    queries = shape.num_layers * shape.num_heads * shape.head_dim * _QUERIES_KEPT
    return kv_bytes(shape, num_tokens) / _PAGE + num_requests * queries * shape.kv_bytes


def step_bytes(shape: ModelShape, load: Load) -> float:
    """What a step moves: layers and head once, every context's KV, and what its tokens write."""
    weights = shape.always_read_parameters * shape.weight_bytes + shape.extra_attention_bytes
    head = shape.head_parameters * shape.head_bytes
    return weights + head + kv_bytes(shape, load.kv_tokens + load.num_tokens)


def step_flops(shape: ModelShape, load: Load) -> float:
    """What a step multiplies; logits for every token, as verification needs them."""
    dense = 2.0 * (shape.always_read_parameters + shape.head_parameters) * load.num_tokens
    pairs = load.num_tokens * load.context_tokens
    return dense + 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs


def floor_seconds(shape: ModelShape, load: Load, rates: Rates) -> float:
    """The least that a step can take."""
    return max(
        step_bytes(shape, load) / rates.bytes_per_second,
        step_flops(shape, load) / rates.flops_per_second,
    )


def attention_bytes(shape: ModelShape, load: Load) -> float:
    """KV of one layer that attention alone reads."""
    return kv_bytes(shape, load.kv_tokens) / shape.num_layers


def acceptance_length(rate: float, num_draft_tokens: int) -> float:
    """Tokens per verification when each draft token stands with `rate` given that its parent did."""
    return sum(rate**position for position in range(num_draft_tokens + 1))


def self_drafting_bound(
    shape: ModelShape, load: Load, *, budget_tokens: int, rate: float, num_draft_tokens: int
) -> float:
    """Speedup over plain decoding if bytes were all that counts.

    A draft round reads the weights and the budget, verification the weights and all of the KV.
    """
    plain = step_bytes(shape, Load(load.batch_size, load.context_tokens))
    sparse = min(budget_tokens, load.context_tokens)
    draft = step_bytes(shape, Load(load.batch_size, sparse))
    verify = step_bytes(shape, Load(load.batch_size, load.context_tokens, num_draft_tokens + 1))
    step = num_draft_tokens * draft + verify
    return acceptance_length(rate, num_draft_tokens) * plain / step
