"""`sdcontrol replay`: which policy would have been best, or whether decisions come out as recorded.

Knows the order of things; options stand in `replay_options`, runs and their comparison in
`experiments`.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sdcontrol import __version__
from sdcontrol.cli.command import Commands, add_command
from sdcontrol.cli.files import find_trace, write_json, write_text
from sdcontrol.cli.progress import progress
from sdcontrol.cli.replay_options import (
    add_options,
    base_jobs,
    check_options,
    policies_of,
    pool_of,
)
from sdcontrol.errors import ConfigError

if TYPE_CHECKING:
    from sdcontrol.experiments.replay_runs import ReplayJob
    from sdcontrol.experiments.replay_summary import Comparison
    from sdcontrol.traces.replay import ReplayReport
    from sdcontrol.traces.replay_result import ReplayResult

__all__ = ["add_replay"]

_DESCRIPTION = "Judge policies on a recording: simulated, or the recorded one exactly."
_FEW_STEPS = 100


def add_replay(commands: Commands) -> None:
    """Make the command known."""
    add_options(add_command(commands, "replay", run, _DESCRIPTION))


def run(options: argparse.Namespace) -> int:
    """Replay; 1 where an exact replay finds a difference, or requests could never run."""
    check_options(options)
    return _replay_exactly(options) if options.exact else _what_if(options)


# ---- exactly


def _replay_exactly(options: argparse.Namespace) -> int:
    from sdcontrol.traces.replay import replay_exactly

    reports = {given: replay_exactly(find_trace(given)) for given in options.traces}
    for given, report in reports.items():
        print(f"{given}: {report}")
    if options.json is not None:
        records = [_exact_record(given, report) for given, report in reports.items()]
        write_json(options.json, {"version": __version__, "traces": records})
    return 0 if all(report.is_exact for report in reports.values()) else 1


def _exact_record(given: str, report: "ReplayReport") -> dict[str, object]:
    return {"trace": given, "is_exact": report.is_exact, **asdict(report)}


# ---- what if


@dataclass(frozen=True, slots=True)
class _Found:
    """What was simulated, and how it compares. `names` has what sources are called, by path."""

    jobs: "Sequence[ReplayJob]"
    results: "Sequence[ReplayResult]"
    names: Mapping[str, str]
    comparison: "Comparison"
    step_times: str
    notes: tuple[str, ...]


def _what_if(options: argparse.Namespace) -> int:
    from sdcontrol.experiments.replay_runs import jobs_of, run_jobs
    from sdcontrol.experiments.replay_summary import compare

    policies = policies_of(options)
    base = base_jobs(options)
    _open(base)
    jobs = jobs_of(base, policies, options.seeds)
    with progress(len(jobs), is_shown=sys.stderr.isatty(), unit="runs") as shown:
        results = run_jobs(
            jobs,
            pool_of(options),
            lambda result: shown.advance(result.output_tokens, has_ended=True),
        )
    if not any(result.num_requests for result in results) and results[0].refusals:
        raise ConfigError(f"none of the requests could ever run: {results[0].refusals[0]}")
    names = {str(job.source.path): given for job, given in zip(base, options.traces, strict=True)}
    comparison = compare(jobs, results, names)
    notes = tuple(_notes(jobs, results))
    found = _Found(jobs, results, names, comparison, _times_words(base[0]), notes)
    _print(found)
    _write(options, found)
    return 1 if any(result.num_refused for result in results) else 0


def _open(jobs: "Sequence[ReplayJob]") -> None:
    """What cannot be used is known before processes begin; say what of files was left out."""
    from sdcontrol.experiments.replay_runs import opened

    sources = dict.fromkeys(job.source for job in jobs)
    arrivals = {job.arrivals for job in jobs if job.arrivals is not None}
    for source in [*sources, *(found for found in arrivals if found.format != "trace")]:
        report = opened(source).report
        if report is not None and report.num_malformed:
            print(report.to_text(), file=sys.stderr)


def _times_words(job: "ReplayJob") -> str:
    if job.machine is None:
        return "step times fitted to the trace"
    return f"step times of {job.machine.name}"


def _notes(jobs: "Sequence[ReplayJob]", results: "Sequence[ReplayResult]") -> Iterator[str]:
    """What whoever reads the figures should know."""
    refused = max(result.num_refused for result in results)
    if refused:
        reason = next(result.refusals[0] for result in results if result.refusals)
        yield f"{refused} requests could never run: {reason}"
    yield from _notes_on_sharing(jobs)
    machine = jobs[0].machine
    if machine is None:
        yield from _notes_on_fits(jobs)
        return
    yield "planning itself takes no time in these figures"
    arms = {arm for result in results for arm in result.arms}
    if machine.target is not None and machine.draft is None and "draft_model" in arms:
        yield "draft_model was priced like the model itself; give --draft-model"


def _notes_on_sharing(jobs: "Sequence[ReplayJob]") -> Iterator[str]:
    from sdcontrol.experiments.replay_runs import opened

    for source in dict.fromkeys(job.source for job in jobs):
        found = opened(source)
        if found.trace is None or not found.settings.prefix_sharing:
            continue
        if found.trace.requests_table()["prompt_ids"].null_count:
            yield (
                f"{source.path.name} keeps no token ids: prompts that begin alike are simulated as "
                "if they did not; record with --keep-token-ids"
            )


def _notes_on_fits(jobs: "Sequence[ReplayJob]") -> Iterator[str]:
    from sdcontrol.experiments.replay_runs import opened

    for source in dict.fromkeys(job.source for job in jobs):
        trace = opened(source).trace
        if trace is not None and trace.num_steps < _FEW_STEPS:
            yield (
                f"{source.path.name} has {trace.num_steps} steps to fit step times to; with fewer "
                f"than {_FEW_STEPS}, times of steps unlike them can be far off"
            )


def _print(found: _Found) -> None:
    from rich.console import Console

    from sdcontrol.cli.replay_table import table_of

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width of its own
    console.print(table_of(found.comparison, f"simulated, {found.step_times}"))
    for note in found.notes:
        console.print(f"Note: {note}", highlight=False, markup=False, soft_wrap=True)


def _write(options: argparse.Namespace, found: _Found) -> None:
    if options.json is not None:
        runs = [
            {"source": found.names[str(job.source.path)], "seed": job.seed, **result.to_json()}
            for job, result in zip(found.jobs, found.results, strict=True)
        ]
        record = {
            "version": __version__,
            "is_simulated": True,
            "step_times": found.step_times,
            "notes": list(found.notes),
            **found.comparison.to_json(),
            "runs": runs,
        }
        write_json(options.json, record)
    if options.html is not None:
        write_text(options.html, _page(found))
        print(f"Page: {options.html}")


def _page(found: _Found) -> str:
    """Plots are of each policy's first seed."""
    from sdcontrol.experiments.replay_page import render

    shown: dict[str, list[ReplayResult]] = {name: [] for name in found.names.values()}
    for job, result in zip(found.jobs, found.results, strict=True):
        if job.seed == 0:
            shown[found.names[str(job.source.path)]].append(result)
    return render(found.comparison, shown, f"simulated, {found.step_times}", found.notes)
