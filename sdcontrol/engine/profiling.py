"""What a model's forwards take on this machine, and what machine that is.

Knows torch and models; nothing of rooflines, calibration or files. Contexts are filled directly: a
forward reads as many keys and values as after a real prompt, but nobody computed them.
"""

import itertools
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from sdcontrol.engine.backends import device_scope
from sdcontrol.engine.ceilings import seconds_of
from sdcontrol.engine.config import EngineConfig, Memory, cache_blocks
from sdcontrol.engine.graphs import attach_graphs
from sdcontrol.engine.packing import PageTable, Segment
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.stats import GraphStats
from sdcontrol.errors import ConfigError

__all__ = [
    "StepMeasurement",
    "StepShape",
    "describe_machine",
    "measure_steps",
    "step_shapes",
]

_BLOCK_SIZE = 16
_MOST_DRAFT_TOKENS = 64  # longer steps are prefill, without graphs
_KV_SPREAD = 0.05  # of keys and values made up; nothing depends on it


@dataclass(frozen=True, slots=True)
class StepShape:
    """One kind of forward: every request alike."""

    batch_size: int
    tokens_per_request: int
    context_tokens: int  # keys that a request's first token sees, itself included

    @property
    def slots_per_request(self) -> int:
        """KV slots that a request needs, in whole blocks."""
        return -(-(self.context_tokens - 1 + self.tokens_per_request) // _BLOCK_SIZE) * _BLOCK_SIZE

    @property
    def num_slots(self) -> int:
        """KV slots that all requests need."""
        return self.batch_size * self.slots_per_request


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """What a forward took: the median of the repeats."""

    shape: StepShape
    seconds: float


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """What to write beside measurements, so that somebody knows later what they were."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": name,
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def step_shapes(
    model: PreTrainedModel,
    *,
    batch_sizes: Sequence[int],
    tokens_per_request: Sequence[int],
    context_tokens: Sequence[int],
) -> list[StepShape]:
    """Every combination that the model's positions and the free memory allow.

    Raises `ConfigError` where none does.
    """
    runner = ModelRunner(model)
    memory = Memory({"model": runner.bytes_per_token})
    slots = cache_blocks(EngineConfig(), memory, runner.device) * _BLOCK_SIZE
    positions = int(
        getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 62
    )
    grid = itertools.product(batch_sizes, context_tokens, tokens_per_request)
    shapes = [StepShape(batch, tokens, context) for batch, context, tokens in grid]
    fitting = [
        shape
        for shape in shapes
        if shape.num_slots < slots - _BLOCK_SIZE
        and shape.context_tokens + shape.tokens_per_request <= positions
    ]
    if not fitting:
        raise ConfigError(
            f"none of {len(shapes)} combinations fits {slots} tokens of KV cache and {positions} "
            "positions; give a smaller batch or a shorter context"
        )
    return fitting


def measure_steps(
    model: PreTrainedModel,
    shapes: Sequence[StepShape],
    *,
    rounds: int = 5,
    most_seconds: float = math.inf,
    seed: int = 0,
    on_measured: Callable[[], None] = lambda: None,
) -> list[StepMeasurement]:
    """What a forward of each shape takes; `on_measured` is called after every forward.

    All shapes take turns in random order, so that a machine that slows down meanwhile slows all of
    them; a first round is not counted. After `most_seconds` no further round begins, but one is
    counted in any case.
    """
    ends = time.perf_counter() + most_seconds
    runner = ModelRunner(model)
    blocks = max(shape.num_slots for shape in shapes) // _BLOCK_SIZE + 1
    runner.allocate(blocks, _BLOCK_SIZE)
    attach_graphs(runner, _config_for(shapes), GraphStats())  # captured in the first round
    _fill(runner)
    order = random.Random(seed)
    seconds: dict[StepShape, list[float]] = {shape: [] for shape in shapes}
    try:
        for turn in range(rounds + 1):
            if turn > 1 and time.perf_counter() > ends:
                break
            for shape in order.sample(list(shapes), len(shapes)):
                took = _forward_seconds(runner, shape)
                if turn:
                    seconds[shape].append(took)
                on_measured()
    finally:
        runner.release()
    return [StepMeasurement(shape, statistics.median(took)) for shape, took in seconds.items()]


def _config_for(shapes: Sequence[StepShape]) -> EngineConfig:
    """An engine that would decode these, so that its graphs are those that are measured."""
    most_tokens = max(shape.tokens_per_request for shape in shapes)
    return EngineConfig(
        block_size=_BLOCK_SIZE,
        max_batch_size=max(shape.batch_size for shape in shapes),
        max_draft_tokens=min(max(most_tokens - 1, 1), _MOST_DRAFT_TOKENS),
    )


def _forward_seconds(runner: ModelRunner, shape: StepShape) -> float:
    segments = [_segment(shape, row) for row in range(shape.batch_size)]
    with device_scope(runner.device):
        return seconds_of(lambda: runner.forward(segments), runner.device)


def _segment(shape: StepShape, row: int) -> Segment:
    """Block 0 is the null block; a request's blocks are consecutive, as those of the engine are."""
    num_blocks = shape.slots_per_request // _BLOCK_SIZE
    blocks = 1 + row * num_blocks + np.arange(num_blocks, dtype=np.int64)
    start, tokens = shape.context_tokens - 1, shape.tokens_per_request
    first_slot = int(blocks[0]) * _BLOCK_SIZE + start
    return Segment(
        tokens=[1 + index % 2 for index in range(tokens)],
        start=start,
        table=PageTable(blocks),
        slots=range(first_slot, first_slot + tokens),
        num_logits=tokens,
    )


def _fill(runner: ModelRunner) -> None:
    """Write every slot: memory that was never written is not really there, and too fast to read."""
    assert runner.cache is not None
    generator = torch.Generator(runner.device).manual_seed(0)
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.normal_(std=_KV_SPREAD, generator=generator)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
