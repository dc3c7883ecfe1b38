"""Many what-if replays: policies x seeds x traces, each a run of its own.

A `ReplayJob` is plain values and paths, so that it can be run anywhere that sees the files. Knows
how sources, step times and simulations fit together; nothing of terminals or pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from sdcontrol import policies
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.machine_profile import read_profile
from sdcontrol.estimators.roofline import Forward, RooflineCost
from sdcontrol.experiments.parallel import Pool
from sdcontrol.experiments.sources import Opened, Source, arrivals_of, begins_at, open_source
from sdcontrol.outcomes import DEPTH
from sdcontrol.traces.fitted_times import FittedTimes
from sdcontrol.traces.replay_result import ReplayResult
from sdcontrol.traces.simulate import SimulationSettings
from sdcontrol.traces.slo import SLO
from sdcontrol.traces.step_times import CostTimes, NoisyTimes, StepTimes
from sdcontrol.traces.what_if import simulate
from sdcontrol.traces.workload import Workload

__all__ = ["Machine", "ReplayJob", "check_policies", "jobs_of", "opened", "run_job", "run_jobs"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Step times of a machine: of a profile's models, or of forwards by the roofline."""

    name: str
    profile: Path | None = None
    target: Forward | None = None
    draft: Forward | None = None

    def times(self) -> StepTimes:
        """What steps take there; planning is not counted. Raises `ConfigError`."""
        if self.target is None:
            assert self.profile is not None
            return CostTimes(read_profile(self.profile).cost())
        drafts = {} if self.draft is None else {"draft_model": self.draft}
        return CostTimes(RooflineCost(self.target, drafts))


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """One policy on one source."""

    source: Source
    policy: str
    seed: int = 0
    arrivals: Source | None = None  # None: the source's own
    load: float = 1.0  # arrivals come so many times as fast
    num_requests: int | None = None  # the first ones; None: all
    machine: Machine | None = None  # None: step times are fitted to the trace
    relative_noise: float = 0.0  # of step times, drawn anew for every seed
    slo: SLO = field(default_factory=SLO)
    settings: tuple[tuple[str, int], ...] = ()  # of the simulated engine, over the recorded ones


def check_policies(names: Sequence[str]) -> None:
    """Raise `UnknownName` or `ConfigError` for what is no policy, or stands there twice."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--policy {name} stands there twice; give it once")
        if name != "oracle":  # which a replay gives its foresight
            policies.build(name)


def jobs_of(base: Sequence[ReplayJob], names: Sequence[str], num_seeds: int) -> list[ReplayJob]:
    """Every job of `base` under every policy, with every seed."""
    return [
        replace(job, policy=name, seed=seed)
        for job, name, seed in product(base, names, range(num_seeds))
    ]


def run_jobs(
    jobs: Sequence[ReplayJob], pool: Pool, on_done: Callable[[ReplayResult], None]
) -> list[ReplayResult]:
    """All results, in the order of the jobs. `on_done` is told of each as it comes."""
    found: dict[int, ReplayResult] = {}
    for place, result in pool.run(run_job, jobs):
        found[place] = result
        on_done(result)
    return [found[place] for place in range(len(jobs))]


def run_job(job: ReplayJob) -> ReplayResult:
    """Simulate one run. Raises `TraceError`, `CounterfactualError`, `ConfigError`."""
    source = opened(job.source, job.seed if job.source.format == "generated" else 0)
    workload = source.workload
    start_seconds = source.start_seconds
    if job.arrivals is not None:
        arrivals = _arrivals(job.arrivals)
        workload, start_seconds = workload.with_arrivals_of(arrivals), begins_at(arrivals)
    if job.num_requests is not None:
        workload = workload.first(job.num_requests)
    if job.load != 1.0:
        workload = workload.faster(job.load)
    facts = source.trace.header.controller if source.trace is not None else None
    return simulate(
        workload,
        job.policy,
        _times(job),
        SimulationSettings.model_validate({**source.settings.model_dump(), **dict(job.settings)}),
        slo=job.slo,
        seed=job.seed + (facts.seed if facts is not None else 0),
        max_draft_tokens=facts.max_draft_tokens if facts is not None else DEPTH,
        start_seconds=start_seconds / job.load,
    )


def _times(job: ReplayJob) -> StepTimes:
    times = job.machine.times() if job.machine is not None else _fitted(job.source)
    if not job.relative_noise:
        return times
    return NoisyTimes(times, relative_noise=job.relative_noise, seed=job.seed)


@lru_cache(maxsize=4)
def _fitted(source: Source) -> FittedTimes:
    trace = opened(source).trace
    if trace is None:
        raise ConfigError(
            f"{source.path} has no steps to fit step times to; give --hardware and --model"
        )
    return FittedTimes.of(trace)


@lru_cache(maxsize=4)  # the policies of a source follow one another
def opened(source: Source, seed: int = 0) -> Opened:
    """`open_source`, kept."""
    return open_source(source, seed=seed)


@lru_cache(maxsize=4)
def _arrivals(source: Source) -> Workload:
    return arrivals_of(source)
