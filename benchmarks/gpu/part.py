"""A part of the benchmark: cells that are measured one after the other.

Knows no engine. A cell that does not fit in memory says so instead of running.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gpu.figures import CellFigures

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench

__all__ = ["Cell", "Part"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. `skip` says why it cannot be made here."""

    name: str
    measure: Callable[[], CellFigures]
    skip: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Several cells that share what they need."""

    number: int
    title: str
    cells: "Callable[[Bench], list[Cell]]"
    minutes: float = 1.0  # that it takes on a GPU, about: its share where time is short
    only_on_a_gpu: tuple[str, ...] = ()  # figures that a run on a CPU does not give
