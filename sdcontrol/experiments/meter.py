"""What one arm did in one block, added up step by step in bounded memory.

Knows observations, tokens and times on a clock that it is told; nothing of engines or models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sdcontrol.core import Observation
from sdcontrol.estimators.roofline import Forward
from sdcontrol.experiments.config import Slo
from sdcontrol.experiments.records import DraftCounts, RunRecord
from sdcontrol.experiments.results import LATENCIES, StepSample
from sdcontrol.experiments.samples import SampledStep, StepSampler

__all__ = ["Meter"]

_QUANTILES = (50, 90, 99)


@dataclass(slots=True)
class _Drafter:
    steps: int = 0
    drafted: int = 0
    proposed: int = 0
    accepted: int = 0
    tested_at: list[int] = field(default_factory=list)  # by position
    accepted_at: list[int] = field(default_factory=list)

    def add(self, drafted: int, proposed: int, accepted: int) -> None:
        """One request in one step. Of a tree, positions are depths."""
        self.steps += proposed > 0
        self.drafted += drafted
        self.proposed += proposed
        self.accepted += accepted
        tested = min(accepted + 1, proposed)
        while len(self.tested_at) < tested:
            self.tested_at.append(0)
            self.accepted_at.append(0)
        for position in range(tested):
            self.tested_at[position] += 1
            self.accepted_at[position] += position < accepted

    def counts(self) -> DraftCounts:
        return DraftCounts(
            steps=self.steps,
            drafted=self.drafted,
            proposed=self.proposed,
            accepted=self.accepted,
            by_position=tuple(zip(self.tested_at, self.accepted_at, strict=True)),
        )


@dataclass(slots=True)
class _Life:
    """One request: when it came, its first and its last token, and their number."""

    arrival_seconds: float
    first_seconds: float | None = None
    last_seconds: float = 0.0
    num_tokens: int = 0


class Meter:
    """Fed with every step; times are seconds since the block began."""

    def __init__(self, *, most_steps: int, slo: Slo, start_seconds: float) -> None:
        self._sampler = StepSampler(most_steps)
        self._slo = slo
        self._start = start_seconds
        self._drafters: dict[str, _Drafter] = {}
        self._lengths: dict[str, dict[str, int]] = {}
        self._phases = dict.fromkeys(("draft", "verify", "controller", "overhead"), 0.0)
        self._lives: dict[str, _Life] = {}

    def arrive(self, request: str, now: float) -> None:
        """A request came."""
        self._lives[request] = _Life(now)

    def emit(self, request: str, num_tokens: int, now: float) -> None:
        """A request got tokens."""
        life = self._lives[request]
        if not num_tokens:
            return
        if life.first_seconds is None:
            life.first_seconds = now
        life.last_seconds = now
        life.num_tokens += num_tokens

    def step(
        self,
        observation: Observation,
        *,
        begun_seconds: float,
        measured_seconds: float,
        emitted: int,
        predicted_seconds: float | None,
    ) -> None:
        """A step ended."""
        timing = observation.timing
        self._phases["draft"] += sum(timing.draft_seconds.values())
        self._phases["verify"] += timing.verify_seconds
        self._phases["controller"] += timing.controller_seconds
        self._phases["overhead"] += timing.overhead_seconds
        for row, choice in enumerate(observation.plan.choices):
            name = choice.drafter or "off"
            lengths = self._lengths.setdefault(name, {})
            length = str(choice.num_draft_tokens)
            lengths[length] = lengths.get(length, 0) + 1
            if choice.drafter is not None and observation.drafted[row]:
                self._drafters.setdefault(name, _Drafter()).add(
                    observation.drafted[row], observation.proposed[row], observation.accepted[row]
                )
        begun = self._start + begun_seconds
        self._sampler.add(
            SampledStep(observation, begun, measured_seconds, emitted, predicted_seconds)
        )

    def record(
        self,
        arm: str,
        *,
        seconds: float,
        forward: Forward | None,
        more: Mapping[str, float],
    ) -> RunRecord:
        """All of it. `more` are metrics that only the runner knows."""
        latencies = _latencies(list(self._lives.values()))
        steps = self._sampler.sample(forward)
        tokens = sum(life.num_tokens for life in self._lives.values())
        metrics = {
            "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
            "slo_requests_per_second": self._kept() / seconds if seconds > 0 else 0.0,
            **_quantiles(latencies),
            **self._drafting(tokens),
            **self._shares(),
            **_intensity(steps, forward),
            **more,
        }
        return RunRecord(
            arm=arm,
            start_seconds=self._start,
            seconds=seconds,
            tokens=tokens,
            num_requests=len(self._lives),
            metrics=metrics,
            lengths=self._lengths,
            drafts={name: drafter.counts() for name, drafter in self._drafters.items()},
            latencies=latencies,
            steps=steps,
        )

    def _kept(self) -> int:
        """Requests within the SLOs."""
        most_first = self._slo.ttft_seconds or float("inf")
        most_each = self._slo.tpot_seconds or float("inf")
        return sum(
            life.first_seconds is not None
            and life.first_seconds - life.arrival_seconds <= most_first
            and _each(life) <= most_each
            for life in self._lives.values()
        )

    def _drafting(self, tokens: int) -> dict[str, float]:
        steps, drafted, proposed, accepted = (
            sum(getattr(drafter, name) for drafter in self._drafters.values())
            for name in ("steps", "drafted", "proposed", "accepted")
        )
        found: dict[str, float] = {}
        if steps:
            found["acceptance_length"] = 1.0 + accepted / steps
            found["acceptance_rate"] = accepted / proposed
        if drafted and tokens:
            found["wasted_draft_tokens"] = (drafted - accepted) / tokens
        return found

    def _shares(self) -> dict[str, float]:
        total = sum(self._phases.values())
        return {f"{name}_share": spent / total for name, spent in self._phases.items() if total > 0}


def _each(life: _Life) -> float:
    """Seconds per output token after the first; 0 where there is none."""
    if life.first_seconds is None or life.num_tokens < 2:
        return 0.0
    return (life.last_seconds - life.first_seconds) / (life.num_tokens - 1)


def _latencies(lives: Sequence[_Life]) -> dict[str, tuple[float, ...]]:
    answered = [life for life in lives if life.first_seconds is not None]
    columns = (
        [(life.first_seconds or 0.0) - life.arrival_seconds for life in answered],
        [_each(life) for life in answered if life.num_tokens > 1],
        [life.last_seconds - life.arrival_seconds for life in answered],
    )
    return {name: tuple(column) for name, column in zip(LATENCIES, columns, strict=True)}


def _quantiles(latencies: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {
        f"{name}_p{quantile}": float(np.percentile(values, quantile))
        for name, values in latencies.items()
        for quantile in _QUANTILES
        if values
    }


def _intensity(steps: StepSample, forward: Forward | None) -> dict[str, float]:
    """Mean over sampled steps; against the ridge, above 1 arithmetic is the limit."""
    known = [intensity for intensity in steps.intensity if intensity is not None]
    if forward is None or not known:
        return {}
    mean = float(np.mean(known))
    return {
        "intensity": mean,
        "intensity_over_ridge": mean / forward.hardware.ridge_flops_per_byte,
    }
