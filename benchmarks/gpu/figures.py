"""What a cell of a part gives: figures, with the target beside each, and how a cell was left out.

Knows numbers and names only.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "OUT_OF_TIME",
    "CellFigures",
    "Figure",
    "Result",
    "Spread",
    "block_facts",
    "failed",
    "failures",
    "fuller",
    "is_cut",
    "judged",
    "spread",
]

OUT_OF_TIME = "out of time"
"""A fact: nobody tried, since the part's time was over."""

_FAILED = "failed: "

Result = dict[str, object]
"""A cell as it is written to the results file."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and the range from the tenth to the ninetieth percentile."""

    median: float
    p10: float
    p90: float


def spread(values: Sequence[float]) -> Spread:
    """Of one value or more; percentiles are of the nearest rank."""
    ranked = sorted(values)
    last = len(ranked) - 1
    return Spread(statistics.median(ranked), ranked[round(0.1 * last)], ranked[round(0.9 * last)])


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, and the target that it is held against, if there is one."""

    name: str
    value: float
    unit: str = ""
    target: float | None = None
    is_ceiling: bool = False  # the target is the most allowed, not the least
    p10: float | None = None
    p90: float | None = None

    @staticmethod
    def of(
        name: str,
        values: Sequence[float],
        unit: str = "",
        *,
        target: float | None = None,
        is_ceiling: bool = False,
    ) -> "Figure":
        """The median of `values`, with their spread."""
        seen = spread(values)
        return Figure(name, seen.median, unit, target, is_ceiling, seen.p10, seen.p90)

    @property
    def is_met(self) -> bool:
        """Whether the target, if there is one, is reached."""
        if self.target is None:
            return True
        if not math.isfinite(self.value):
            return False
        return self.value <= self.target if self.is_ceiling else self.value >= self.target

    def to_dict(self) -> Result:
        """For JSON."""
        found: Result = {"name": self.name, "value": _rounded(self.value), "unit": self.unit}
        if self.target is not None:
            found |= {"target": self.target, "is_ceiling": self.is_ceiling, "is_met": self.is_met}
        if self.p10 is not None and self.p90 is not None:
            found |= {"p10": _rounded(self.p10), "p90": _rounded(self.p90)}
        return found


@dataclass(frozen=True, slots=True)
class CellFigures:
    """The figures of a cell, and facts that explain them."""

    figures: tuple[Figure, ...]
    facts: Mapping[str, object] = field(default_factory=dict)


def judged(figure: Mapping[str, object]) -> str:
    """A written figure's target and verdict in words; empty where it has no target."""
    if "target" not in figure:
        return ""
    bound = "at most" if figure["is_ceiling"] else "at least"
    return f"{bound} {figure['target']:g}: {'met' if figure['is_met'] else 'MISSED'}"


def _rounded(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")


def failed(error: Exception) -> str:
    """A fact: why there is no figure of a rival."""
    return f"{_FAILED}{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def failures(result: Result) -> dict[str, str]:
    """By rival of a cell that was measured, why it could not be."""
    facts = _facts(result).items()
    return {name: str(fact) for name, fact in facts if str(fact).startswith(_FAILED)}


def block_facts(counted: int, wanted: int) -> Result:
    """Facts: how many blocks of turns a cell's ratios are of, and whether time cut it short."""
    facts: Result = {"counted_blocks": counted}
    return facts | ({"further_blocks": OUT_OF_TIME} if counted < wanted else {})


def is_cut(result: Result) -> bool:
    """Whether a cell was measured in part, until the time was over."""
    return OUT_OF_TIME in _facts(result).values()


def fuller(earlier: Result | None, result: Result) -> Result:
    """The later of two measurements of a cell, unless both were cut, and it has fewer blocks."""
    if earlier is None or not (is_cut(earlier) and is_cut(result)):
        return result
    blocks, before = (_facts(each).get("counted_blocks", 0) for each in (result, earlier))
    assert isinstance(blocks, int)
    assert isinstance(before, int)
    return earlier if blocks < before else result


def _facts(result: Result) -> Mapping[str, object]:
    facts = result.get("facts", {})
    assert isinstance(facts, Mapping)
    return facts
