"""What was measured, as one JSON file and a table in Markdown; earlier cells are kept.

Knows files and written results; nothing of engines.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.figures import Result, failures, is_cut, judged
from benchmarks.gpu.part import Part
from benchmarks.measuring import write_results

__all__ = ["Report", "markdown", "missing", "verdict"]

_COMMAND = "python -m benchmarks.gpu"
_SMALL = "cpu, small scale"


class Report:
    """The results of one device, by part and cell; written after every cell."""

    def __init__(self, folder: Path, device_name: str, parts: Sequence[Part]) -> None:
        plain = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
        self._name = f"gpu-{plain}"
        self._folder = folder
        self._parts = parts
        self._results = {_key(result): result for result in _earlier(self.path)}

    @property
    def path(self) -> Path:
        """Of the JSON file."""
        return self._folder / f"{self._name}.json"

    @property
    def results(self) -> list[Result]:
        """In the order of parts; inside a part, as measured."""
        return sorted(self._results.values(), key=lambda result: int(str(result["part"])))

    def result_of(self, part: int, cell: str) -> Result | None:
        """What is written of the cell; None where it was never begun."""
        return self._results.get((part, cell))

    def is_open(self, part: int, cell: str, *, skip: str | None = None) -> bool:
        """Whether the cell was never tried, was left out and is not to be any more (`skip` is why), or
        ran out of time; one that failed is not open.
        """
        result = self.result_of(part, cell)
        if result is None:
            return True
        if "skipped" in result:
            return skip is None
        return is_cut(result) and "failed" not in result

    def failed(self, part: int) -> frozenset[str]:
        """The cells of a part that failed, or were begun and never ended."""
        return frozenset(
            cell
            for (number, cell), result in self._results.items()
            if number == part and "failed" in result
        )

    def forget(self, part: int) -> None:
        """Drop a part's earlier cells: it is measured anew."""
        self._results = {key: r for key, r in self._results.items() if key[0] != part}

    def add(self, result: Result) -> None:
        """Keep and write a cell."""
        self._results[_key(result)] = result
        write_results(self._name, _COMMAND, self.results, folder=self._folder)
        table = markdown(self.results, self._parts)
        self.path.with_suffix(".md").write_text(table, encoding="utf-8")


def markdown(results: Sequence[Result], parts: Sequence[Part]) -> str:
    """A table per part: a row per figure, with the target beside it and misses marked."""
    lines = []
    scales = sorted({str(result["scale"]) for result in results})
    lines.append(f"# The engine on a GPU ({', '.join(scales)})\n")
    for part in parts:
        own = [result for result in results if result["part"] == part.number]
        if own:
            lines += [f"## {part.number}. {part.title}\n", *_table(own), ""]
    lines += missing(results, parts)
    return "\n".join(lines) + "\n"


def missing(results: Sequence[Result], parts: Sequence[Part]) -> list[str]:
    """The figures that are still to be measured on a GPU, part by part."""
    full = {result["part"] for result in results if result["scale"] != _SMALL}
    lines = [
        f"- part {part.number}: {figure}"
        for part in parts
        if part.number not in full
        for figure in part.only_on_a_gpu
    ]
    return ["Not measured on a GPU yet:\n", *lines] if lines else []


def verdict(result: Result, figure: Mapping[str, object]) -> str:
    """A figure's target, and whether it is met; small scale is judged in part 0 only."""
    words = judged(figure)
    if result["scale"] != _SMALL or result["part"] == 0:
        return words
    return words.partition(":")[0] + " (not judged)" if words else ""


def _table(results: Sequence[Result]) -> list[str]:
    rows = [["cell", "figure", "median", "p10 to p90", "target"], ["---"] * 5]
    for result in results:
        rows += _rows(result)
    return ["| " + " | ".join(row) + " |" for row in rows]


def _rows(result: Result) -> list[list[str]]:
    name = str(result["name"])
    for outcome in ("skipped", "failed"):
        if outcome in result and "figures" not in result:  # figures of an earlier run stay
            return [[name, outcome, "", "", str(result[outcome]).replace("|", "/")]]
    figures = result["figures"]
    assert isinstance(figures, list)
    rows = [
        [name if index == 0 else "", str(figure["name"]), _number(figure), _range(figure),
         verdict(result, figure)]
        for index, figure in enumerate(figures)
    ]  # fmt: skip
    rivals = failures(result).items()
    return rows + [["", rival, "", "", why.replace("|", "/")] for rival, why in rivals]


def _number(figure: Mapping[str, object]) -> str:
    return f"{figure['value']:.4g} {figure['unit']}".strip()


def _range(figure: Mapping[str, object]) -> str:
    return f"{figure['p10']:.4g} to {figure['p90']:.4g}" if "p10" in figure else ""


def _earlier(path: Path) -> list[Result]:
    if not path.exists():
        return []
    results: list[Result] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return results


def _key(result: Result) -> tuple[int, str]:
    return int(str(result["part"])), str(result["name"])
