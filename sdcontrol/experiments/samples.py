"""A few evenly spaced steps out of many, in bounded memory.

Knows observations and their times; the arithmetic of a forward comes from a `Forward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from sdcontrol.core import Observation
from sdcontrol.estimators.roofline import Forward
from sdcontrol.experiments.results import StepSample

__all__ = ["MOST_STEPS", "SampledStep", "StepSampler", "joined"]

MOST_STEPS = 2000  # kept of an arm


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One step, and when it was."""

    observation: Observation
    begun_seconds: float
    measured_seconds: float
    emitted: int
    predicted_seconds: float | None


@dataclass(slots=True)
class StepSampler:
    """Keeps every k-th step; k doubles whenever there are too many."""

    most: int
    _kept: list[SampledStep] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, step: SampledStep) -> None:
        """Keep it, if it is its turn."""
        if self._seen % self._every == 0:
            self._kept.append(step)
            if len(self._kept) >= 2 * self.most:
                self._kept = self._kept[::2]
                self._every *= 2
        self._seen += 1

    def sample(self, forward: Forward | None) -> StepSample:
        """The columns; without a forward, nobody knows what was computed."""
        kept = self._kept
        works = [_work(step.observation, forward) for step in kept]
        timings = [step.observation.timing for step in kept]
        return StepSample(
            time_seconds=tuple(step.begun_seconds for step in kept),
            batch_size=tuple(len(step.observation.view.requests) for step in kept),
            num_tokens=tuple(_load(step.observation)[0] for step in kept),
            kv_tokens=tuple(_load(step.observation)[1] for step in kept),
            intensity=tuple(None if w is None else w[0] / w[1] for w in works),
            flops_per_second=tuple(
                None
                if work is None or not timing.verify_seconds > 0
                else work[0] / timing.verify_seconds
                for work, timing in zip(works, timings, strict=True)
            ),
            predicted_seconds=tuple(step.predicted_seconds for step in kept),
            measured_seconds=tuple(step.measured_seconds for step in kept),
            draft_seconds=tuple(sum(t.draft_seconds.values()) for t in timings),
            verify_seconds=tuple(timing.verify_seconds for timing in timings),
            controller_seconds=tuple(timing.controller_seconds for timing in timings),
            overhead_seconds=tuple(timing.overhead_seconds for timing in timings),
            emitted=tuple(step.emitted for step in kept),
            choices=tuple(_choices(step.observation) for step in kept),
        )


def joined(samples: Sequence[StepSample], most: int = MOST_STEPS) -> StepSample:
    """The samples of several blocks as one, thinned out evenly."""
    number = sum(len(sample.time_seconds) for sample in samples)
    rows = np.unique(np.linspace(0, max(number - 1, 0), min(number, most)).astype(int))
    columns: dict[str, tuple[object, ...]] = {}
    for name in StepSample.model_fields:
        column = list(chain.from_iterable(getattr(sample, name) for sample in samples))
        columns[name] = tuple(column[row] for row in rows) if column else ()
    return StepSample.model_validate(columns)


def _load(observation: Observation) -> tuple[int, int]:
    """Tokens that the verifying forward computed, and KV tokens that it read."""
    view = observation.view
    tokens = len(view.requests) + sum(observation.proposed) + view.prefill_tokens
    return tokens, sum(request.context_tokens for request in view.requests)


def _work(observation: Observation, forward: Forward | None) -> tuple[float, float] | None:
    """FLOPs and bytes of the verifying forward."""
    tokens, kv_tokens = _load(observation)
    if forward is None or not tokens:
        return None
    profile = forward.profile(tokens, kv_tokens, max(len(observation.view.requests), 1))
    return profile.flops, profile.bytes


def _choices(observation: Observation) -> dict[str, int]:
    found: dict[str, int] = {}
    for choice in observation.plan.choices:
        name = f"{choice.drafter} {choice.num_draft_tokens}" if choice.drafter else "off"
        found[name] = found.get(name, 0) + 1
    return found
