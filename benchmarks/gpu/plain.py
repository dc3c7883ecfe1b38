"""Part 1: a plain decode step against what reading weights and KV costs at least.

Some once more without layers compiled, as an engine is by default.
"""

from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoder import DecoderSpec, Turn, kv_tokens_for
from benchmarks.gpu.figures import CellFigures, Figure
from benchmarks.gpu.floors import Load, floor_seconds
from benchmarks.gpu.part import Cell, Part
from benchmarks.regret.rig import Arm
from sdcontrol.engine.verify import CoupledVerifier, Verifier

__all__ = ["PART", "target_ratio"]

_VERIFIER: Verifier = CoupledVerifier()
_ROOM_PER_STEP = 1
_LARGE_BATCH = 64  # beyond it the target is a looser one


def target_ratio(batch_size: int) -> float:
    """The most that a step may take, in floors."""
    return 1.30 if batch_size <= _LARGE_BATCH else 1.50


def cells(bench: Bench) -> list[Cell]:
    """One per batch and context."""
    compiled = [
        Cell(
            f"batch {batch}, context {context}",
            partial(_measure, bench, batch, context),
            bench.need(_kv_tokens(bench, batch, context)),
            seconds=15.0,
        )
        for batch, context in bench.scale.plain
    ]
    uncompiled = [
        Cell(
            f"batch {batch}, context {context}, layers not compiled",
            partial(_measure, bench, batch, context, compiles=False),
            bench.need(_kv_tokens(bench, batch, context)),
            None if bench.is_cuda else "compiled on CUDA",
            seconds=15.0,
        )
        for batch, context in bench.scale.uncompiled
    ]
    return compiled + uncompiled


PART = Part(
    1,
    "plain decode step against the floor",
    cells,
    minutes=4.0,
    only_on_a_gpu=("step time in floors, target 1.30 to batch 64 and 1.50 beyond",),
)


def _measure(bench: Bench, batch: int, context: int, *, compiles: bool = True) -> CellFigures:
    scale, room = bench.scale, _room(bench)
    kv_tokens = _kv_tokens(bench, batch, context)
    spec = DecoderSpec((), _VERIFIER, kv_tokens, batch, room, compiles=compiles)
    decoder = bench.decoder(spec)
    decoder.prepare(batch, context)
    arm = Arm("off", "off")
    decoder.turn(arm, steps=2)  # warm: compilation, capture
    turns = [decoder.turn(arm, steps=scale.steps) for _ in range(scale.blocks)]
    floor = floor_seconds(scale.target, Load(batch, context + 1), bench.rates)
    steps = _step_seconds(turns)
    return CellFigures(
        (
            Figure.of(
                "step / floor",
                [seconds / floor for seconds in steps],
                "x",
                target=target_ratio(batch),
                is_ceiling=True,
            ),
            Figure.of("step", [1e3 * seconds for seconds in steps], "ms"),
            Figure("floor", 1e3 * floor, "ms"),
            Figure.of("tokens per second", [turn.rate for turn in turns]),
        ),
        {"graphs": decoder.graph_facts(), "steps_launched_ahead": arm.share_ahead},
    )


def _step_seconds(turns: list[Turn]) -> list[float]:
    return [seconds for turn in turns for seconds in turn.step_seconds]


def _room(bench: Bench) -> int:
    return (bench.scale.steps + 16) * _ROOM_PER_STEP


def _kv_tokens(bench: Bench, batch: int, context: int) -> int:
    return kv_tokens_for(batch, context, _room(bench))
