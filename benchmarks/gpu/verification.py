"""Part 2: verifying 1 to 16 tokens per request, all alike or ragged with the same total.

Drafts cost nothing and none is accepted, so that a step is a verification and nothing grows.
"""

import statistics
from collections.abc import Sequence
from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoder import Decoder, DecoderSpec, kv_tokens_for
from benchmarks.gpu.figures import CellFigures, Figure
from benchmarks.gpu.floors import Load, floor_seconds
from benchmarks.gpu.part import Cell, Part
from benchmarks.regret.rig import Arm
from sdcontrol.core import BatchView, Choice, Confidence, Observation, Plan
from sdcontrol.engine.drafters.base import Draft, Drafter, DraftTask, KeepDrafting
from sdcontrol.engine.verify import build_verifier

__all__ = ["PART", "GivenLengths", "RepeatLast", "ragged_lengths"]

_VERIFIER = build_verifier("synthetic", rates=0.0)
_DRAFTER = "repeat_last"
_LARGEST = 16  # tokens of one request
_RAGGED_TARGET = 1.05


class RepeatLast(Drafter):
    """Drafts at once, and as much as asked for."""

    name = _DRAFTER

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> list[Draft]:
        """The last token again and again."""
        return [Draft.chain([t.request.tokens[-1]] * t.num_draft_tokens) for t in tasks]


class GivenLengths:
    """A planner: request `r` drafts `lengths[r]` tokens, step by step."""

    drafts = True
    learns = False

    def __init__(self, lengths: Sequence[int]) -> None:
        self.choices = [Choice(_DRAFTER, n) if n else Choice.off() for n in lengths]

    def plan(self, view: BatchView) -> Plan:
        """As given; nobody decides."""
        return Plan(tuple(self.choices[: len(view.requests)]))

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """The plan."""
        return plan

    def observe(self, observation: Observation) -> None:
        """Learn nothing."""


_ARM_DRAFTER = RepeatLast()


def ragged_lengths(batch_size: int, mean: int) -> tuple[int, ...]:
    """Tokens per request, 1 to 16, as different as can be with this mean; pairs make the mean."""
    most = min(2 * mean - 1, _LARGEST)
    least = 2 * mean - most
    span = most - least + 1
    lengths: list[int] = []
    for pair in range(batch_size // 2):
        high = most - (pair * 5) % span
        lengths += [high, 2 * mean - high]
    return tuple(lengths + [mean] * (batch_size % 2))


def cells(bench: Bench) -> list[Cell]:
    """One per batch, context and mean number of tokens."""
    return [
        Cell(
            f"batch {batch}, context {context}, {mean} tokens each",
            partial(_measure, bench, batch, context, mean),
            bench.need(_kv_tokens(bench, batch, context)),
            seconds=10.0,
        )
        for batch, context in bench.scale.verification
        for mean in bench.scale.tokens_per_request
    ]


PART = Part(
    2,
    "verification, uniform and ragged",
    cells,
    minutes=4.0,
    only_on_a_gpu=("ragged over uniform, target at most 1.05",),
)


def _measure(bench: Bench, batch: int, context: int, mean: int) -> CellFigures:
    scale = bench.scale
    spec = DecoderSpec(
        (), _VERIFIER, _kv_tokens(bench, batch, context), batch, _room(bench), (_ARM_DRAFTER,)
    )
    decoder = bench.decoder(spec)
    decoder.prepare(batch, context)
    shapes = {"uniform": (mean,) * batch, "ragged": ragged_lengths(batch, mean)}
    if shapes["ragged"] == shapes["uniform"]:
        del shapes["ragged"]
    blocks = _take_turns(decoder, shapes, scale.steps, scale.blocks)
    floor = floor_seconds(scale.target, Load(batch, context + 1, mean), bench.rates)
    uniform = blocks["uniform"]
    figures = [
        Figure.of("uniform step", [1e3 * seconds for seconds in uniform], "ms"),
        Figure.of("uniform step / floor", [seconds / floor for seconds in uniform], "x"),
    ]
    if "ragged" in blocks:
        ratios = [ragged / plain for ragged, plain in zip(blocks["ragged"], uniform, strict=True)]
        figures.insert(
            0,
            Figure.of("ragged / uniform", ratios, "x", target=_RAGGED_TARGET, is_ceiling=True),
        )
    facts = {"ragged": list(shapes.get("ragged", ())), "graphs": decoder.graph_facts()}
    return CellFigures(tuple(figures), facts)


def _take_turns(
    decoder: Decoder, shapes: dict[str, tuple[int, ...]], steps: int, blocks: int
) -> dict[str, list[float]]:
    """Median seconds of a step by shape and block; the first block warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in shapes}
    for block in range(blocks + 1):
        names = list(shapes) if block % 2 else list(shapes)[::-1]
        for name in names:
            arm = Arm(name, "off")
            arm.controller = GivenLengths([n - 1 for n in shapes[name]])  # type: ignore[assignment]  # a planner will do
            turn = decoder.turn(arm, steps=steps if block else 2)
            if block:
                seconds[name].append(statistics.median(turn.step_seconds))
    return seconds


def _room(bench: Bench) -> int:
    return bench.scale.steps + 16 + _LARGEST


def _kv_tokens(bench: Bench, batch: int, context: int) -> int:
    return kv_tokens_for(batch, context, _room(bench))
