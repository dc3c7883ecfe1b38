"""Part 6: the goodput policy against every fixed setting, no speculation, and the rival rule.

Requests are accepted at rates of their own (`acceptance`): .5, .7, .9 for the draft model, all
alike or mixed within the batch. The best fixed setting is chosen on odd blocks, and all are scored
on even ones. What learns keeps what it learned from block to block.
"""

import random
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.gpu.acceptance import KINDS, MIXES, seeds_of
from benchmarks.gpu.all_drafters import kv_tokens_of, open_decoder
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoder import Decoder, Turn
from benchmarks.gpu.figures import CellFigures, Figure, block_facts
from benchmarks.gpu.part import Cell, Part
from benchmarks.regret.rig import Arm
from benchmarks.regret.scoring import ADAPTIVE, OFF, even, score_cell
from sdcontrol.core import family_of
from sdcontrol.experiments.compare import Ratio, paired_ratio

__all__ = ["PART", "RIVAL", "figures_of", "fixed_specs", "screened"]

RIVAL = "budget_argmax"
_RIVAL_DRAFTER = "draft_model"
_LENGTHS = {"draft_model": (1, 2, 4, 8), "sparse_kv": (2, 4, 8), "ngram": (2, 4, 8, 16)}
_HOPELESS = 0.75  # of the best fixed setting, in the first two blocks
_TO_BEST, _TO_BEST_MIXED, _TO_OFF, _TO_RIVAL = 0.97, 1.10, 0.99, 1.0
_LEARNING_TURNS = 3  # before block 1, of what learns
_OTHER_LUCK = len(KINDS) * 1_000_000  # between seeds of the same kind


def fixed_specs(sparse_arm: str, context: int) -> dict[str, str]:
    """Off, and every drafter and length; `sparse_kv` where the context is beyond its budget."""
    specs = {OFF: OFF}
    for family, lengths in _LENGTHS.items():
        arm = sparse_arm if family == "sparse_kv" else family
        if family != "sparse_kv" or context > int(sparse_arm.split(":")[1]):
            specs |= {f"{arm}:{n}": f"static:{arm}:{n}" for n in lengths}
    return specs


def screened(rates: Mapping[str, Sequence[float]], fixed: Sequence[str]) -> dict[str, float]:
    """Fixed settings far from the best in every block so far, and how near they came; off stays."""
    blocks = range(len(rates[OFF]))
    nearest = {
        name: max(rates[name][b] / max(rates[other][b] for other in fixed) for b in blocks)
        for name in fixed
    }
    return {n: share for n, share in nearest.items() if share < _HOPELESS and n != OFF}


def cells(bench: Bench) -> list[Cell]:
    """Mixed batches first: those are what the promise is about."""
    return [
        Cell(
            f"batch {batch}, context {context}, acceptance {mix}",
            partial(_measure, bench, batch, context, mix),
            bench.need(kv_tokens_of(bench, batch, context), with_draft=True),
            seconds=40.0,
        )
        for mix in bench.scale.mixes
        for batch, context in bench.scale.promise
    ]


PART = Part(
    6,
    "the promise: goodput against every fixed setting",
    cells,
    minutes=8.0,
    only_on_a_gpu=(
        "goodput over the best fixed setting (0.97; 1.10 mixed), over none (0.99), and over "
        "budget_argmax (1.0)",
    ),
)


def figures_of(rates: Mapping[str, Sequence[float]], *, is_mixed: bool) -> list[Figure]:
    """Ratios on even blocks; the best fixed setting is that of odd ones."""
    score = score_cell({name: rate for name, rate in rates.items() if name != RIVAL})
    rival = paired_ratio(even(rates[ADAPTIVE]), even(rates[RIVAL]))
    figures = [
        _ratio(f"of the best fixed ({score.best})", score.to_best, _TO_BEST),
        _ratio("of none", score.to_off, _TO_OFF),
        _ratio(f"of {RIVAL}", rival, _TO_RIVAL),
    ]
    if is_mixed:
        figures.append(_ratio("of the best fixed, mixed batch", score.to_best, _TO_BEST_MIXED))
    return figures


def _ratio(name: str, ratio: Ratio, target: float) -> Figure:
    """p10 and p90 stand for the bootstrap interval's ends."""
    return Figure(name, ratio.median, "x", target, p10=ratio.low, p90=ratio.high)


