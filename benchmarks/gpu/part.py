"""A part of the benchmark: cells that are measured one after the other.

Knows no engine. A cell that does not fit in memory says so instead of running.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gpu.figures import CellFigures
from benchmarks.gpu.floors import Need

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench

__all__ = ["Cell", "Part"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement, what memory it needs, and why it has no place here, if it has none.

    It begins only where `seconds` are left: what it takes on a GPU at least, about, alone.
    """

    name: str
    measure: Callable[[], CellFigures]
    need: Need | None = None
    out_of_place: str | None = None
    seconds: float = 1.0

    @property
    def skip(self) -> str | None:
        """Why it cannot be made here; None where it can."""
        return self.out_of_place or (self.need.lack if self.need else None)


@dataclass(frozen=True, slots=True)
class Part:
    """Several cells that share what they need."""

    number: int
    title: str
    cells: "Callable[[Bench], list[Cell]]"
    minutes: float = 1.0  # that it takes on a GPU, about: its share where time is short
    only_on_a_gpu: tuple[str, ...] = ()  # figures that a run on a CPU does not give
