"""Seconds of short work on a device: many calls at once, captured in a graph where that works.

Knows the device; nothing of what is called.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.bench import Bench
from sdcontrol.engine.graph_recorder import CudaRecorder, recording_errors

__all__ = ["CallSeconds", "seconds_per_call"]

_CALLS = 16  # in one timing, at least: a launch of the graph is spread over them


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """Of one call, once per repeat; whether the host took part."""

    seconds: tuple[float, ...]
    is_graph: bool


def seconds_per_call(
    bench: Bench, call: Callable[[int], object], copies: int, *, repeats: int
) -> CallSeconds:
    """`call(i)` does the work on copy `i` of its inputs; copies take turns."""
    calls = max(_CALLS // copies, 1) * copies

    def work() -> None:
        for index in range(calls):
            call(index % copies)

    work()  # compiles
    bench.wait()
    replay = _captured(bench, work) if bench.is_cuda else None
    run = replay or work
    run()
    bench.wait()
    seconds = tuple(_seconds(bench, run) / calls for _ in range(repeats))
    return CallSeconds(seconds, replay is not None)


def _captured(bench: Bench, work: Callable[[], None]) -> Callable[[], None] | None:
    """One graph of all calls; None where they cannot be captured, which hurts nothing else."""
    try:
        return CudaRecorder(bench.device).capture(work)
    except recording_errors():
        bench.wait()
        return None


def _seconds(bench: Bench, run: Callable[[], None]) -> float:
    """By events on a device, which is busy already when the first is recorded: launches take no time."""
    if not bench.is_cuda:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
