"""The engine on a GPU, part by part: `python -m benchmarks.gpu`.

    python -m benchmarks.gpu --total 28                  correctness first, then the rest
    python -m benchmarks.gpu --part 5 6                  some parts, at most 8 minutes each
    python -m benchmarks.gpu --resume                    all parts, what is not measured yet
    python -m benchmarks.gpu --dry-run --memory-gib 80   which cells fit, and what each takes

Minutes in all count from when the process began, imports and what those compile included.
Without a GPU every part runs at a small scale on the CPU, in one to two minutes on two cores, and
what is missing is said. Each cell is written as soon as it is there, and before it is begun, so that a
run may end at any time; none is begun that should not end in time. Where a cell leaves the device unusable, the rest runs in a new process.
What failed before is tried again after everything else.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.gpu import (
    STARTED,
    against_transformers,
    attention,
    correctness,
    dry_run,
    host,
    magicdec,
    plain,
    promise,
    verification,
)
from benchmarks.gpu.bench import Bench, Budget
from benchmarks.gpu.figures import Result, failures, fuller
from benchmarks.gpu.part import Cell, Part
from benchmarks.gpu.report import Report, missing, verdict
from benchmarks.gpu.scale import FULL, SMALL
from benchmarks.measuring import RESULTS
from sdcontrol.compiled import is_compiling

__all__ = ["PARTS", "main", "run_part"]

_SMALL_FOLDER = Path("runs/gpu-small")
_IMPORTANCE = (0, 1, 5, 6, 3, 4, 2, 7)  # the order of parts, for when time runs out
_FRAMES = 6  # of a failure that are printed, the innermost
_ENDED = "the process ended while this was measured"
PARTS: tuple[Part, ...] = tuple(
    module.PART
    for module in (
        correctness,
        plain,
        verification,
        attention,
        against_transformers,
        magicdec,
        promise,
        host,
    )
)


def main(arguments: Sequence[str] | None = None, *, started: float | None = None) -> int:
    """Run from the command line; 1 where a cell failed, or something was not correct.

    What has passed since `started`, by `time.perf_counter`, counts.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    wanted = [part for part in _by_importance() if part.number in (options.part or _IMPORTANCE)]
    if options.dry_run:
        bench = dry_run.bench_of(options.memory_gib)
        print("\n".join(dry_run.described(wanted, bench, options.total)))
        return 0
    spent = 0.0 if started is None else time.perf_counter() - started
    minutes = min(options.total - spent / 60.0, len(wanted) * options.minutes)
    total = Budget(60.0 * minutes)
    return _run(wanted, total, options, given)


def _run(
    wanted: Sequence[Part], total: Budget, options: argparse.Namespace, given: Sequence[str]
) -> int:
    transformers.utils.logging.disable_progress_bar()
    has_gpu = torch.cuda.is_available() and not options.cpu
    if has_gpu and not is_compiling:
        raise SystemExit("numba cannot be imported, and plans would be slow; pip install numba")
    device = torch.device("cuda" if has_gpu else "cpu")
    bench = Bench(FULL if has_gpu else SMALL, device)
    name = torch.cuda.get_device_name() if has_gpu else "cpu-small-scale"
    report = Report(options.folder or (RESULTS if has_gpu else _SMALL_FOLDER), name, PARTS)
    _say_where(bench, name)
    if not options.resume:
        for part in wanted:
            report.forget(part.number)
    _run_parts(wanted, total, bench, report, options)
    if not bench.is_usable:
        _go_on_elsewhere(given, total.left)
    print("\n".join(missing(report.results, PARTS)))
    print(f"written to {report.path} and {report.path.with_suffix('.md').name}")
    numbers = {part.number for part in wanted}
    return int(any(is_bad(result) for result in report.results if result["part"] in numbers))


def _run_parts(
    parts: Sequence[Part],
    total: Budget,
    bench: Bench,
    report: Report,
    options: argparse.Namespace,
) -> None:
    """Those with open cells, each for its share of the time that is left, while the device is usable;
    what a part leaves over is the others'.

    Cells that failed in an earlier run come last: they may take all of the time once more.
    """
    failed = {part.number: report.failed(part.number) for part in parts}
    is_open = [part for part in parts if _todo(part, bench, report, None)]
    again = [part for part in parts if failed[part.number] and not options.keep_failed]
    for turn, is_again in ((is_open, False), (again, True)):
        for index, part in enumerate(turn):
            seconds = min(60.0 * options.minutes, _share(turn[index:]) * total.left)
            only = failed[part.number] if is_again else None
            run_part(part, bench, report, seconds=seconds, only=only)
            if not bench.is_usable:
                return


def _share(parts: Sequence[Part]) -> float:
    """The first one's of the time for all. Correctness may take it all: else no time counts."""
    first = parts[0]
    return 1.0 if first.number == 0 else first.minutes / sum(part.minutes for part in parts)


def run_part(
    part: Part, bench: Bench, report: Report, *, seconds: float, only: Collection[str] | None = None
) -> None:
    """Measure the cells that are open, or `only` these: each that should end in time."""
    bench.budget = Budget(seconds)
    print(f"part {part.number}: {part.title} ({bench.scale.name})", flush=True)
    took: list[float] = []
    left: list[str] = []
    try:
        for cell in _todo(part, bench, report, only):
            if not cell.skip and bench.budget.left <= _expected(cell, took):
                left.append(cell.name)
                continue
            before, earlier = bench.budget.spent, report.result_of(part.number, cell.name)
            kept = {} if earlier is None or "skipped" in earlier else earlier
            report.add({**kept, **_key(part, cell, bench), "failed": _ENDED})
            result = _measure(part, cell, bench)
            took += [] if cell.skip else [bench.budget.spent - before]
            report.add(fuller(earlier, result))
            _print(result)
            if not bench.is_usable:
                break
    finally:
        if bench.is_usable:  # else freeing memory raises, too
            bench.release()
    if left:
        print(f"  left for --resume ({len(left)} in all): {'; '.join(left[:3])}", flush=True)


