"""The metrics of `prometheus`, by what they tell: decoding, time, faults, intensity.

Each group registers its own and takes what concerns it out of an observation. Knows nothing of planners
beyond the few facts that a controller offers.
"""

import math
from collections import Counter as Counts
from collections.abc import Iterator
from weakref import WeakSet

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sdcontrol.core import Observation
from sdcontrol.estimators.cost import Prediction
from sdcontrol.estimators.loads import is_plausible, verify_load
from sdcontrol.estimators.roofline import Forward

__all__ = ["DecodingMetrics", "FaultMetrics", "IntensityMetrics", "TimeMetrics"]

_STEP_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0, 4.0)
_CONTROLLER_BUCKETS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.1)


class DecodingMetrics:
    """Drafts, and the tokens that came of them."""

    def __init__(self, registry: CollectorRegistry, namespace: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace=namespace, registry=registry)

        spec, pos = "spec_decode_num_", "Draft tokens accepted, by position in the draft, from 0."
        waste = "Draft tokens computed in vain: rejected, or trimmed before verification."
        choices = "Choices by drafter and length, per request; drafter off has length 0."
        sent = "Draft tokens submitted to verification."
        self._steps = counter("steps", "Decoding steps.")
        self._emitted = counter("generation_tokens", "Tokens emitted by decoding steps.")
        self._drafts = counter(spec + "drafts", "Drafts submitted to verification.", "drafter")
        self._proposed = counter(spec + "draft_tokens", sent, "drafter")
        self._accepted = counter(spec + "accepted_tokens", "Draft tokens accepted.", "drafter")
        self._by_position = counter(spec + "accepted_tokens_per_pos", pos, "drafter", "position")
        self._wasted = counter("wasted_draft_tokens", waste, "drafter", "reason")
        self._choices = counter("choices", choices, "drafter", "num_draft_tokens")
        agreed = "Emitted tokens that an unused free drafter would have had accepted."
        shadowed = "Emitted tokens at which an unused free drafter was scored."
        self._shadowed = counter("shadow_tokens", shadowed, "drafter")
        self._agreed = counter("shadow_accepted_tokens", agreed, "drafter")
        self._running = Gauge(
            "num_requests_running",
            "Requests decoding in the last step.",
            namespace=namespace,
            registry=registry,
        )

    def observe(self, observation: Observation) -> None:
        """Count the rows of one step; the metrics are touched once per step, not once per row."""
        self._running.set(len(observation.view.requests))
        if not observation.view.requests:
            return
        self._steps.inc()
        self._emitted.inc(sum(observation.emitted))
        choices = Counts((c.drafter, c.num_draft_tokens) for c in observation.plan.choices)
        for (drafter, length), times in choices.items():
            self._choices.labels(drafter or "off", str(length)).inc(times)
        for drafter in {choice.drafter for choice in observation.plan.choices} - {None}:
            self._count_drafter(str(drafter), observation)
        for drafter, counts in observation.shadow.items():
            scored = [n for n, e in zip(observation.emitted, counts, strict=True) if e is not None]
            self._shadowed.labels(drafter).inc(sum(scored))
            self._agreed.labels(drafter).inc(sum(count or 0 for count in counts))

    def _count_drafter(self, arm: str, observation: Observation) -> None:
        choices = observation.plan.choices
        rows = [row for row, choice in enumerate(choices) if choice.drafter == arm]
        drafted, proposed, accepted = (
            [counts[row] for row in rows]
            for counts in (observation.drafted, observation.proposed, observation.accepted)
        )
        self._drafts.labels(arm).inc(sum(count > 0 for count in proposed))
        self._proposed.labels(arm).inc(sum(proposed))
        self._accepted.labels(arm).inc(sum(accepted))
        for position in range(max(accepted)):  # on the accepted path, where drafts are trees
            reached = sum(count > position for count in accepted)
            self._by_position.labels(arm, str(position)).inc(reached)
        self._wasted.labels(arm, "rejected").inc(sum(proposed) - sum(accepted))
        self._wasted.labels(arm, "trimmed").inc(max(sum(drafted) - sum(proposed), 0))


