"""Part 5: self-drafting with sparse KV against plain decoding, at the acceptance MagicDec reports.

The bound is what bytes alone allow (`floors.self_drafting_bound`), at the draft length that is best
by it; that length and its neighbours are measured, the best chosen on odd blocks and scored on even.
Speedups are over an engine without drafters, measured just before.
"""

import random
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoder import Decoder, DecoderSpec, kv_tokens_for
from benchmarks.gpu.figures import CellFigures, Figure, block_facts
from benchmarks.gpu.floors import Load, self_drafting_bound
from benchmarks.gpu.part import Cell, Part
from benchmarks.gpu.scale import Scale
from benchmarks.regret.rig import Arm
from benchmarks.regret.scoring import OFF, best_on_odd, even
from sdcontrol.engine.verify import SyntheticVerifier
from sdcontrol.experiments.compare import paired_ratio

__all__ = ["ACCEPTANCE", "PART", "best_bound"]

ACCEPTANCE = (0.82, 0.91)
"""Of sinks and recent pages at budget 512, and of scored pages at 2048 (Chen et al. 2024)."""

_SHARE_OF_BOUND = 0.82
_LENGTHS = range(1, 9)


def best_bound(scale: Scale, batch: int, context: int, which: int) -> tuple[float, int]:
    """The bound of a sparse arm and the number of draft tokens that reaches it."""
    return max(
        (
            self_drafting_bound(
                scale.target,
                Load(batch, context),
                budget_tokens=scale.sparse_budgets[which],
                rate=ACCEPTANCE[which],
                num_draft_tokens=length,
            ),
            length,
        )
        for length in _LENGTHS
    )


def cells(bench: Bench) -> list[Cell]:
    """One per batch, context and way of choosing pages; of what does not fit also the half.

    What is measured comes first: as the loads are given, then the halves.
    """
    scale, verifier = bench.scale, _verifier(bench.scale)
    found = [
        Cell(
            f"batch {batch}, context {context}, {arm}",
            partial(_measure, bench, verifier, (batch, context), which),
            bench.need(_kv_tokens(bench, batch, context), scored_requests=batch * which),
            seconds=40.0,
        )
        for batch, context in _loads(bench)
        for which, arm in enumerate((scale.sparse_arm, scale.scored_arm))
    ]
    return sorted(found, key=lambda cell: cell.skip is not None)


PART = Part(
    5,
    "MagicDec's claim: sparse KV self-drafting against plain decoding",
    cells,
    minutes=6.0,
    only_on_a_gpu=("speedup of sparse_kv, target at least 0.82 of the bound by bandwidth",),
)


def _loads(bench: Bench) -> list[tuple[int, int]]:
    given = bench.scale.magicdec
    halves = [
        (batch // 2, context)
        for batch, context in given
        if bench.need(_kv_tokens(bench, batch, context)).lack
    ]
    return list(dict.fromkeys((*given, *halves)))


def _verifier(scale: Scale) -> SyntheticVerifier:
    return SyntheticVerifier({scale.sparse_arm: ACCEPTANCE[0], scale.scored_arm: ACCEPTANCE[1]})


def _measure(
    bench: Bench, verifier: SyntheticVerifier, load: tuple[int, int], which: int
) -> CellFigures:
    """Plain decoding has an engine of its own: page scores cost whoever has their drafter."""
    scale = bench.scale
    arm = (scale.sparse_arm, scale.scored_arm)[which]
    bound, length = best_bound(scale, *load, which)
    names = [f"{arm}:{n}" for n in range(max(length - 1, 1), length + 2)]
    plain, plain_graphs = _rates(bench, _decoder(bench, (), verifier, load), [Arm(OFF, OFF)])
    arms = [Arm(OFF, OFF), *(Arm(name, f"static:{name}") for name in names)]
    rates, graphs = _rates(bench, _decoder(bench, (arm,), verifier, load), arms)
    blocks = min(len(plain[OFF]), len(rates[OFF]))
    beside = {OFF: plain[OFF][:blocks]} | {name: rates[name][:blocks] for name in names}
    best = best_on_odd(beside, names)
    ratio = paired_ratio(even(beside[best]), even(beside[OFF]))
    seen = next(each for each in arms if each.name == best).stats.drafters[arm]
    figures = (
        Figure("speedup", ratio.median, "x", p10=ratio.low, p90=ratio.high),
        Figure("of the bound", ratio.median / bound, "", _SHARE_OF_BOUND),
        Figure("bound by bandwidth", bound, "x"),
        Figure("accepted of proposed", seen.acceptance_rate),
        Figure.of(
            "none beside the drafter, of the plain engine", [a / b for a, b in _pairs(rates, plain)]
        ),
    )
    facts = {
        "best": best,
        **block_facts(blocks, scale.blocks),
        "rates": beside,
        "graphs": {"plain": plain_graphs, arm: graphs},
    }
    return CellFigures(figures, facts)


def _decoder(
    bench: Bench, drafters: tuple[str, ...], verifier: SyntheticVerifier, load: tuple[int, int]
) -> Decoder:
    spec = DecoderSpec(drafters, verifier, _kv_tokens(bench, *load), load[0], _room(bench))
    decoder = bench.decoder(spec)
    decoder.prepare(*load)
    return decoder


def _rates(
    bench: Bench, decoder: Decoder, arms: Sequence[Arm]
) -> tuple[dict[str, list[float]], dict[str, object]]:
    """Tokens per second by arm and block, in random order, and facts of graphs; the first block warms up."""
    scale, rng, batch = bench.scale, random.Random(0), decoder.spec.max_batch_size
    rates: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for block in range(scale.blocks + 1):
        for arm in rng.sample(list(arms), len(arms)):
            seeds = range(1000 * block, 1000 * block + batch)
            turn = decoder.turn(arm, steps=scale.steps if block else 2, seeds=seeds)
            decoder.check_graphs()
            if block:
                rates[arm.name].append(turn.rate)
        if block and block % 2 == 0 and bench.budget.left < 0:
            break
    return rates, decoder.graph_facts()


def _pairs(
    rates: Mapping[str, Sequence[float]], plain: Mapping[str, Sequence[float]]
) -> list[tuple[float, float]]:
    return list(zip(rates[OFF], plain[OFF], strict=False))


def _room(bench: Bench) -> int:
    return (bench.scale.steps + 8) * 6


def _kv_tokens(bench: Bench, batch: int, context: int) -> int:
    return kv_tokens_for(batch, context, _room(bench))