def _measure(bench: Bench, batch: int, context: int, mix: str) -> CellFigures:
    decoder = open_decoder(bench, batch, context)
    arms = _arms(bench, context)
    turns, dropped = _take_turns(bench, decoder, arms, mix, batch)
    rates = {name: [turn.rate for turn in each] for name, each in turns.items()}
    figures = figures_of(rates, is_mixed=len(MIXES[mix]) > 1)
    spent = [sum(turn.controller_seconds) / turn.seconds for turn in turns[ADAPTIVE]]
    figures.append(Figure.of("controller share of time", spent))
    facts: dict[str, object] = {
        **block_facts(len(rates[OFF]), bench.scale.blocks),
        "rates": {name: [round(rate, 1) for rate in each] for name, each in rates.items()},
        "milliseconds_of_a_step": {name: _step_parts(each) for name, each in turns.items()},
        "dropped_after_block_2": {name: round(share, 3) for name, share in dropped.items()},
        "choices": {f"{arm}:{n}": count for (arm, n), count in _most_chosen(arms[ADAPTIVE])},
        "accepted_of_proposed": {
            name: round(arm.stats.drafters[arm_name].acceptance_rate, 3)
            for name, arm in arms.items()
            for arm_name in arm.stats.drafters
            if name.startswith(arm_name)
        },
        "capture_seconds_left_out": round(
            sum(turn.capture_seconds for each in turns.values() for turn in each), 2
        ),
        "steps_launched_ahead": {name: arms[name].share_ahead for name in (OFF, ADAPTIVE)},
        "faults": sorted(set(arms[ADAPTIVE].stats.faults)),
        "graphs": decoder.graph_facts(),
    }
    return CellFigures(tuple(figures), facts)


def _arms(bench: Bench, context: int) -> dict[str, Arm]:
    fixed = fixed_specs(bench.scale.sparse_arm, context)
    arms = {name: Arm(name, spec) for name, spec in fixed.items()}
    arms[ADAPTIVE] = Arm(ADAPTIVE, ADAPTIVE)
    arms[RIVAL] = Arm(RIVAL, {"kind": RIVAL, "drafter": _RIVAL_DRAFTER})
    return arms


def _take_turns(
    bench: Bench, decoder: Decoder, arms: dict[str, Arm], mix: str, batch: int
) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    """Turns by arm and block, in random order; the first block warms up, or learns."""
    rng, names, dropped = random.Random(0), list(arms), dict[str, float]()
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    fixed = [name for name in names if name not in (ADAPTIVE, RIVAL)]
    for block in range(bench.scale.blocks + 1):
        for name in rng.sample(names, len(names)):
            found = _turn(bench, decoder, arms[name], seeds_of(MIXES[mix], batch, block), block)
            decoder.check_graphs()
            turns[name] += [found] if block else []
        if block == 2:
            rates = {name: [turn.rate for turn in turns[name]] for name in fixed}
            dropped = screened(rates, fixed)
            names = [name for name in names if name not in dropped]
        if block and block % 2 == 0 and bench.budget.left < 0:
            break
    return {name: turns[name] for name in names}, dropped


def _turn(bench: Bench, decoder: Decoder, arm: Arm, seeds: Sequence[int], block: int) -> Turn:
    """An engine with one drafter would not ask the others: no more does ours for such an arm."""
    steps, learns = bench.scale.steps, arm.controller.learns
    drafter = _RIVAL_DRAFTER if arm.name == RIVAL else family_of(arm.name)
    speculation = (drafter,) if drafter in _LENGTHS else True
    if not block and learns:
        for turn in range(1, _LEARNING_TURNS):  # each of which has luck of its own
            own = [seed + _OTHER_LUCK * turn for seed in seeds]
            decoder.turn(arm, steps=steps, seeds=own, speculation=speculation)
    timed = steps if block or learns else 2
    return decoder.turn(arm, steps=timed, seeds=seeds, speculation=speculation)


def _step_parts(turns: Sequence[Turn]) -> dict[str, float]:
    """Of an arm's average step: all of it, and what is told of its parts; the tokens that it brought."""
    steps = sum(turn.stats.steps for turn in turns)
    names = dict.fromkeys(name for turn in turns for name in turn.stats.seconds)
    parts = {n: sum(turn.stats.seconds.get(n, 0.0) for turn in turns) for n in names}
    whole = {"all": sum(turn.seconds for turn in turns), **parts}
    found = {name: round(1e3 * seconds / steps, 3) for name, seconds in whole.items()}
    return {**found, "tokens": round(sum(turn.tokens for turn in turns) / steps, 2)}


def _most_chosen(arm: Arm) -> list[tuple[tuple[str, int], int]]:
    chosen = sorted(arm.stats.lengths.items(), key=lambda item: -item[1])
    return chosen[:6]
