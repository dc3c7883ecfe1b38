"""Requests that follow each other, and a draft model that knows no prompt: `python -m benchmarks.late_draft_model`.

    python -m benchmarks.late_draft_model [--cells NAME,NAME] [--blocks N]     about 40 minutes

As where prompts come from elsewhere, from a cache or from another machine: the target's contexts are
there, and a draft model computes each request's prompt before its first draft for it. Whoever begins pays
that, and the round that nobody shares. Compared are every fixed setting, `goodput`, and `goodput` whose
requests begin each for itself (without `taking_up`). By the rig of `benchmarks.regret`: a target of
100 M parameters, synthetic acceptance, all arms in turns in every block, the best fixed setting chosen
on odd blocks and scored on even ones.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import transformers

from benchmarks.measuring import RESULTS, setting, where, write_results
from benchmarks.regret.among_fixed import among_fixed
from benchmarks.regret.grid import LATE, Case
from benchmarks.regret.scoring import ADAPTIVE, OFF
from sdcontrol.core import BatchView
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.taking_up import TakingUp

_NAME = "late_draft_model"
_COMMAND = f"python -m benchmarks.{_NAME}"
_APART = "each for itself"

Result = dict[str, object]


class _Apart(TakingUp):
    def looks(self, view: BatchView, followed: float) -> bool:
        """Never."""
        return False


def live(case: Case) -> Result:
    """One cell."""
    apart = Goodput()
    apart.taking_up = _Apart(apart.stretches)
    found = among_fixed(case, {ADAPTIVE: ADAPTIVE, _APART: apart})
    ratios = {
        "goodput_to_best_fixed": found.ratio(ADAPTIVE, found.best),
        "goodput_to_off": found.ratio(ADAPTIVE, OFF),
        "goodput_to_each_for_itself": found.ratio(ADAPTIVE, _APART),
        "best_fixed_to_off": found.ratio(found.best, OFF),
    }
    words = ", ".join(
        f"{k} {r.median:.3f} ({r.low:.3f} to {r.high:.3f})" for k, r in ratios.items()
    )
    print(f"{case.name} best fixed {found.best}: {words}", flush=True)
    return {
        "name": case.name,
        "best_fixed": found.best,
        "blocks": case.blocks,
        **{name: ratio.to_dict() for name, ratio in ratios.items()},
        "measured": where(setting()),
        "steps": {name: sum(row) for name, row in found.steps.items()},
        "rates": {name: [round(rate, 2) for rate in row] for name, row in found.rates.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [case.name for case in LATE]
    parser.add_argument("--cells", help=f"separated by commas, of {', '.join(names)}")
    parser.add_argument("--blocks", type=int, help="counted blocks per cell, at least 2")
    options = parser.parse_args(arguments)
    wanted = options.cells.split(",") if options.cells else names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--cells: no cell is called {unknown}; there are {names}")
    if options.blocks is not None and options.blocks < 2:
        parser.error(f"--blocks {options.blocks}; an odd block and an even one are needed")
    transformers.utils.logging.disable_progress_bar()
    path = RESULTS / f"{_NAME}.json"
    rows = json.loads(path.read_text("utf-8"))["results"] if path.exists() else []
    results = {row["name"]: row for row in rows}
    for case in LATE:
        if case.name in wanted:
            sized = case if options.blocks is None else replace(case, blocks=options.blocks)
            results[case.name] = live(sized)
            write_results(_NAME, _COMMAND, [results[name] for name in names if name in results])
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
