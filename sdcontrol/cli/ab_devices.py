"""Live runs of a matrix side by side, each on a GPU of its own.

Runs that share a device would spoil each other's times, so every device has one process, which takes
its runs in turn. Knows which run goes where; nothing of what is compared.
"""

from collections.abc import Sequence
from pathlib import Path

from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.parallel import Pool
from sdcontrol.experiments.results import Results
from sdcontrol.experiments.store import RunFolder

__all__ = ["gpus", "run_on_devices"]

Group = tuple[list[dict[str, object]], str, bool, bool]


def gpus() -> list[str]:
    """The names of this machine's GPUs."""
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def run_on_devices(
    experiments: Sequence[Experiment],
    output: Path,
    devices: Sequence[str],
    *,
    resume: bool,
    overwrite: bool,
) -> list[Results]:
    """Run number i goes to device i, i + 1 to the next, and so on; results in order."""
    placed = [
        experiment.model_copy(update={"device": devices[index % len(devices)]})
        for index, experiment in enumerate(experiments)
    ]
    groups: list[Group] = [
        (
            [dict(one.resolved()) for one in placed[first :: len(devices)]],
            str(output),
            resume,
            overwrite,
        )
        for first in range(min(len(devices), len(placed)))
    ]
    for _ in Pool(len(groups)).run(run_group, groups):
        pass
    return [Results.load(output / one.name / "results.json") for one in placed]


def run_group(group: Group) -> int:
    """All runs of one device, one after another; how many there were."""
    from sdcontrol.cli.ab import runner_of
    from sdcontrol.experiments.run import run_experiment

    settings, output, resume, overwrite = group
    for each in settings:
        experiment = Experiment.model_validate(each)
        path = Path(output) / experiment.name
        folder = RunFolder(path, experiment, resume=resume, overwrite=overwrite)
        runner = runner_of(experiment)
        try:
            results = run_experiment(experiment, runner, folder)
        finally:
            runner.close()
        if not results.is_complete:  # interrupted: so are those after it
            break
    return len(settings)
