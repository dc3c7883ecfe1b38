"""Replays compared: one row per source and policy, best first, with bootstrap intervals.

With several seeds a row holds means over them, of the bounds too. Knows results of replays; nothing
of how they are shown. Everything here is simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np

from sdcontrol.experiments.replay_runs import ReplayJob
from sdcontrol.traces.replay_result import Interval, ReplayResult

__all__ = ["Comparison", "Measure", "Row", "compare"]

Measure = Literal["goodput", "throughput", "tpot"]
_BUSY = 0.95  # of the time: from here on throughput is the machine's, below it is the arrivals'
_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one source. Durations are in seconds, rates per second."""

    source: str
    policy: str
    num_seeds: int
    tokens_per_second: float  # idle time included
    tokens_per_busy_second: Interval
    goodput_tokens_per_second: Interval  # of requests within the limits
    ttft_median: Interval
    ttft_p99: Interval
    tpot_median: Interval
    tpot_p99: Interval
    busy_share: float
    wasted_share: float  # of the draft tokens computed, those not accepted
    off_share: float  # of requests times steps, those without drafts
    relative: float = 1.0  # to the best of its source, by the measure; at most 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows, source by source in the order given, best first; and what best means."""

    measure: Measure
    rows: tuple[Row, ...]

    @property
    def words(self) -> str:
        """What the order follows."""
        return {
            "goodput": "tokens per second of requests within the limits",
            "throughput": "output tokens per second",
            "tpot": "median time per output token, since arrivals leave the machine idle at times",
        }[self.measure]

    def to_json(self) -> dict[str, object]:
        """Plain numbers."""
        return {"ranked_by": self.measure, "rows": [asdict(row) for row in self.rows]}


def compare(
    jobs: Sequence[ReplayJob], results: Sequence[ReplayResult], names: Mapping[str, str]
) -> Comparison:
    """Rank what `jobs` came to. `names` has what a source is called, by its path."""
    cells: dict[tuple[str, str], list[ReplayResult]] = {}
    for job, result in zip(jobs, results, strict=True):
        source = names[str(job.source.path)]
        cells.setdefault((source, job.policy), []).append(result)
    rows = [_row(source, policy, runs) for (source, policy), runs in cells.items()]
    measure = _measure(jobs, rows)
    ranked = [row for name in names.values() for row in _ranked(rows, name, measure)]
    return Comparison(measure, tuple(ranked))


def _measure(jobs: Sequence[ReplayJob], rows: Sequence[Row]) -> Measure:
    if any(job.slo.ttft_seconds is not None or job.slo.tpot_seconds is not None for job in jobs):
        return "goodput"
    return "throughput" if min(row.busy_share for row in rows) >= _BUSY else "tpot"


def _ranked(rows: Sequence[Row], source: str, measure: Measure) -> list[Row]:
    score = _SCORES[measure]
    found = sorted((row for row in rows if row.source == source), key=score, reverse=True)
    best = score(found[0]) if found else 0.0
    return [replace(row, relative=score(row) / best if best else 1.0) for row in found]


def _pace(row: Row) -> float:
    return 1.0 / row.tpot_median.value if row.tpot_median.value > 0.0 else 0.0


_SCORES: Mapping[Measure, Callable[[Row], float]] = {
    "goodput": lambda row: row.goodput_tokens_per_second.value,
    "throughput": lambda row: row.tokens_per_second,
    "tpot": _pace,
}


def _row(source: str, policy: str, runs: Sequence[ReplayResult]) -> Row:
    drafted = sum(run.wasted_draft_tokens + _accepted(run) for run in runs)
    chosen = sum(run.off_choices + _drafts(run) for run in runs)
    return Row(
        source=source,
        policy=policy,
        num_seeds=len(runs),
        tokens_per_second=fmean(run.tokens_per_second for run in runs),
        tokens_per_busy_second=_mean([run.throughput_interval() for run in runs]),
        goodput_tokens_per_second=_mean([_goodput(run) for run in runs]),
        ttft_median=_mean([run.latency("ttft_seconds", 0.5) for run in runs]),
        ttft_p99=_mean([run.latency("ttft_seconds", 0.99) for run in runs]),
        tpot_median=_mean([run.latency("tpot_seconds", 0.5) for run in runs]),
        tpot_p99=_mean([run.latency("tpot_seconds", 0.99) for run in runs]),
        busy_share=fmean(run.busy_seconds / run.seconds if run.seconds else 1.0 for run in runs),
        wasted_share=sum(run.wasted_draft_tokens for run in runs) / drafted if drafted else 0.0,
        off_share=sum(run.off_choices for run in runs) / chosen if chosen else 1.0,
    )


def _accepted(run: ReplayResult) -> int:
    return sum(counts.accepted for counts in run.arms.values())


def _drafts(run: ReplayResult) -> int:
    return sum(sum(counts.lengths.values()) for counts in run.arms.values())


def _mean(intervals: Sequence[Interval]) -> Interval:
    """Over seeds; as wide as each is on average, which is wide where seeds are independent."""
    return Interval(*(fmean(getattr(i, name) for i in intervals) for name in Interval.__slots__))


def _goodput(run: ReplayResult, seed: int = 0) -> Interval:
    """Tokens within the limits per second, resampled over requests."""
    tokens = run.times.within(run.slo) * run.times["output_tokens"]
    if not len(tokens) or run.seconds <= 0.0:
        return Interval(0.0, 0.0, 0.0)
    generator = np.random.default_rng(seed)
    sums = [
        tokens[generator.integers(len(tokens), size=len(tokens))].sum() for _ in range(_RESAMPLES)
    ]
    low, high = np.quantile(sums, [0.025, 0.975]) / run.seconds
    return Interval(run.goodput_tokens_per_second, float(low), float(high))
