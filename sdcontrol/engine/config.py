"""The engine's settings, and how large a cache the machine can hold.

Knows nothing of models beyond bytes per token.
"""

import os
from collections.abc import Callable, Mapping

import torch
from pydantic import BaseModel, ConfigDict, Field

from sdcontrol.engine.backends import BackendName
from sdcontrol.errors import ConfigError
from sdcontrol.scheduling.blocks import BlockPool
from sdcontrol.scheduling.scheduler import Scheduler

__all__ = ["EngineConfig", "FreeBytes", "cache_blocks", "free_bytes_of", "num_cache_blocks"]

FreeBytes = Callable[[torch.device], int]

_MOST_TOKENS_ON_CPU = 1 << 18  # by default


class EngineConfig(BaseModel):
    """Settings of one engine; frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(16, ge=8, le=256, description="tokens per KV block")
    max_batch_size: int = Field(64, ge=1, description="requests decoded together")
    max_prefill_tokens: int = Field(512, ge=1, description="prompt tokens computed in one step")
    kv_tokens: int | None = Field(
        None, ge=1, description="tokens that the KV cache holds; None: from memory_fraction"
    )
    memory_fraction: float = Field(
        0.5, gt=0, le=0.95, description="share of the free memory that the KV cache may take"
    )
    prefix_sharing: bool = Field(True, description="share the blocks of common prompt beginnings")
    max_draft_tokens: int = Field(16, ge=1, le=64, description="draft tokens per request and step")

    attention_backend: BackendName = Field(
        "auto", description="triton, torch, or auto: triton on CUDA where it takes the model"
    )
    cuda_graphs: bool = Field(True, description="on CUDA, capture decoding forwards in graphs")
    overlap: bool | None = Field(
        None, description="launch a step before the host learns from the last; None: on CUDA"
    )

    def scheduler(self, pool: BlockPool) -> Scheduler:
        """A scheduler with these settings over `pool`."""
        return Scheduler(
            pool,
            max_batch_size=self.max_batch_size,
            max_prefill_tokens=self.max_prefill_tokens,
        )


def num_cache_blocks(config: EngineConfig, bytes_per_token: int, device: torch.device) -> int:
    """Blocks of the pool, the null block included.

    Raises `ConfigError` where not even one block fits.
    """
    return cache_blocks(config, {"model": bytes_per_token}, device)


def cache_blocks(
    config: EngineConfig,
    bytes_per_token: Mapping[str, int],
    device: torch.device,
    free_bytes: FreeBytes | None = None,
) -> int:
    """Blocks of the pool that all models share, the null block included.

    `bytes_per_token` is what one token takes in each model's cache, the target's first. Raises
    `ConfigError` where not even one block fits, or, on a device that has to give all of it at
    once, fewer tokens than `kv_tokens`.
    """
    num_bytes = max(sum(bytes_per_token.values()), 1)
    wanted = config.kv_tokens
    is_lazy = device.type == "cpu"  # there memory is taken when it is first written
    if wanted is None or not is_lazy:
        free = (free_bytes or free_bytes_of)(device)
        if wanted is None:
            wanted = int(free * config.memory_fraction) // num_bytes
            wanted = min(wanted, _MOST_TOKENS_ON_CPU) if is_lazy else wanted
            _check_room(config, bytes_per_token, free, wanted)
        elif wanted * num_bytes > free:
            asked = f"{wanted} tokens are asked for"
            raise ConfigError(_refusal(bytes_per_token, free, asked, "lower kv_tokens"))
    if wanted < config.block_size:
        raise ConfigError(
            f"the KV cache would hold {wanted} tokens at {num_bytes} bytes each, less than "
            f"one block of {config.block_size}; raise kv_tokens or memory_fraction"
        )
    return -(-wanted // config.block_size) + 1


def _check_room(
    config: EngineConfig, bytes_per_token: Mapping[str, int], free: int, tokens: int
) -> None:
    if len(bytes_per_token) > 1 and tokens < config.block_size:
        share = f"memory_fraction {config.memory_fraction} of that holds {tokens} tokens"
        raise ConfigError(_refusal(bytes_per_token, free, share, "raise memory_fraction"))


def _refusal(bytes_per_token: Mapping[str, int], free: int, asked: str, remedy: str) -> str:
    """What does not fit, with the numbers; the models beside the target may be left out."""
    each = ", ".join(f"{name} {size}" for name, size in bytes_per_token.items())
    others = " and ".join(list(bytes_per_token)[1:])
    or_leave_out = f", or leave out {others}" if others else ""
    return (
        f"the KV cache does not fit: bytes per token {each}; {free} bytes are free; {asked}; "
        f"{remedy}{or_leave_out}"
    )


def free_bytes_of(device: torch.device) -> int:
    """Bytes that a cache could take on `device` now; on CUDA, torch's own unused ones included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
