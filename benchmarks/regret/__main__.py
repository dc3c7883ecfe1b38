"""Live regret of the adaptive policy: `python -m benchmarks.regret`.

    python -m benchmarks.regret [--cells NAME,NAME] [--resume] [--blocks N]     an hour or two
    python -m benchmarks.regret --quick                                         about 90 seconds

Twelve cells and three workloads that change; see `grid`. In every block all arms decode the same
requests from the same cached contexts, in random order. The best fixed setting is chosen on odd
blocks, and both are scored on even ones. Each result is written as soon as it is there.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import transformers

from benchmarks.measuring import RESULTS, setting, where, write_results
from benchmarks.regret.grid import CELLS, WORKLOADS, Case, quick
from benchmarks.regret.plot import svg
from benchmarks.regret.results import cell_result, misses, workload_result
from benchmarks.regret.rig import Rig
from benchmarks.regret.table import markdown
from benchmarks.regret.turns import take_turns

_COMMAND = "python -m benchmarks.regret"
_NAME = "regret"
_QUICK_FOLDER = Path("runs/regret-quick")

Result = dict[str, object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    options = _parser().parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    folder = options.folder or (_QUICK_FOLDER if options.quick else RESULTS)
    names = [case.name for case in (*CELLS, *WORKLOADS)]
    wanted = options.cells.split(",") if options.cells else names
    if unknown := sorted(set(wanted) - set(names)):
        print(f"no cell is called {unknown}; there are {names}", file=sys.stderr)
        return 2
    results = {
        name: result
        for name, result in _earlier(folder).items()
        if options.resume or name not in wanted
    }
    for case in (*CELLS, *WORKLOADS):
        if case.name not in wanted or case.name in results:
            continue
        results[case.name] = measure(_sized(case, options), is_tiny=options.quick)
        _write(folder, [results[name] for name in names if name in results])
    print(markdown([results[name] for name in names if name in results]))
    return 0


def measure(case: Case, *, is_tiny: bool = False) -> Result:
    """One cell or workload; `is_tiny` uses models that are small."""
    started = time.perf_counter()
    rig = Rig(case, is_tiny=is_tiny)
    try:
        ready = time.perf_counter()
        turns = take_turns(rig, blocks=case.blocks, on_block=lambda block: _say(case, block))
        result = (workload_result if case.is_workload else cell_result)(rig, turns)
    finally:
        rig.close()
    seconds = time.perf_counter() - started
    result["measured"] = where(setting())
    result["seconds"] = {"all": round(seconds, 1), "contexts": round(ready - started, 1)}
    print(f"{case.name:28s} {seconds:5.0f} s  {'; '.join(misses(result)) or 'met'}", flush=True)
    return result


def _say(case: Case, block: int) -> None:
    """How far it is, for whoever waits."""
    print(f"{case.name}: block {block} of {case.blocks}", file=sys.stderr, flush=True)


def _sized(case: Case, options: argparse.Namespace) -> Case:
    if options.quick:
        return quick(case)
    return case if options.blocks is None else replace(case, blocks=options.blocks)


def _earlier(folder: Path) -> dict[str, Result]:
    path = folder / f"{_NAME}.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    measured = {"measured": where(found)}  # of results that do not say it themselves
    return {str(result["name"]): {**measured, **result} for result in found["results"]}


def _write(folder: Path, results: Sequence[Result]) -> None:
    write_results(_NAME, _COMMAND, results, folder=folder)
    (folder / f"{_NAME}.svg").write_text(svg(results), encoding="utf-8")


def _at_least_2(text: str) -> int:
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{number}; an odd block and an even one are needed")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", help="names, separated by commas (default: all)")
    parser.add_argument("--blocks", type=_at_least_2, help="counted blocks per cell or workload")
    parser.add_argument(
        "--resume", action="store_true", help="measure no cell again that the results file has"
    )
    parser.add_argument("--quick", action="store_true", help="tiny, to see that all of it runs")
    parser.add_argument("--folder", type=Path, help=f"for the results (default: {RESULTS})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
