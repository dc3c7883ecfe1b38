"""Many simulated comparisons at once: on the cores of this machine, or on Ray.

Live comparisons are run in turn, since they would disturb each other's times. Knows experiments and
folders; nothing of what a comparison is.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from pydantic import JsonValue

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.results import Results
from sdcontrol.experiments.run import run_experiment
from sdcontrol.experiments.store import RunFolder

__all__ = ["run_apart"]

Job = tuple[Mapping[str, JsonValue], str, bool, bool]


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
            f"{live[0]} runs live, where runs beside each other would spoil each other's times; "
            "leave out --workers and --ray, or set backend: trace"
        )
    jobs: list[Job] = [
        (experiment.resolved(), str(output / experiment.name), resume, overwrite)
        for experiment in experiments
    ]
    paths = _on_ray(jobs) if on_ray else _on_cores(jobs, workers)
    return [Results.load(Path(path)) for path in paths]


def run_job(job: Job) -> str:
    """One comparison; the path of its results."""
    from sdcontrol.experiments.replayed import TraceRunner

    settings, path, resume, overwrite = job
    experiment = Experiment.model_validate(settings)
    folder = RunFolder(Path(path), experiment, resume=resume, overwrite=overwrite)
    run_experiment(experiment, TraceRunner(experiment), folder)
    return str(folder.results_path)


def _on_cores(jobs: Sequence[Job], workers: int) -> list[str]:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(run_job, jobs))


def _on_ray(jobs: Sequence[Job]) -> list[str]:
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "--ray needs Ray, which is not installed; pip install 'sdcontrol[ray]'"
        ) from error
    ray.init(ignore_reinit_error=True)
    remote: Callable[[Job], object] = ray.remote(run_job).remote
    found: list[str] = ray.get([remote(job) for job in jobs])
    return found