def _todo(part: Part, bench: Bench, report: Report, only: Collection[str] | None) -> list[Cell]:
    """What was never tried comes before what ran out of time."""
    cells = part.cells(bench)
    if only is not None:
        return [cell for cell in cells if cell.name in only]
    is_open = [cell for cell in cells if report.is_open(part.number, cell.name, skip=cell.skip)]
    return sorted(is_open, key=lambda cell: report.result_of(part.number, cell.name) is not None)


def _expected(cell: Cell, took: Sequence[float]) -> float:
    """Seconds of another cell: its own, or the longest so far without the first one, of which half is
    taken to have made models, compiled kernels and captured graphs for all.
    """
    return max(cell.seconds, *took[1:], took[0] / 2 if len(took) == 1 else 0.0)


def is_bad(result: Result) -> bool:
    """Whether a cell failed, or shows that something is not correct."""
    figures = result.get("figures", [])
    assert isinstance(figures, list)
    is_wrong = any(figure.get("is_met") is False for figure in figures)
    return "failed" in result or (result["part"] == 0 and is_wrong)


def _go_on_elsewhere(given: Sequence[str], seconds: float) -> None:
    print("the device is of no further use to this process; going on in another", flush=True)
    minutes = max(seconds, 0.0) / 60.0
    _restart([*given, "--resume", "--keep-failed", "--total", f"{minutes:.2f}"])


def _restart(arguments: Sequence[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *arguments])


def _by_importance() -> list[Part]:
    return sorted(PARTS, key=lambda part: _IMPORTANCE.index(part.number))


def _key(part: Part, cell: Cell, bench: Bench) -> Result:
    return {"part": part.number, "name": cell.name, "scale": bench.scale.name}


def _measure(part: Part, cell: Cell, bench: Bench) -> Result:
    result = _key(part, cell, bench)
    if cell.skip:
        return {**result, "skipped": cell.skip}
    started = time.perf_counter()
    found, failure = None, ""
    try:
        found = cell.measure()
    except Exception as error:  # one cell's failure must not cost the others
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
        traceback.print_exception(error, limit=-_FRAMES, chain=False)
    if found is None:
        if bench.is_usable:
            bench.release()  # an engine that broke off in the middle of a step is of no use
        return {**result, "failed": failure}
    result["figures"] = [figure.to_dict() for figure in found.figures]
    result["facts"] = {"is_compiling": is_compiling, **found.facts}
    rates = bench.rates
    result["ceilings"] = {
        "bytes_per_second": round(rates.bytes_per_second),
        "flops_per_second": round(rates.flops_per_second),
    }
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def _print(result: Result) -> None:
    print(f"  {result['name']}", flush=True)
    for outcome in ("skipped", "failed"):
        if outcome in result:
            print(f"    {outcome}: {result[outcome]}", flush=True)
    figures = result.get("figures", [])
    assert isinstance(figures, list)
    for figure in figures:
        number = f"{figure['value']:.4g} {figure['unit']}".rstrip()
        print(
            f"    {figure['name']:<48} {number:<14} {verdict(result, figure)}".rstrip(), flush=True
        )
    for rival, why in failures(result).items():
        print(f"    {rival}: {why}", flush=True)


def _say_where(bench: Bench, name: str) -> None:
    rates = bench.rates
    print(
        f"{name}: {bench.scale.name}; copies {rates.bytes_per_second / 1e9:.0f} GB/s, multiplies "
        f"{rates.flops_per_second / 1e12:.3g} TFLOP/s in {bench.scale.dtype}, "
        f"{bench.free_bytes / 1e9:.1f} GB usable",
        flush=True,
    )


def _minutes(text: str) -> float:
    if not 0.0 <= (minutes := float(text)) <= 60.0:
        raise argparse.ArgumentTypeError(f"{text} minutes; give a number between 0 and 60")
    return minutes


def _gib(text: str) -> float:
    if not 0.0 < (gib := float(text)) < 1e6:
        raise argparse.ArgumentTypeError(f"{text} GiB; give a number above 0")
    return gib


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    numbers = [part.number for part in PARTS]
    parser.add_argument("--part", type=int, nargs="+", choices=numbers, help="one or several")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are written")
    parser.add_argument("--keep-failed", action="store_true", help="with --resume: the failed, too")
    parser.add_argument("--minutes", type=_minutes, default=8.0, help="per part (default: 8)")
    parser.add_argument("--total", type=_minutes, default=60.0, help="in all (default: 60)")
    parser.add_argument("--cpu", action="store_true", help="small scale though a GPU is there")
    parser.add_argument("--dry-run", action="store_true", help="list the cells, measure nothing")
    parser.add_argument(
        "--memory-gib",
        type=_gib,
        default=80.0,
        help="free on the GPU, with --dry-run (default: 80)",
    )
    parser.add_argument("--folder", type=Path, help=f"default: {RESULTS}, or {_SMALL_FOLDER}")
    return parser


if __name__ == "__main__":
    sys.exit(main(started=STARTED))
