"""Which attention and cache a model gets: Triton's kernels on CUDA, torch anywhere.

Knows layers' shapes and devices; nothing of requests, drafts or settings beyond the one name.
triton is imported only where it is wanted, since it may be absent.
"""

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from sdcontrol.engine.attention import AttentionBackend
from sdcontrol.engine.kernels.reference import TorchAttention
from sdcontrol.engine.kernels.reference_steps import TorchPageBounds
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.errors import ConfigError, UnsupportedModel
from sdcontrol.logs import EventLog

if TYPE_CHECKING:
    from sdcontrol.engine.kernels.cache_kernels import CacheTensors

__all__ = [
    "BackendName",
    "PageBounds",
    "TritonKVCache",
    "backend_of",
    "cache_class_of",
    "device_name",
    "device_scope",
    "page_bounds_of",
]

BackendName = Literal["auto", "triton", "torch"]

log = EventLog(__name__)


class PageBounds(Protocol):
    """Bounds of the keys of every page of a cache, whose layers are of one shape."""

    def summarise(self, blocks: Tensor) -> None:
        """Take in the keys that lie in `blocks` `[n]` now."""
        ...

    def score(self, queries: Tensor, blocks: Tensor) -> Tensor:
        """How large a product of a query with a key of each page can be, summed over heads.

        Float32 `[layers, kv_heads, pages]`, of `queries` float32 `[layers, kv_heads, shared, dim]`
        and the pages that lie in `blocks` `[pages]`.
        """
        ...


_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
_LEAST_CAPABILITY = 80  # times ten; on 7.5 tiles spill, or take over its 64 KB


class TritonKVCache(KVCache):
    """A cache that new tokens are written to by one launch a layer, keys and values together.

    Tokens are moved by one launch for all layers.
    """

    _tensors: "CacheTensors | None" = None

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `[kv_heads, tokens, dim]` at `slots` `[tokens]`; padding may share a slot."""
        from sdcontrol.engine.kernels.cache_kernels import write_tokens

        keys = keys if keys.stride(-1) == 1 else keys.contiguous()
        values = values if values.stride(-1) == 1 else values.contiguous()
        write_tokens(self.keys[layer], self.values[layer], slots, keys, values)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """See `KVCache.move`."""
        from sdcontrol.engine.kernels.cache_kernels import CacheTensors

        if self._tensors is None:
            self._tensors = CacheTensors((*self.keys, *self.values))
        self._tensors.move(sources, targets)


def backend_of(
    backend: AttentionBackend | BackendName, layers: Sequence[LayerShape], device: torch.device
) -> AttentionBackend:
    """The backend itself, or the one of this name for these layers.

    "auto" is Triton on CUDA, unless it cannot take these layers: then a warning names the reason,
    and torch computes. "triton" raises `ConfigError` where it cannot run, `UnsupportedModel` for
    layers that it cannot take. Off CUDA it runs under Triton's interpreter only.
    """
    if not isinstance(backend, str):
        return backend
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return TorchAttention()
    try:
        return _triton(layers, device)
    except (ConfigError, UnsupportedModel) as error:
        if backend == "triton":
            raise
        log.warning("triton_attention_left_out", reason=str(error), backend="torch")
        return TorchAttention()


def device_scope(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the thread's current one, where Triton launches; may be entered repeatedly."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_name(device: torch.device) -> str:
    """By the name that its driver gives, a CPU by its architecture."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_cuda else platform.machine()


def cache_class_of(backend: AttentionBackend) -> type[KVCache]:
    """The cache that goes with a backend: written by Triton beside Triton's attention."""
    if isinstance(backend, TorchAttention):
        return KVCache
    try:
        from sdcontrol.engine.kernels.triton_attention import TritonAttention
    except ImportError:
        return KVCache
    return TritonKVCache if isinstance(backend, TritonAttention) else KVCache


def page_bounds_of(cache: KVCache) -> PageBounds:
    """What sums up the pages of this cache."""
    if not isinstance(cache, TritonKVCache):
        return TorchPageBounds(cache)
    from sdcontrol.engine.kernels.page_kernels import TritonPageBounds

    return TritonPageBounds(cache)


def _triton(layers: Sequence[LayerShape], device: torch.device) -> AttentionBackend:
    try:
        from sdcontrol.engine.kernels import triton_attention
    except ImportError as error:
        raise ConfigError(
            f"attention_backend 'triton' needs triton ({error}); install it, or use 'torch'"
        ) from error
    if device.type != "cuda" and not triton_attention.IS_INTERPRETED:
        raise ConfigError(
            f"attention_backend 'triton' on {device.type}: it runs on CUDA; use 'torch' (or set "
            "TRITON_INTERPRET=1 before the start, to debug kernels)"
        )
    if torch.version.hip is not None:  # where a device's type is "cuda", too
        raise ConfigError(
            f"attention_backend 'triton' on ROCm {torch.version.hip}: its launches are for NVIDIA's "
            "compiler; use 'torch'"
        )
    capability, _ = triton_attention.gpu_of(device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"attention_backend 'triton' on compute capability {capability / 10}: its tiles are "
            f"for {_LEAST_CAPABILITY / 10} and later; use 'torch'"
        )
    for layer in dict.fromkeys(layers):
        if layer.dtype not in _DTYPES:
            raise UnsupportedModel(
                f"keys and values of {layer.dtype}: the Triton attention takes float16, bfloat16 "
                "and float32; use the torch backend"
            )
        triton_attention.choose_tile(layer, 1, capability=capability)
    return triton_attention.TritonAttention()
