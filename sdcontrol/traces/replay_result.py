"""What a replay came to: latencies, throughput, waste, and how sure that is.

Knows numbers; nothing of how they came about. Everything is simulated time unless it says otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import FloatArray
from sdcontrol.traces.series import Point
from sdcontrol.traces.slo import SLO

__all__ = ["ArmCounts", "Interval", "ReplayResult", "RequestTimes"]

_QUANTILES = (0.5, 0.9, 0.99)
_LATENCIES = ("ttft_seconds", "tpot_seconds", "end_to_end_seconds")
_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and where 95 % of its bootstrap resamples lie."""

    value: float
    low: float
    high: float


@dataclass(slots=True)
class ArmCounts:
    """One drafter arm: how long its drafts were, and how far they went."""

    lengths: dict[int, int] = field(default_factory=dict)  # draft tokens submitted: how often
    tested_at: dict[int, int] = field(default_factory=dict)  # position: verified after its parents
    accepted_at: dict[int, int] = field(default_factory=dict)
    proposed: int = 0
    accepted: int = 0

    def add(self, proposed: int, accepted: int, count: int) -> None:
        """`count` drafts of `proposed` tokens had `accepted` accepted."""
        self.lengths[proposed] = self.lengths.get(proposed, 0) + count
        self.proposed += proposed * count
        self.accepted += accepted * count
        for position in range(min(accepted + 1, proposed)):
            self.tested_at[position] = self.tested_at.get(position, 0) + count
        for position in range(accepted):
            self.accepted_at[position] = self.accepted_at.get(position, 0) + count

    @property
    def acceptance_by_position(self) -> list[float]:
        """P(a draft token is accepted | those before it were), by its place in the draft."""
        places = range(len(self.tested_at))
        return [self.accepted_at.get(place, 0) / self.tested_at[place] for place in places]


