"""Batches that nothing follows, decoded to their ends: `python -m benchmarks.closed_batches`.

    python -m benchmarks.closed_batches [--live] [--blocks N]     2 minutes; live 20 minutes more

Prompts that are decoded together and then looked at: the batch takes as long as its slowest request, so
that the most tokens per second of each step are not the most of the whole. Compared are every fixed
setting, `goodput`, and `goodput` that maximises the tokens of each step alone. First simulated, on the
machines of `benchmarks.simulated_regret`; then live, by the rig of `benchmarks.regret`: all arms take
turns in every block, the best fixed setting is chosen on odd blocks, and scored on even ones. Without
`--live` the live results of before are kept, with their date.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import transformers

from benchmarks.measuring import RESULTS, write_results
from benchmarks.regret.arms import fixed_specs
from benchmarks.regret.grid import CLOSED, Case
from benchmarks.regret.rig import Arm, Rig
from benchmarks.regret.scoring import best_on_odd, even
from benchmarks.simulated_regret import ADAPTIVE, ALONE, MACHINES, measure_closed
from sdcontrol.experiments.compare import paired_ratio

_OUTCLASSED = 0.75  # of the best fixed setting's rate
_BATCH_SIZES = (4, 16)
_SEEDS = 2


def simulated() -> list[dict[str, object]]:
    """Every machine and batch size, mixed texts."""
    found = []
    for machine in MACHINES:
        for batch in _BATCH_SIZES:
            for seed in range(_SEEDS):
                result = measure_closed(machine, batch, "mixed", seed)
                found.append({"name": f"{machine}-b{batch}-mixed", **result, "seed": seed})
                print(
                    f"simulated {machine:6} batch {batch:2} goodput "
                    f"{result['goodput_over_best_fixed']:.3f} of {result['best_fixed']}, "
                    f"{result['goodput_over_each_step_alone']:.3f} of {ALONE}",
                    flush=True,
                )
    return [{**result, "is_simulated": True} for result in found]


def live(case: Case) -> dict[str, object]:
    """One cell."""
    rig = Rig(case)
    try:
        rates, steps = _take_turns(rig, case.blocks)
    finally:
        rig.close()
    best = best_on_odd(rates, [name for name in rates if name not in (ADAPTIVE, ALONE)])
    ours = even(rates[ADAPTIVE])
    ratios = {
        "goodput_to_best_fixed": paired_ratio(ours, even(rates[best])),
        "goodput_to_each_step_alone": paired_ratio(ours, even(rates[ALONE])),
        "goodput_to_off": paired_ratio(ours, even(rates["off"])),
        "each_step_alone_to_best_fixed": paired_ratio(even(rates[ALONE]), even(rates[best])),
    }
    words = ", ".join(
        f"{k} {r.median:.3f} ({r.low:.3f} to {r.high:.3f})" for k, r in ratios.items()
    )
    print(f"{case.name} best fixed {best}: {words}", flush=True)
    return {
        "name": case.name,
        "is_simulated": False,
        "best_fixed": best,
        "blocks": case.blocks,
        **{name: ratio.to_dict() for name, ratio in ratios.items()},
        "steps_per_batch": {name: statistics.mean(steps[name]) for name in (best, ADAPTIVE, ALONE)},
        "rates": {name: [round(rate, 2) for rate in row] for name, row in rates.items()},
    }


def _take_turns(rig: Rig, blocks: int) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """By arm: tokens per second in each block, and steps. Block 0 warms up and is not counted."""
    alone = {"kind": "goodput", "waits_for_slowest": False}
    specs = {**fixed_specs(rig.case), ADAPTIVE: ADAPTIVE, ALONE: alone}
    arms = {name: Arm(name, spec) for name, spec in specs.items()}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    steps: dict[str, list[int]] = {name: [] for name in arms}
    rng = random.Random(0)
    for block in range(blocks + 1):
        for name in rng.sample(list(arms), len(arms)):
            run = rig.run(arms[name], 0, block)
            if block:
                rates[name].append(run.rate)
                steps[name].append(run.stats.steps)
        if block == 1:
            _drop_outclassed(arms, rates)
    return {name: rates[name] for name in arms}, steps


def _drop_outclassed(arms: dict[str, Arm], rates: Mapping[str, Sequence[float]]) -> None:
    fixed = [name for name in arms if name not in (ADAPTIVE, ALONE)]
    most = max(rates[name][0] for name in fixed)
    for name in fixed:
        if name != "off" and rates[name][0] < _OUTCLASSED * most:
            del arms[name]


def _earlier_live() -> list[dict[str, object]]:
    path = RESULTS / "closed_batches.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    where = {"measured": {key: found[key] for key in ("date", "processor")}}
    return [{**where, **result} for result in found["results"] if not result["is_simulated"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--live", action="store_true", help="measure on this machine too")
    parser.add_argument("--blocks", type=int, help="counted blocks per live cell, at least 2")
    options = parser.parse_args(arguments)
    if options.blocks is not None and options.blocks < 2:
        parser.error(f"--blocks {options.blocks}; an odd block and an even one are needed")
    transformers.utils.logging.disable_progress_bar()
    results = simulated() + ([] if options.live else _earlier_live())
    for case in CLOSED if options.live else ():
        sized = case if options.blocks is None else replace(case, blocks=options.blocks)
        results.append(live(sized))
    command = "python -m benchmarks.closed_batches" + (" --live" if options.live else "")
    command += f" --blocks {options.blocks}" if options.blocks is not None else ""
    print(write_results("closed_batches", command, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
