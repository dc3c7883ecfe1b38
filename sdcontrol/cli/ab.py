"""`sdcontrol ab`: compare policies as one file says, with an answer that statistics stand behind.

Knows the options, where models come from, and the order of things; the comparison is made in
`experiments`, its table in `ab_table`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sdcontrol.cli.command import Commands, add_command
from sdcontrol.cli.files import check_writable, write_json
from sdcontrol.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import PreTrainedModel

    from sdcontrol.estimators.hardware import Hardware
    from sdcontrol.experiments.config import Experiment
    from sdcontrol.experiments.results import Results
    from sdcontrol.experiments.run import Watcher
    from sdcontrol.experiments.runner import Runner

__all__ = ["add_ab", "runner_of"]

_DESCRIPTION = "Compare policies as a file says: fair blocks, intervals, one report."


def add_ab(commands: Commands) -> None:
    """Make the command known."""
    parser = add_command(commands, "ab", run, _DESCRIPTION)
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="what to compare, and how")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the file, such as arms.0.policy.kind=off; may be repeated",
    )
    parser.add_argument("--schema", action="store_true", help="print the file's JSON schema")
    parser.add_argument(
        "--output", default="runs", metavar="FOLDER", help="each run gets a folder in it (runs)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what was interrupted")
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever is there")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="runs of a matrix at a time: traces on cores, live ones on a GPU each",
    )
    parser.add_argument("--ray", action="store_true", help="runs of a matrix on Ray (traces)")


def run(options: argparse.Namespace) -> int:
    """Run all that the file describes; 1 where an arm failed."""
    from sdcontrol.experiments.loading import json_schema, load_experiments

    if options.schema:
        print(json_schema())
        return 0
    _check(options)
    experiments = load_experiments(Path(options.config), options.set)
    read = [name for each in experiments for name in (each.profile, *each.workload.files)]
    check_writable(options.json, inputs=[options.config, *read])
    results: list[Results] = []
    for found in _run_all(options, experiments):
        results.append(found)
        if options.json is not None:
            records = [each.model_dump(mode="json") for each in results]
            write_json(options.json, records if len(experiments) > 1 else records[0])
        _show(found, Path(options.output) / found.name)
    if any(not result.is_complete for result in results):
        raise KeyboardInterrupt
    return 1 if any(arm.failed for result in results for arm in result.arms) else 0


def _check(options: argparse.Namespace) -> None:
    if options.config is None:
        raise ConfigError("no CONFIG.yaml; give one, or --schema to see what goes in it")
    if options.resume and options.overwrite:
        raise ConfigError("--resume goes on and --overwrite begins anew; give one of them")
    if options.workers < 1:
        raise ConfigError(f"--workers is {options.workers}; give at least 1")


def _run_all(
    options: argparse.Namespace, experiments: "Sequence[Experiment]"
) -> "Iterator[Results]":
    """The results of each run as they come; one that was interrupted is the last."""
    from sdcontrol.cli import ab_devices
    from sdcontrol.experiments.sweep import run_apart

    if options.workers > 1 or options.ray:
        again = {"resume": options.resume, "overwrite": options.overwrite}
        output, workers = Path(options.output), options.workers
        devices = ab_devices.gpus()[:workers] if workers > 1 and not options.ray else []
        if len(devices) > 1 and all(one.backend == "live" for one in experiments):
            yield from ab_devices.run_on_devices(experiments, output, devices, **again)
        else:
            on_ray = options.ray
            yield from run_apart(experiments, output, workers=workers, on_ray=on_ray, **again)
        return
    for experiment in experiments:
        results = _run_one(options, experiment)
        yield results
        if not results.is_complete:
            return


def _run_one(options: argparse.Namespace, experiment: "Experiment") -> "Results":
    from sdcontrol.experiments.run import run_experiment
    from sdcontrol.experiments.store import RunFolder

    path = Path(options.output) / experiment.name
    folder = RunFolder(path, experiment, resume=options.resume, overwrite=options.overwrite)
    runner = runner_of(experiment)
    try:
        with _watching(experiment.name) as watcher:
            return run_experiment(experiment, runner, folder, watcher)
    finally:
        runner.close()


def runner_of(experiment: "Experiment") -> "Runner":
    """What runs an arm through a block: models are loaded here."""
    if experiment.backend == "trace":
        from sdcontrol.experiments.replayed import TraceRunner

        return TraceRunner(experiment)
    from sdcontrol.experiments.live import LiveRunner, Models
    from sdcontrol.integrations.loading import BUNDLED, load_model, load_tokenizer

    where = {"dtype": experiment.dtype, "device": experiment.device}
    tokenizer = load_tokenizer(experiment.model)
    target = load_model(experiment.model, **where)
    draft_name = experiment.draft_model
    if draft_name == "auto":
        draft_name = BUNDLED if experiment.model == BUNDLED else "none"
    draft = None if draft_name == "none" else load_model(draft_name, role="draft", **where)
    hardware = _hardware(experiment, target)

    def encode(text: str) -> Sequence[int]:
        return [int(token) for token in tokenizer(text)["input_ids"]]

    return LiveRunner(experiment, Models(target, draft, encode, hardware))


def _hardware(experiment: "Experiment", target: "PreTrainedModel") -> "Hardware":
    """The ceilings of the machine: of its profile, or measured, which takes a second."""
    from sdcontrol.engine.ceilings import measure_ceilings
    from sdcontrol.estimators.hardware import Hardware
    from sdcontrol.estimators.machine_profile import read_profile

    if experiment.profile is not None:
        return read_profile(Path(experiment.profile)).hardware
    seen = measure_ceilings(target.device, target.dtype)
    return Hardware.seen(f"measured on {target.device}", seen)


def _show(results: "Results", folder: Path) -> None:
    """Table, verdict, and where the report is."""
    from rich.console import Console

    from sdcontrol.cli.ab_table import tables
    from sdcontrol.experiments.report import write_report

    report = write_report(folder / "report.html", results)
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width of its own
    for table in tables(results):
        console.print(table)
    console.print(results.verdict, highlight=False, markup=False, soft_wrap=True)
    for note in results.notes:
        console.print(f"Note: {note}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Stopped: {results.stopping.reason}.", highlight=False, markup=False)
    console.print(f"Report: {report}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _watching(name: str) -> "Iterator[Watcher]":
    """Progress on standard error, where that is a terminal."""
    from sdcontrol.experiments.run import Silent

    if not sys.stderr.isatty():
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Shown(bar, name)


class _Shown:
    def __init__(self, bar: "Progress", name: str) -> None:
        self._bar, self._name = bar, name
        self._task = bar.add_task(name, total=1.0, left="")

    def turn(self, label: str, *, share: float, left_seconds: float) -> None:
        """Redraw."""
        known = left_seconds == left_seconds
        left = f"at most {left_seconds / 60:.1f} min left" if known else ""
        text = f"{self._name}: {label}"
        self._bar.update(self._task, completed=share, description=text, left=left)
