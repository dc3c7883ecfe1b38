"""Part 7: what the host costs: controller, n-gram drafter, the rest by part; graphs; peak memory."""

import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu.acceptance import MIXES, seeds_of
from benchmarks.gpu.all_drafters import kv_tokens_of, open_decoder
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoder import Decoder, Turn
from benchmarks.gpu.figures import CellFigures, Figure
from benchmarks.gpu.host_parts import HostParts, watched
from benchmarks.gpu.part import Cell, Part
from benchmarks.regret.grid import PhaseSpec
from benchmarks.regret.pairs import prompts_of
from benchmarks.regret.rig import Arm
from benchmarks.regret.scoring import ADAPTIVE, OFF
from sdcontrol.engine.drafters.base import DraftTask
from sdcontrol.engine.drafters.ngram import NgramDrafter

__all__ = ["PART"]

_NGRAM_STEPS = 50
_NGRAM_DRAFT = 4
_WATCHED = {OFF: OFF, "ngram:4": "static:ngram:4", ADAPTIVE: ADAPTIVE}


def cells(bench: Bench) -> list[Cell]:
    """One per batch and context."""
    return [
        Cell(
            f"batch {batch}, context {context}",
            partial(_measure, bench, batch, context),
            bench.need(kv_tokens_of(bench, batch, context), with_draft=True),
            seconds=20.0,
        )
        for batch, context in bench.scale.host
    ]


PART = Part(
    7,
    "controller, n-gram and host time, graphs, memory",
    cells,
    minutes=2.0,
    only_on_a_gpu=("graph capture time and memory", "peak memory of the device"),
)


def _measure(bench: Bench, batch: int, context: int) -> CellFigures:
    decoder = open_decoder(bench, batch, context)
    arm = Arm(ADAPTIVE, ADAPTIVE)
    seeds = seeds_of(MIXES["mixed"], batch, 1)
    if bench.is_cuda:
        torch.cuda.reset_peak_memory_stats(bench.device)
    decoder.turn(arm, steps=bench.scale.steps, seeds=seeds)
    turns = [
        decoder.turn(arm, steps=bench.scale.steps, seeds=seeds) for _ in range(bench.scale.blocks)
    ]
    figures = [
        *_step_figures(turns),
        Figure("n-gram per request", _ngram_seconds(batch, context) * 1e6, "us"),
    ]
    graphs = decoder.graphs
    if bench.is_cuda:
        figures.append(Figure("graph capture", graphs.capture_seconds, "s"))
        left = graphs.reserved_bytes / max(graphs.expected_bytes, 1)
        figures.append(Figure("graph memory, of what the pool leaves for it", left))
        peak = torch.cuda.max_memory_allocated(bench.device)
        figures.append(Figure("peak memory", peak / 1e9, "GB"))
    facts = {
        "graphs": decoder.graph_facts(),
        "host_microseconds": _host_parts(bench, decoder, seeds),
    }
    return CellFigures(tuple(figures), facts)


def _host_parts(bench: Bench, decoder: Decoder, seeds: Sequence[int]) -> dict[str, HostParts]:
    """By arm, the parts of the host's work in a step that is like the others; none is timed meanwhile."""
    found: dict[str, HostParts] = {}
    for name, spec in _WATCHED.items():
        arm, drafters = Arm(name, spec), ("ngram",) if name.startswith("ngram") else True
        decoder.turn(arm, steps=bench.scale.steps, seeds=seeds, speculation=drafters)
        found[name] = {}
        with watched(found[name]):
            decoder.turn(arm, steps=bench.scale.steps, seeds=seeds, speculation=drafters)
    return found


def _step_figures(turns: list[Turn]) -> list[Figure]:
    steps = [1e3 * s for turn in turns for s in turn.step_seconds]
    controller = [1e3 * s for turn in turns for s in turn.controller_seconds]
    host = [1e3 * s for turn in turns for s in turn.host_seconds]
    return [
        Figure.of("step", steps, "ms"),
        Figure.of("controller", controller, "ms"),
        Figure("controller share of time", sum(controller) / sum(steps)),
        Figure.of("host time that the engine counts as overhead", host, "ms"),
    ]


class _Text:
    """What the n-gram drafter sees of a request."""

    def __init__(self, name: str, tokens: tuple[int, ...]) -> None:
        self.id = name
        self.tokens = list(tokens)


def _ngram_seconds(batch: int, context: int) -> float:
    """Of one request and step: take in a token, look up, draft."""
    drafter = NgramDrafter(max_branches=1)
    phase = PhaseSpec("texts", batch, context, "copy")
    texts = [
        _Text(str(row), prompt.tokens)
        for row, prompt in enumerate(prompts_of(phase, is_synthetic=True, seed=1))
    ]
    for text in texts:
        drafter.start(text)
    tasks = [DraftTask(text, drafter.name, _NGRAM_DRAFT) for text in texts]
    started = time.perf_counter()
    for _ in range(_NGRAM_STEPS):
        for text in texts:
            text.tokens.append(text.tokens[-64])
            drafter.commit(text, 1)
            drafter.hint(text, drafter.name)
        drafter.propose(tasks, lambda drafts: [_NGRAM_DRAFT] * len(drafts))
    return (time.perf_counter() - started) / (_NGRAM_STEPS * batch)