class TimeMetrics:
    """Where the time of a step goes, and where it was expected to go."""

    def __init__(self, registry: CollectorRegistry, namespace: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, namespace=namespace, registry=registry, buckets=buckets)

        self._measured = histogram("step_time_seconds", "Measured time of a step.", _STEP_BUCKETS)
        self._predicted = histogram(
            "predicted_step_time_seconds", "Time that a step was expected to take.", _STEP_BUCKETS
        )
        self._controller = histogram(
            "controller_time_seconds", "Time of the controller in a step.", _CONTROLLER_BUCKETS
        )
        self._phases = Counter(
            "phase_time_seconds",
            "Time by phase: draft (by family), verify, controller, overhead.",
            ("phase", "drafter"),
            namespace=namespace,
            registry=registry,
        )
        self._drift = Gauge(
            "step_time_drift",
            "Running log-ratio of measured to predicted step time; 0 where predictions hold.",
            namespace=namespace,
            registry=registry,
        )

    def observe(self, observation: Observation, prediction: Prediction | None) -> None:
        """What a clock cannot have said is left out."""
        if not observation.view.requests:
            return
        timing = observation.timing
        if is_plausible(timing.total_seconds):
            self._measured.observe(timing.total_seconds)
        if is_plausible(timing.controller_seconds):
            self._controller.observe(timing.controller_seconds)
        if prediction is not None and is_plausible(prediction.predicted_seconds):
            self._predicted.observe(prediction.predicted_seconds)
        for phase, family, seconds in _phases(observation):
            if is_plausible(seconds):
                self._phases.labels(phase, family).inc(seconds)

    def observe_cost(self, cost: object) -> None:
        """The drift that an online cost has noticed."""
        drift = getattr(cost, "drift", None)
        if isinstance(drift, float) and math.isfinite(drift):
            self._drift.set(drift)


def _phases(observation: Observation) -> Iterator[tuple[str, str, float]]:
    timing = observation.timing
    for family, seconds in timing.draft_seconds.items():
        yield "draft", family, seconds
    yield "verify", "", timing.verify_seconds
    yield "controller", "", timing.controller_seconds
    yield "overhead", "", timing.overhead_seconds


class FaultMetrics:
    """What went wrong, and what is out of use because of it."""

    def __init__(self, registry: CollectorRegistry, namespace: str) -> None:
        self._faults = Counter(
            "faults",
            "Guards that fired, by kind.",
            ("kind",),
            namespace=namespace,
            registry=registry,
        )
        self._quarantines = Counter(
            "quarantines",
            "Times that a drafter family or the policy was taken out of use.",
            ("subject",),
            namespace=namespace,
            registry=registry,
        )
        self._is_quarantined = Gauge(
            "policy_quarantined",
            "1 while a policy is out of use after repeated faults.",
            namespace=namespace,
            registry=registry,
        )
        self._without_policy: WeakSet[object] = WeakSet()  # planners, each of which counts once

    def observe(self, observation: Observation) -> None:
        """Count the faults recorded with the step."""
        for fault in observation.faults:
            what = fault.partition(":")[0]
            if what.startswith("drafter ") and what.endswith(" quarantined"):
                family = what.removeprefix("drafter ").removesuffix(" quarantined")
                self._quarantines.labels(family).inc()
                self._faults.labels("drafter_quarantined").inc()
            else:
                self._faults.labels("_".join(what.split()[:4])).inc()

    def observe_planner(self, planner: object) -> None:
        """Whether a controller has given its policy up; of several, whether any has."""
        is_quarantined = getattr(planner, "is_quarantined", None)
        if is_quarantined is None:
            return
        if not is_quarantined:
            self._without_policy.discard(planner)
        elif planner not in self._without_policy:
            self._without_policy.add(planner)
            self._quarantines.labels("policy").inc()
        self._is_quarantined.set(bool(self._without_policy))


class IntensityMetrics:
    """How far the target's forwards are from the ridge of the machine."""

    def __init__(self, registry: CollectorRegistry, namespace: str, target: Forward) -> None:
        self._target = target
        self._latest: Observation | None = None
        intensity = Gauge(
            "arithmetic_intensity_flops_per_byte",
            "Of the last verification, by the roofline.",
            namespace=namespace,
            registry=registry,
        )
        intensity.set_function(self._intensity)  # by whoever asks: a step has no time for it
        ridge = Gauge(
            "ridge_flops_per_byte",
            "The intensity from which on the machine is compute-bound.",
            namespace=namespace,
            registry=registry,
        )
        ridge.set(target.hardware.ridge_flops_per_byte)

    def observe(self, observation: Observation) -> None:
        """Of the forward that this step ran."""
        if observation.view.requests:
            self._latest = observation

    def _intensity(self) -> float:
        if self._latest is None:
            return 0.0
        load = verify_load(self._latest)
        forward = self._target.profile(load.num_tokens, load.kv_tokens, load.num_requests)
        return forward.intensity_flops_per_byte
