"""The engine's settings, and how large a cache the machine can hold.

Knows nothing of models beyond bytes per token.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from pydantic import ConfigDict, Field

from sdcontrol.engine.backends import BackendName
from sdcontrol.engine.graph_recorder import give_back_unused
from sdcontrol.errors import ConfigError
from sdcontrol.outcomes import DEPTH
from sdcontrol.plain_numbers import PlainNumbers
from sdcontrol.scheduling.blocks import BlockPool
from sdcontrol.scheduling.scheduler import Scheduler

__all__ = ["EngineConfig", "FreeBytes", "Memory", "cache_blocks", "free_bytes_of"]

FreeBytes = Callable[[torch.device], int]

_MOST_TOKENS_ON_CPU = 1 << 18  # by default


@dataclass(frozen=True, slots=True)
class Memory:
    """What an engine takes beside its weights, in bytes, by who takes it; the target's first.

    What may be left out stands under one name in both.
    """

    per_token: Mapping[str, int]  # of the pool
    fixed: Mapping[str, int] = field(default_factory=dict)  # however large the pool is
    step_bytes: int = 0  # that the largest step computes with, and gives back

    @property
    def token_bytes(self) -> int:
        """What a token of the pool takes in all caches together."""
        return max(sum(self.per_token.values()), 1)

    @property
    def fixed_bytes(self) -> int:
        """What is taken once."""
        return sum(self.fixed.values())


class EngineConfig(PlainNumbers):
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
    max_draft_tokens: int = Field(
        DEPTH, ge=1, le=64, description="draft tokens per request and step"
    )

    attention_backend: BackendName = Field(
        "auto", description="triton, torch, or auto: triton on CUDA where it takes the model"
    )
    cuda_graphs: bool = Field(True, description="on CUDA, capture decoding forwards in graphs")
    merge_projections: bool = Field(
        True,
        description="in graphs, linear layers of one input are one product of adjacent weights",
    )
    compile_layers: bool = Field(
        False, description="in graphs, torch.compile fuses norms, rotary embedding and activations"
    )
    overlap: bool | None = Field(
        None, description="launch a step before the host learns from the last; None: on CUDA"
    )

    @property
    def most_decoding_tokens(self) -> int:
        """Of one forward without prefill: every request's last token and all of its draft."""
        return self.max_batch_size * (1 + self.max_draft_tokens)

    def scheduler(self, pool: BlockPool) -> Scheduler:
        """A scheduler with these settings over `pool`."""
        return Scheduler(
            pool,
            max_batch_size=self.max_batch_size,
            max_prefill_tokens=self.max_prefill_tokens,
        )


def cache_blocks(
    config: EngineConfig,
    memory: Memory,
    device: torch.device,
    free_bytes: FreeBytes | None = None,
) -> int:
    """Blocks of the pool that all models share, the null block included.

    The share of the free memory that the cache may take is for everything in `memory`. Raises
    `ConfigError` where not even one block fits, or, on a device that has to give all of it at
    once, fewer tokens than `kv_tokens`.
    """
    wanted = config.kv_tokens
    is_lazy = device.type == "cpu"  # there memory is taken when it is first written
    if wanted is None or not is_lazy:
        free = (free_bytes or free_bytes_of)(device)
        _check_step(config, memory, free)
        if wanted is None:
            share = min(int(free * config.memory_fraction), free - memory.step_bytes)
            share -= memory.fixed_bytes
            wanted = max(share, 0) // memory.token_bytes
            wanted = min(wanted, _MOST_TOKENS_ON_CPU) if is_lazy else wanted
            _check_room(config, memory, free, wanted)
        elif wanted * memory.token_bytes + memory.fixed_bytes + memory.step_bytes > free:
            asked = f"{wanted} tokens are asked for"
            raise ConfigError(_refusal(memory, free, asked, "lower kv_tokens"))
    if wanted < config.block_size:
        raise ConfigError(
            f"the KV cache would hold {wanted} tokens at {memory.token_bytes} bytes each, less "
            f"than one block of {config.block_size}; raise kv_tokens or memory_fraction"
        )
    return -(-wanted // config.block_size) + 1


def _check_step(config: EngineConfig, memory: Memory, free: int) -> None:
    left = free - memory.step_bytes - memory.fixed_bytes
    if memory.step_bytes and left < config.block_size * memory.token_bytes:
        remedy = "lower max_batch_size, max_draft_tokens or max_prefill_tokens"
        raise ConfigError(_refusal(memory, free, "they leave nothing for it", remedy))


def _check_room(config: EngineConfig, memory: Memory, free: int, tokens: int) -> None:
    has_more = len(memory.per_token) > 1 or memory.fixed
    if has_more and tokens < config.block_size:
        share = f"memory_fraction {config.memory_fraction} of that holds {tokens} tokens"
        raise ConfigError(_refusal(memory, free, share, "raise memory_fraction"))


def _refusal(memory: Memory, free: int, asked: str, remedy: str) -> str:
    """What does not fit, with the numbers; what stands beside the target may be left out."""
    others = " and ".join(dict.fromkeys([*list(memory.per_token)[1:], *memory.fixed]))
    once = f"; once {_listed(memory.fixed)}" if memory.fixed else ""
    once += f"; in a step {memory.step_bytes}" if memory.step_bytes else ""
    or_leave_out = f", or leave out {others}" if others else ""
    return (
        f"the KV cache does not fit: bytes per token {_listed(memory.per_token)}{once}; {free} "
        f"bytes are free; {asked}; {remedy}{or_leave_out}"
    )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def free_bytes_of(device: torch.device) -> int:
    """Bytes that a cache could take on `device` now.

    On CUDA, what torch keeps unused is given back first; what it keeps for graphs stays theirs.
    """
    if device.type == "cuda":
        give_back_unused()
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
