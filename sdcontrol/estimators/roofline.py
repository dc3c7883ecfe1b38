"""What a forward must compute and move, and how long that takes at least.

Knows nothing of acceptance, plans or measured steps (fitting is `calibration`'s). A forward of T
tokens, V KV tokens in all, B requests, has parts:

    weights       2 T P FLOPs        P bytes: always-read parameters, and the experts touched
    KV            4 (T / B) V h d l  V keys and values read, T written
    activations   none               what T tokens write and read between kernels
    head          2 T h v            the head's table, T rows of logits
    all-reduces   none               2 per layer over the link, with tensor parallelism

A part takes ((bytes / bandwidth)^p + (FLOPs / peak)^p)^(1/p), p = 2.5: the roof is round near its
ridge, since tiles overlap loads and arithmetic imperfectly. Parts follow one another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.elementwise import of_each
from sdcontrol.estimators.hardware import Hardware
from sdcontrol.estimators.shapes import ModelShape

__all__ = ["Calibration", "Forward", "Part", "Profile", "RooflineCost"]

_MOST_CATCH_UPS = 4096  # that are kept
_ROUNDNESS = 2.5
_ACTIVATION_BYTES = 2.0
_LOGIT_BYTES = 4.0
_FIRST_HOP_SECONDS = 6e-6  # an all-reduce's launch and synchronisation
_FREE_FAMILIES = frozenset({"ngram"})


@dataclass(frozen=True, slots=True)
class Calibration:
    """How far from its ceilings a machine runs, and what comes on top."""

    bandwidth_efficiency: float = 0.8  # of weights, and of KV unless the next says otherwise
    compute_efficiency: float = 0.7
    layer_overhead_seconds: float = 2e-5  # launches and gaps, per layer of a forward
    token_overhead_seconds: float = 2e-7  # per token and layer: small kernels that no part counts
    step_overhead_seconds: float = 0.0  # beside the forwards
    request_overhead_seconds: float = 0.0  # per request and layer, however many tokens it has
    kv_efficiency: float | None = None  # of the bandwidth, where attention reaches another share
    all_reduce_scale: float = 1.0  # times what link and hops say

    def __post_init__(self) -> None:
        for name in ("bandwidth_efficiency", "compute_efficiency", "kv_efficiency"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.5:
                raise ConfigError(f"{name} is {value}; it must lie between 0 and 1.5")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a forward, on one device."""

    name: str
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity_flops_per_byte(self) -> float:
        """Arithmetic intensity."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A forward, on one device: its parts and what bounds it."""

    parts: tuple[Part, ...]
    ridge_flops_per_byte: float
    overhead_seconds: float
    all_reduce_seconds: float

    @property
    def flops(self) -> float:
        """Of all parts."""
        return sum(part.flops for part in self.parts)

    @property
    def bytes(self) -> float:
        """Of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def intensity_flops_per_byte(self) -> float:
        """Arithmetic intensity of the whole."""
        return self.flops / self.bytes

    @property
    def seconds(self) -> float:
        """Of the whole forward."""
        parts = sum(part.seconds for part in self.parts)
        return parts + self.overhead_seconds + self.all_reduce_seconds

    @property
    def bound(self) -> str:
        """What takes longest: "memory", "compute", "communication" or "overhead"."""
        by_memory = sum(p.seconds for p in self.parts if self._is_memory_bound(p))
        by_compute = sum(p.seconds for p in self.parts if not self._is_memory_bound(p))
        takes = {
            "memory": by_memory,
            "compute": by_compute,
            "communication": self.all_reduce_seconds,
            "overhead": self.overhead_seconds,
        }
        return max(takes, key=lambda name: takes[name])

    def _is_memory_bound(self, part: Part) -> bool:
        return part.intensity_flops_per_byte < self.ridge_flops_per_byte


@dataclass(frozen=True, slots=True)
class Forward:
    """A model on a machine: what its forwards take."""

    shape: ModelShape
    hardware: Hardware
    tensor_parallel: int = 1
    calibration: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel is {self.tensor_parallel}; it must be at least 1")

    def profile(self, num_tokens: float, kv_tokens: float, num_requests: float) -> Profile:
        """The forward part by part, on one device; raises `ConfigError` as `seconds` does."""
        sizes = np.asarray(num_tokens, float), np.asarray(kv_tokens, float)
        works = self._works(*sizes, num_requests)
        parts = tuple(
            Part(name, float(flops), float(moved), float(self._part_seconds(name, flops, moved)))
            for name, (flops, moved) in works.items()
        )
        return Profile(
            parts,
            self.hardware.ridge_flops_per_byte,
            float(self._overhead_seconds(np.asarray(num_tokens, float), num_requests)),
            float(self._all_reduce_seconds(np.asarray(num_tokens, float))),
        )

    def seconds(
        self,
        num_tokens: FloatArray | float,
        kv_tokens: FloatArray | float,
        num_requests: FloatArray | float,
    ) -> FloatArray:
        """Seconds of the whole forward; arguments broadcast.

        Raises `ConfigError` for tensor parallelism over devices that no link joins.
        """
        return np.asarray(sum(self.part_seconds(num_tokens, kv_tokens, num_requests).values()))

    def part_seconds(
        self,
        num_tokens: FloatArray | float,
        kv_tokens: FloatArray | float,
        num_requests: FloatArray | float,
    ) -> dict[str, FloatArray]:
        """What `seconds` adds up: of each part, of all-reduces and of what comes on top."""
        tokens, kv = np.asarray(num_tokens, dtype=float), np.asarray(kv_tokens, dtype=float)
        works = self._works(tokens, kv, num_requests)
        return {
            "overhead": self._overhead_seconds(tokens, num_requests),
            "all-reduces": self._all_reduce_seconds(tokens),
            **{name: self._part_seconds(name, *work) for name, work in works.items()},
        }

    def _works(
        self, tokens: FloatArray, kv: FloatArray, requests: FloatArray | float
    ) -> dict[str, tuple[FloatArray, FloatArray]]:
        """(FLOPs, bytes) of each part, on one device."""
        shape, devices = self.shape, self.tensor_parallel
        touched = shape.num_expert_layers * shape.expert_parameters * shape.experts_touched(tokens)
        weights = (
            2.0 * tokens * shape.parameters_per_token,
            shape.weight_bytes * (shape.always_read_parameters + touched)
            + shape.extra_attention_bytes,
        )
        width = shape.num_layers * (shape.hidden_size + shape.num_heads * shape.head_dim)
        activations = 4.0 * _ACTIVATION_BYTES * tokens * (width + shape.mlp_width_per_token)
        head = (
            2.0 * tokens * shape.head_parameters,
            shape.head_bytes * shape.head_parameters + _LOGIT_BYTES * tokens * shape.vocab_size,
        )
        works = {
            "weights": weights,
            "kv": self._kv_work(tokens, kv, requests),
            "activations": (np.zeros_like(tokens), activations),
            "head": head,
        }
        shares = dict.fromkeys(works, float(devices))
        shares["kv"] = float(min(devices, shape.num_kv_heads))  # a KV head is not split
        return {
            name: (np.asarray(flops / devices), np.asarray(moved / shares[name]))
            for name, (flops, moved) in works.items()
        }

    def _kv_work(
        self, tokens: FloatArray, kv: FloatArray, requests: FloatArray | float
    ) -> tuple[FloatArray, FloatArray]:
        shape = self.shape
        per_request = np.maximum(requests, 1.0)
        read = kv
        if shape.sliding_window is not None and shape.num_sliding_layers:
            sliding = shape.num_sliding_layers / shape.num_layers
            windowed = np.minimum(kv, shape.sliding_window * per_request)
            read = (1.0 - sliding) * kv + sliding * windowed
        per_pair = 4.0 * shape.num_heads * shape.head_dim * shape.num_layers
        flops = per_pair * tokens / per_request * read
        return np.asarray(flops), np.asarray((read + tokens) * shape.kv_bytes_per_token)

    def _part_seconds(self, name: str, flops: FloatArray, moved: FloatArray) -> FloatArray:
        fit, machine = self.calibration, self.hardware
        reached = fit.bandwidth_efficiency
        if name == "kv" and fit.kv_efficiency is not None:
            reached = fit.kv_efficiency
        computing = flops / (machine.flops_per_second * fit.compute_efficiency)
        moving = moved / (machine.bytes_per_second * reached)
        longer = np.maximum(computing, moving)
        ratio = np.minimum(computing, moving) / np.maximum(longer, 1e-30)
        return np.asarray(longer * (1.0 + ratio**_ROUNDNESS) ** (1.0 / _ROUNDNESS))

    def _overhead_seconds(self, tokens: FloatArray, requests: FloatArray | float) -> FloatArray:
        fit = self.calibration
        per_layer = fit.layer_overhead_seconds + fit.token_overhead_seconds * tokens
        per_layer = per_layer + fit.request_overhead_seconds * np.asarray(requests, dtype=float)
        return np.asarray(self.shape.num_layers * per_layer)

    def _all_reduce_seconds(self, tokens: FloatArray) -> FloatArray:
        """Two ring all-reduces of the hidden states per layer: 2 (d - 1) hops of 1/d each."""
        devices = self.tensor_parallel
        if devices == 1:
            return np.zeros_like(tokens)
        link = self.hardware.link_bytes_per_second
        if link <= 0.0:
            raise ConfigError(
                f"tensor_parallel is {devices}, but {self.hardware.name} has no link_bytes_per_second; give 1"
            )
        hops = 2.0 * (devices - 1)
        moved = hops / devices * tokens * self.shape.hidden_size * _ACTIVATION_BYTES
        once = _FIRST_HOP_SECONDS + hops * self.hardware.hop_seconds + moved / link
        return np.asarray(self.calibration.all_reduce_scale * 2.0 * self.shape.num_layers * once)


class RooflineCost:
    """A `Cost` from shapes and hardware alone.

    `draft_models` gives the forward of each family that is a model of its own; `sparse_kv` is the
    target reading less KV, `ngram` costs nothing, and a family without a forward here is priced like
    the target, at which no drafter pays.
    """

    def __init__(self, target: Forward, draft_models: Mapping[str, Forward] | None = None) -> None:
        self.target = target
        self.draft_models = dict(draft_models or {})
        self._catch_ups: dict[tuple[str, float], tuple[Forward, float]] = {}

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """Seconds of a target forward over packed tokens that reads `kv_tokens` of KV in all; all broadcast."""
        return self.target.seconds(num_tokens, kv_tokens, num_requests)

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round: `num_requests` requests draft one token each; 0 without requests.

        Seconds; arguments broadcast.
        """
        count, kv = np.asarray(num_requests, dtype=float), np.asarray(kv_tokens, dtype=float)
        if family in _FREE_FAMILIES:
            return np.zeros(np.broadcast_shapes(count.shape, kv.shape))
        forward = self.draft_models.get(family, self.target)
        return np.where(count > 0, forward.seconds(count, kv, count), 0.0)

    @of_each
    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        """Seconds that a first round takes longer: it computes `num_tokens` that its model's cache lacks, too."""
        if num_tokens <= 0 or family not in self.draft_models:
            return 0.0
        forward, known = self.draft_models[family], self._catch_ups.get((family, num_tokens))
        if known is None or known[0] is not forward:
            longer = forward.seconds(1.0 + num_tokens, 0.0, 1.0) - forward.seconds(1.0, 0.0, 1.0)
            if len(self._catch_ups) >= _MOST_CATCH_UPS:
                self._catch_ups.clear()
            known = self._catch_ups[family, num_tokens] = forward, float(longer)
        return known[1]  # kept: a controller asks for the same few after everything that it learns

    def overhead_seconds(self) -> float:
        """Seconds that a step takes beside its forwards."""
        return self.target.calibration.step_overhead_seconds
