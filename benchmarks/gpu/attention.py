"""Part 3: decode attention alone, as a share of copy bandwidth, beside others' kernels.

Each kernel gets the layout that it likes best, contiguous where it wants that. Calls walk through
enough copies of the KV that no cache of the device holds it.
"""

import math
from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.figures import OUT_OF_TIME, CellFigures, Figure, failed
from benchmarks.gpu.floors import Load, Need, attention_bytes
from benchmarks.gpu.kernels import KERNELS, Call, DecodeInputs
from benchmarks.gpu.part import Cell, Part
from benchmarks.gpu.timing import seconds_per_call

__all__ = ["PART"]

_SHARE = 0.85  # of copy bandwidth
_LEAST_BYTES = 1e9  # of KV, over all copies; ten times the largest cache
_COPIES_HELD = 3  # ours, contiguous, and another library's pages
_REPEATS = 7


def cells(bench: Bench) -> list[Cell]:
    """One per batch and context."""
    return [
        Cell(
            f"batch {batch}, context {context}",
            partial(_measure, bench, batch, context),
            _need(bench, batch, context),
            seconds=20.0,
        )
        for batch, context in bench.scale.attention
    ]


PART = Part(
    3,
    "attention alone, share of copy bandwidth",
    cells,
    minutes=2.0,
    only_on_a_gpu=(
        "share of copy bandwidth, target 0.85, beside scaled_dot_product_attention, FlexAttention "
        "and FlashInfer",
    ),
)


def _measure(bench: Bench, batch: int, context: int) -> CellFigures:
    load = Load(batch, context)
    read = attention_bytes(bench.scale.target, load)
    inputs = DecodeInputs(bench.scale.target, load, _copies(bench, read), bench.dtype, bench.device)
    figures: list[Figure] = []
    facts: dict[str, object] = {"copies": inputs.copies, "megabytes_per_call": round(read / 1e6, 1)}
    for name, make in KERNELS.items():
        if bench.budget.left < 0:
            facts[name] = OUT_OF_TIME
            continue
        try:
            call: Call | None = make(inputs)
            if call is None:
                facts[name] = "not available here"
                continue
            seen = seconds_per_call(bench, call, inputs.copies, repeats=_REPEATS)
        except Exception as error:  # another library's, on a device that it may not know
            if not bench.is_usable:
                raise  # nothing that comes after it could be measured
            facts[name] = failed(error)
            continue
        shares = [read / seconds / bench.rates.bytes_per_second for seconds in seen.seconds]
        target = _SHARE if name == "ours" else None
        figures.append(Figure.of(f"{name}: share of copy bandwidth", shares, "", target=target))
        facts[name] = "graph" if seen.is_graph else "eager"
    return CellFigures(tuple(figures), facts)


def _copies(bench: Bench, read: float) -> int:
    return 1 if bench.scale.is_small else max(1, math.ceil(_LEAST_BYTES / read))


def _need(bench: Bench, batch: int, context: int) -> Need:
    read = attention_bytes(bench.scale.target, Load(batch, context))
    held = _COPIES_HELD * _copies(bench, read) * read
    return Need({"KV of one layer, in copies": held}, bench.free_bytes)
