"""How fast a device copies and multiplies.

Knows torch; nothing of models, rooflines or files.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from sdcontrol.engine.clock import marks_of

__all__ = ["Ceilings", "ceilings_of", "measure_ceilings", "seconds_of", "to_measure"]

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that a device was seen to do."""

    flops_per_second: float  # multiplying square matrices of the dtype
    bytes_per_second: float  # read and written, copying
    memory_bytes: float


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, scale: int = 1) -> Ceilings:
    """The best of a few tries; about a second, and 2.5 GB of a GPU's memory.

    `scale` divides the bytes that are copied, and the side of the matrices by its root.
    """
    is_gpu = device.type == "cuda"
    side, num_bytes = (8192, 1 << 30) if is_gpu else (1024, 1 << 27)
    side, num_bytes = side // int(scale**0.5), num_bytes // scale
    # Random, as weights are: ones take less power, for a rate that no model reaches.
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    left = torch.randn((side, side), device=device).to(dtype)
    product = torch.empty_like(left)

    def best_of(work: Callable[[], object]) -> float:
        return min(_busy_seconds(work, device) for _ in range(_TRIES + 1))

    copying = best_of(lambda: copy.copy_(source))
    multiplying = best_of(lambda: torch.mm(left, left, out=product))
    return Ceilings(2.0 * side**3 / multiplying, 2.0 * num_bytes / copying, _memory_bytes(device))


@cache
def ceilings_of(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The same once per process, by less work: engines hold most of the memory by then."""
    found = measure_ceilings(device, dtype, scale=4)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was copied is not wanted again, and there is little left
    return found


def to_measure(device: torch.device, dtype: torch.dtype) -> Callable[[], Ceilings] | None:
    """Measures them when it is called; None for a CPU, of whose steps they say too little to start from."""
    return partial(ceilings_of, device, dtype) if device.type == "cuda" else None


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """What `work` takes by the host's clock, until the device has done it."""
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def _busy_seconds(work: Callable[[], object], device: torch.device) -> float:
    """By the device's own clock, where it has one: neither the launch nor the wait is in it."""
    marks = marks_of(device)
    if marks is None:
        return seconds_of(work, device)
    work()  # what follows is asked for while the device is busy with it
    marks.add()
    work()
    marks.add()
    return marks.seconds()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
