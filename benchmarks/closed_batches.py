"""Batches that nothing follows, decoded to their ends: `python -m benchmarks.closed_batches`.

    python -m benchmarks.closed_batches [--live [CELL,CELL]] [--blocks N]     3 minutes; live 4 to 20 more for each cell

Prompts that are decoded together and then looked at: the batch takes as long as its slowest request, so
that the most tokens per second of each step are not the most of the whole. Compared are every fixed
setting, `goodput`, `goodput` that maximises the tokens of each step alone, and `goodput` by a controller
that sees its first batch, as it is and with a warm start from what another saw in the batch before. First simulated, on the machines of `benchmarks.simulated_regret`; then live,
by the rig of `benchmarks.regret`: all arms take turns in every block, the best fixed setting is chosen
on odd blocks, and scored on even ones; controllers of first batches are new in every block (what is told
to a warm one is of the same requests there, where acceptance is real). What is not
measured live keeps its results of before, with their date.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

import transformers

from benchmarks.measuring import RESULTS, where, write_results
from benchmarks.regret.among_fixed import among_fixed
from benchmarks.regret.grid import CLOSED, Case
from benchmarks.simulated_regret import ADAPTIVE, ALONE, MACHINES, measure_closed

_BATCH_SIZES = (4, 16)
_SEEDS = 2
_FIRST, _WARM = "goodput, first batch", "goodput, first batch, warm start"


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
    alone = {"kind": "goodput", "waits_for_slowest": False}
    ours = {ADAPTIVE: ADAPTIVE, ALONE: alone, _FIRST: ADAPTIVE, _WARM: ADAPTIVE}
    found = among_fixed(case, ours, anew=(_FIRST,), warm={_WARM: _FIRST})
    best = found.best
    ratios = {
        "goodput_to_best_fixed": found.ratio(ADAPTIVE, best),
        "goodput_to_each_step_alone": found.ratio(ADAPTIVE, ALONE),
        "goodput_to_off": found.ratio(ADAPTIVE, "off"),
        "each_step_alone_to_best_fixed": found.ratio(ALONE, best),
        "first_batch_to_best_fixed": found.ratio(_FIRST, best),
        "warm_start_to_best_fixed": found.ratio(_WARM, best),
    }
    words = ", ".join(
        f"{k} {r.median:.3f} ({r.low:.3f} to {r.high:.3f})" for k, r in ratios.items()
    )
    print(f"{case.name} best fixed {best}: {words}", flush=True)
    steps = {name: statistics.mean(found.steps[name]) for name in (best, *ours)}
    return {
        "name": case.name,
        "is_simulated": False,
        "best_fixed": best,
        "blocks": case.blocks,
        **{name: ratio.to_dict() for name, ratio in ratios.items()},
        "steps_per_batch": steps,
        "rates": {name: [round(rate, 2) for rate in row] for name, row in found.rates.items()},
    }


def _earlier_live() -> dict[str, dict[str, object]]:
    """By cell."""
    path = RESULTS / "closed_batches.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    measured = {"measured": where(found)}
    rows = [{**measured, **row} for row in found["results"] if not row["is_simulated"]]
    return {row["name"]: row for row in rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    cells = {case.name: case for case in CLOSED}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--live",
        nargs="?",
        const=",".join(cells),
        default="",
        metavar="CELL,CELL",
        help=f"measure on this machine too: all of {', '.join(cells)}, or these",
    )
    parser.add_argument("--blocks", type=int, help="counted blocks per live cell, at least 2")
    options = parser.parse_args(arguments)
    names = [name for name in options.live.split(",") if name]
    if unknown := [name for name in names if name not in cells]:
        parser.error(f"no cell {unknown[0]!r}; there are {', '.join(cells)}")
    if options.blocks is not None and options.blocks < 2:
        parser.error(f"--blocks {options.blocks}; an odd block and an even one are needed")
    transformers.utils.logging.disable_progress_bar()
    results, lives = simulated(), _earlier_live()
    for name in names:
        case = cells[name]
        lives[name] = live(case if options.blocks is None else replace(case, blocks=options.blocks))
    command = "python -m benchmarks.closed_batches" + (" --live" if names else "")
    command += f" {options.live}" if 0 < len(names) < len(cells) else ""
    command += f" --blocks {options.blocks}" if options.blocks is not None else ""
    print(write_results("closed_batches", command, [*results, *lives.values()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
