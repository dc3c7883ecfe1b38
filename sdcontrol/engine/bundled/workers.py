"""Several processes that train one model together, as `torchrun` starts them.

Every worker has its own data and the same weights: gradients are averaged in every step.
In a process that was started alone, every function here is trivial.
"""

from __future__ import annotations

import os

import torch
from torch import distributed, nn


def join() -> None:
    """Meet the other workers, if there are any."""
    if count() > 1 and not distributed.is_initialized():
        distributed.init_process_group("gloo")


def count() -> int:
    """How many workers there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def number() -> int:
    """Which worker this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def part(rows: int) -> int:
    """This worker's part of the rows of a batch, at least one."""
    return max(1, rows // count())


def is_first() -> bool:
    """Whether this worker is the one that reports and writes."""
    return number() == 0


def agreed(value: float) -> float:
    """The largest of the workers' values, so that all take the same decision."""
    if count() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(shared, distributed.ReduceOp.MAX)
    return float(shared)


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the workers."""
    if count() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    parts = (flat / count()).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
