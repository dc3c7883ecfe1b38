"""Part 4: plain decoding against transformers on the same device, in the same run, the same model.

Rivals prefill their prompts (`rivals`); ours decodes from contexts in place, anew beside each rival.
"""

import statistics
from functools import partial

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoder import Decoder, DecoderSpec, kv_tokens_for
from benchmarks.gpu.figures import CellFigures, Figure
from benchmarks.gpu.part import Cell, Part
from benchmarks.gpu.rivals import (
    BATCHED,
    BATCHED_COMPILED,
    COMPILED_LOOP,
    DYNAMIC,
    STATIC,
    Rival,
    attention_used,
)
from benchmarks.regret.rig import Arm
from sdcontrol.engine.verify import CoupledVerifier

__all__ = ["PART"]

_VERIFIER = CoupledVerifier()
_TO_GENERATE = 2.0  # at batch 32
_TO_COMPILED = 1.0  # at batch 1
_RIVAL_COPIES = 3  # of KV, with the rivals' caches


def cells(bench: Bench) -> list[Cell]:
    """One per batch, context and rival, so that none costs another; what takes longest comes last."""
    loads = [
        (batch, context, rival)
        for batch, context in bench.scale.transformers
        for rival in (DYNAMIC, BATCHED, COMPILED_LOOP, STATIC, BATCHED_COMPILED)
        if batch == 1 or rival is not COMPILED_LOOP
    ]
    return [
        Cell(
            f"batch {batch}, context {context}, {rival.name}",
            partial(_measure, bench, batch, context, rival),
            bench.need(_RIVAL_COPIES * _kv_tokens(bench, batch, context)),
            "on CUDA only" if rival.is_cuda_only and not bench.is_cuda else None,
            seconds=rival.seconds,
        )
        for batch, context, rival in sorted(loads, key=lambda load: _rank(load[0], load[2]))
    ]


PART = Part(
    4,
    "plain decoding against transformers",
    cells,
    minutes=8.0,  # most of it compiles
    only_on_a_gpu=(
        "over generate and generate_batch at batch 32, target 2.0",
        "over a decode loop under torch.compile with CUDA graphs at batch 1, target 1.0",
    ),
)


def _rank(batch: int, rival: Rival) -> int:
    """What has a target first, by how soon it is there."""
    first = [(True, DYNAMIC), (True, BATCHED), (False, COMPILED_LOOP), (True, STATIC)]
    if (batch > 1, rival) in first:
        return first.index((batch > 1, rival))
    return len(first) + (rival is BATCHED_COMPILED)


def _measure(bench: Bench, batch: int, context: int, rival: Rival) -> CellFigures:
    if bench.is_cuda:
        torch.compiler.reset()  # what was compiled for other shapes would be made dynamic
    decoder = _open(bench, batch, context)
    ours = _ours(bench, decoder)
    with attention_used(bench.target()) as names:
        theirs = rival.rates(bench, batch, context)
    attention = names[:2][-1]
    ratio = statistics.median(ours) / statistics.median(theirs)
    return CellFigures(
        (
            Figure.of("ours: tokens per second", ours),
            Figure.of(f"{rival.name} ({attention}): tokens per second", theirs),
            Figure(f"ours over {rival.name}", ratio, "x", _target(rival, batch)),
        ),
        {"attention": attention, "graphs": decoder.graph_facts()},
    )


def _target(rival: Rival, batch: int) -> float | None:
    if rival is COMPILED_LOOP:
        return _TO_COMPILED
    return _TO_GENERATE if batch > 1 else None


def _open(bench: Bench, batch: int, context: int) -> Decoder:
    room = bench.scale.steps + 16
    spec = DecoderSpec((), _VERIFIER, _kv_tokens(bench, batch, context), batch, room)
    decoder = bench.decoder(spec)
    decoder.prepare(batch, context)
    return decoder


def _ours(bench: Bench, decoder: Decoder) -> list[float]:
    """Tokens per second of each turn."""
    arm = Arm("off", "off")
    decoder.turn(arm, steps=2)
    return [decoder.turn(arm, steps=bench.scale.steps).rate for _ in range(bench.scale.blocks)]


def _kv_tokens(bench: Bench, batch: int, context: int) -> int:
    return kv_tokens_for(batch, context, bench.scale.steps + 16)
