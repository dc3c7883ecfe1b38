"""Many simulated comparisons at once: on the cores of this machine, or on Ray.

Live comparisons are refused here, since they would disturb each other's times. Knows experiments and
folders; nothing of what a comparison is.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.parallel import Pool
from sdcontrol.experiments.results import Results
from sdcontrol.experiments.run import run_experiment
from sdcontrol.experiments.store import RunFolder

__all__ = ["run_apart"]

Job = tuple[Experiment, str, bool, bool]


def run_apart(
    experiments: Sequence[Experiment],
    output: Path,
    *,
    workers: int,
    on_ray: bool,
    resume: bool,
    overwrite: bool,
) -> list[Results]:
    """Each in a process of its own; results in the order of the experiments.

    Raises `ConfigError` for live ones, and where Ray is asked for and not installed.
    """
    live = [experiment.name for experiment in experiments if experiment.backend == "live"]
    if live:
        raise ConfigError(
            f"{live[0]} runs live, where runs beside each other would spoil each other's times unless "
            "each has a GPU; leave out --workers and --ray, or set backend: trace"
        )
    jobs: list[Job] = [
        (experiment, str(output / experiment.name), resume, overwrite) for experiment in experiments
    ]
    pool = Pool(os.cpu_count() or 1, "local") if on_ray else Pool(workers)
    paths = dict(pool.run(run_job, jobs))
    return [Results.load(Path(paths[place])) for place in range(len(jobs))]


def run_job(job: Job) -> str:
    """One comparison; the path of its results."""
    from sdcontrol.experiments.replayed import TraceRunner

    experiment, path, resume, overwrite = job  # as data it would forget what the file left unsaid
    folder = RunFolder(Path(path), experiment, resume=resume, overwrite=overwrite)
    run_experiment(experiment, TraceRunner(experiment), folder)
    return str(folder.results_path)