class RequestTimes:
    """When each request came, began and ended. Columns are `[requests]`, in order of their end."""

    COLUMNS: ClassVar = (
        "arrival_seconds",
        "ttft_seconds",
        "tpot_seconds",
        "end_to_end_seconds",
        "output_tokens",
    )

    def __init__(self, ids: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
        self.ids = tuple(ids)
        self._columns = {name: np.array(values, dtype=float) for name, values in columns.items()}

    def __getitem__(self, name: str) -> FloatArray:
        """One column."""
        return self._columns[name]

    def having(self, name: str) -> NDArray[np.bool_]:
        """Which requests have such a time: one per further token only where there was any."""
        return self["output_tokens"] > (1 if name == "tpot_seconds" else 0)

    def within(self, slo: SLO) -> FloatArray:
        """1 for each request that kept the limits, else 0."""
        kept = np.ones(len(self.ids), dtype=bool)
        for name in ("ttft_seconds", "tpot_seconds"):
            limit: float | None = getattr(slo, name)
            if limit is not None:
                kept &= self[name] <= limit
        return kept.astype(float)


@dataclass(frozen=True, slots=True, eq=False)
class ReplayResult:
    """One policy on one workload, simulated."""

    policy: str
    workload: str
    num_requests: int  # that ended
    num_refused: int  # that could never run
    refusals: tuple[str, ...]  # the first reasons
    num_steps: int
    preemptions: int
    seconds: float  # from the beginning to the last token, idle time included
    busy_seconds: float
    output_tokens: int
    wasted_draft_tokens: int  # drafted and not accepted
    off_choices: int  # requests times steps without drafts
    arms: Mapping[str, ArmCounts]
    phase_seconds: Mapping[str, float]  # verify, draft, controller, overhead
    regime_seconds: Mapping[str, float]  # off, by arm, mixed
    bound_shares: Mapping[str, float]  # memory, compute: of the sampled busy time
    series: tuple[Point, ...]
    times: RequestTimes
    slo: SLO

    @property
    def tokens_per_second(self) -> float:
        """Throughput, idle time included."""
        return self.output_tokens / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def tokens_per_busy_second(self) -> float:
        """Throughput of the steps alone."""
        return self.output_tokens / self.busy_seconds if self.busy_seconds > 0.0 else 0.0

    @property
    def requests_within_slo(self) -> int:
        """Requests that kept the limits."""
        return int(self.times.within(self.slo).sum())

    @property
    def goodput_requests_per_second(self) -> float:
        """Requests within the limits, per second."""
        return self.requests_within_slo / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def goodput_tokens_per_second(self) -> float:
        """Tokens of requests within the limits, per second."""
        tokens = float((self.times.within(self.slo) * self.times["output_tokens"]).sum())
        return tokens / self.seconds if self.seconds > 0.0 else 0.0

    def throughput_interval(self, *, seed: int = 0) -> Interval:
        """Tokens per busy second, resampled over blocks of time."""
        tokens = np.array([point.output_tokens for point in self.series], dtype=float)
        busy = np.array([point.busy_seconds for point in self.series])
        if not busy.sum() > 0.0:
            return Interval(0.0, 0.0, 0.0)
        rows = np.random.default_rng(seed).integers(len(busy), size=(_RESAMPLES, len(busy)))
        rates = tokens[rows].sum(axis=1) / np.maximum(busy[rows].sum(axis=1), 1e-300)
        low, high = np.quantile(rates, [0.025, 0.975])
        return Interval(self.tokens_per_busy_second, float(low), float(high))

    def latency(self, name: str, quantile: float, *, seed: int = 0) -> Interval:
        """A quantile of `ttft_seconds`, `tpot_seconds` or `end_to_end_seconds`, over requests that have one."""
        values = np.sort(self.times[name][self.times.having(name)])
        if not len(values):
            return Interval(0.0, 0.0, 0.0)
        generator = np.random.default_rng(seed)
        # The quantile of a resample is the order statistic at a binomial rank: no need to draw all.
        ranks = generator.binomial(len(values), quantile, size=_RESAMPLES).clip(0, len(values) - 1)
        low, high = np.quantile(values[ranks], [0.025, 0.975])
        return Interval(float(np.quantile(values, quantile)), float(low), float(high))

    def to_json(self) -> dict[str, object]:
        """Everything but the requests one by one, for JSON."""
        throughput = self.throughput_interval()
        return {
            "is_simulated": True,
            "policy": self.policy,
            "workload": self.workload,
            "num_requests": self.num_requests,
            "num_refused": self.num_refused,
            "refusals": list(self.refusals),
            "num_steps": self.num_steps,
            "preemptions": self.preemptions,
            "seconds": self.seconds,
            "busy_seconds": self.busy_seconds,
            "output_tokens": self.output_tokens,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_busy_second": _interval(throughput),
            "goodput_requests_per_second": self.goodput_requests_per_second,
            "goodput_tokens_per_second": self.goodput_tokens_per_second,
            "requests_within_slo": self.requests_within_slo,
            "slo": self.slo.model_dump(mode="json"),
            "wasted_draft_tokens": self.wasted_draft_tokens,
            "off_choices": self.off_choices,
            "arms": {name: _arm(counts) for name, counts in self.arms.items()},
            "phase_seconds": dict(self.phase_seconds),
            "regime_seconds": dict(self.regime_seconds),
            "bound_shares": dict(self.bound_shares),
            "latency": {
                name: {f"p{100 * q:g}": _interval(self.latency(name, q)) for q in _QUANTILES}
                for name in _LATENCIES
            },
            "series": [point.to_json() for point in self.series],
        }


def _interval(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _arm(counts: ArmCounts) -> dict[str, object]:
    return {
        "proposed": counts.proposed,
        "accepted": counts.accepted,
        "lengths": {str(length): count for length, count in sorted(counts.lengths.items())},
        "acceptance_by_position": counts.acceptance_by_position,
    }
