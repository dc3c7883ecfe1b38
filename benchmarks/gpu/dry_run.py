"""What a run would measure on a GPU of some size: every cell, its memory, and what is left out.

Arithmetic alone: needs no GPU, makes no model, measures nothing. Knows parts and cells.
"""

from collections.abc import Sequence

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.part import Cell, Part
from benchmarks.gpu.scale import FULL

__all__ = ["GIB", "bench_of", "described"]

GIB = float(1 << 30)
_GB = 1e9


def bench_of(memory_gib: float) -> Bench:
    """The full scale on a GPU that need not be there, with so much memory free."""
    return Bench(FULL, torch.device("cuda"), memory_gib * GIB)


def described(parts: Sequence[Part], bench: Bench, total_minutes: float) -> list[str]:
    """A line per part, and one per cell below it."""
    minutes = sum(part.minutes for part in parts)
    lines = [f"{bench.free_bytes / _GB:.1f} GB usable, {total_minutes:g} minutes in all"]
    for part in parts:
        cells = part.cells(bench)
        fitting = sum(cell.skip is None for cell in cells)
        share = part.minutes / minutes * total_minutes
        lines.append(
            f"part {part.number}: {part.title}; {share:.1f} minutes, {fitting} of {len(cells)} "
            "cells fit"
        )
        lines += [f"  {_described(cell)}" for cell in cells]
    return lines


def _described(cell: Cell) -> str:
    if cell.skip:
        return f"{cell.name}: skipped: {cell.skip}"
    return f"{cell.name}: {cell.need.num_bytes / _GB:.1f} GB" if cell.need else cell.name
