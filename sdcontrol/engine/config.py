"""The engine's settings, and how large a cache the machine can hold.

Knows nothing of models beyond bytes per token.
"""

import os

import torch
from pydantic import BaseModel, ConfigDict, Field

from sdcontrol.errors import ConfigError
from sdcontrol.scheduling.blocks import BlockPool
from sdcontrol.scheduling.scheduler import Scheduler

__all__ = ["EngineConfig", "num_cache_blocks"]

_MOST_TOKENS_BY_DEFAULT = 1 << 18


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
    wanted = config.kv_tokens
    if wanted is None:
        fits = int(_free_bytes(device) * config.memory_fraction) // max(bytes_per_token, 1)
        wanted = min(fits, _MOST_TOKENS_BY_DEFAULT)
    if wanted < config.block_size:
        raise ConfigError(
            f"the KV cache would hold {wanted} tokens at {bytes_per_token} bytes each, less than "
            f"one block of {config.block_size}; raise kv_tokens or memory_fraction"
        )
    return -(-wanted // config.block_size) + 1


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
