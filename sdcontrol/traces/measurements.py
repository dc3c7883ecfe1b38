"""What a simulation came to: collected step by step in bounded memory, closed into a result.

Knows observations and seconds; nothing of schedulers or policies.
"""

from array import array
from collections import defaultdict
from collections.abc import Mapping

from sdcontrol.core import Observation
from sdcontrol.traces.replay_result import ArmCounts, ReplayResult, RequestTimes
from sdcontrol.traces.series import Series
from sdcontrol.traces.simulated_drafts import LiveRequest
from sdcontrol.traces.slo import SLO
from sdcontrol.traces.step_times import StepTimes, StepWork, is_compute_bound

__all__ = ["Measurements"]

_BOUND_EVERY = 16  # steps: pricing a step twice more for each would cost more than it tells
_SIDE = 33  # lengths of a draft: no table goes deeper than 32
_MOST_REFUSALS = 8  # messages that are kept


class Measurements:
    """Sums over steps and times of requests: some 40 bytes a request, whatever its length."""

    def __init__(self, times: StepTimes, start_seconds: float = 0.0) -> None:
        self._start_seconds = start_seconds
        self._times = times
        self._ids: list[str] = []
        self._columns = {name: array("d") for name in RequestTimes.COLUMNS}
        self._outcomes: dict[str, list[int]] = {}  # by arm: how often proposed, accepted came
        self._regimes: defaultdict[str, float] = defaultdict(float)
        self._bounds: defaultdict[str, float] = defaultdict(float)
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._series = Series()
        self._refusals: list[str] = []
        self._num_refused = 0
        self._num_steps = 0
        self._prefill_emitted = 0
        self._emitted = 0
        self._wasted = 0
        self._chosen_off = 0
        self._clock_seconds = start_seconds

    def add_step(self, observation: Observation, work: StepWork, clock_seconds: float) -> None:
        """Count one step, which ended at `clock_seconds`."""
        timing = observation.timing
        seconds = timing.total_seconds
        self._clock_seconds = clock_seconds
        emitted = work.emitted_tokens + self._take_prefill_emitted()
        self._emitted += emitted
        phases = self._phases
        phases["verify"] += timing.verify_seconds
        phases["controller"] += timing.controller_seconds
        phases["overhead"] += timing.overhead_seconds
        arms: dict[str, int] = {}
        if work.drafts:
            phases["draft"] += sum(timing.draft_seconds.values())
            self._add_drafts(observation, arms)
        else:
            self._chosen_off += work.num_requests
        regime = next(iter(arms)) if len(arms) == 1 else "mixed" if arms else "off"
        self._regimes[regime] += seconds
        if self._num_steps % _BOUND_EVERY == 0 and work.num_tokens:
            bound = "compute" if is_compute_bound(self._times, work) else "memory"
            self._bounds[bound] += seconds
        self._series.add(clock_seconds - seconds, seconds, emitted, work.num_requests, arms)
        self._num_steps += 1

    @property
    def output_tokens(self) -> int:
        """So far, those of steps that completed prompts too."""
        return self._emitted

    def add_token_of_prefill(self) -> None:
        """A prompt was completed in the step that is counted next, and gave a token."""
        self._prefill_emitted += 1

    def add_request(self, live: LiveRequest, clock_seconds: float) -> None:
        """A request has ended."""
        self._ids.append(live.id)
        arrival = live.source.arrival_seconds
        first, columns = live.first_token_seconds, self._columns
        columns["arrival_seconds"].append(arrival)
        columns["ttft_seconds"].append(first - arrival)
        columns["end_to_end_seconds"].append(clock_seconds - arrival)
        columns["tpot_seconds"].append((clock_seconds - first) / max(live.output_tokens - 1, 1))
        columns["output_tokens"].append(live.output_tokens)

    def add_refusal(self, message: str) -> None:
        """A request could never run."""
        self._num_refused += 1
        if len(self._refusals) < _MOST_REFUSALS:
            self._refusals.append(message)

    def result(
        self, *, policy: str, workload: str, slo: SLO | None = None, preemptions: int = 0
    ) -> ReplayResult:
        """What it came to so far."""
        times = RequestTimes(self._ids, self._columns)
        return ReplayResult(
            policy=policy,
            workload=workload,
            num_requests=len(self._ids),
            num_refused=self._num_refused,
            refusals=tuple(self._refusals),
            num_steps=self._num_steps,
            preemptions=preemptions,
            seconds=self._clock_seconds - self._start_seconds,
            busy_seconds=sum(self._phases.values()),
            output_tokens=self._emitted,
            wasted_draft_tokens=self._wasted,
            off_choices=self._chosen_off,
            arms={arm: _counted(found) for arm, found in sorted(self._outcomes.items())},
            phase_seconds=dict(self._phases),
            regime_seconds=dict(self._regimes),
            bound_shares=_shares(self._bounds),
            series=self._series.points(),
            times=times,
            slo=slo or SLO(),
        )

    def _take_prefill_emitted(self) -> int:
        tokens, self._prefill_emitted = self._prefill_emitted, 0
        return tokens

    def _add_drafts(self, observation: Observation, arms: dict[str, int]) -> None:
        """`arms` is given the draft tokens of each."""
        rows = zip(
            observation.plan.choices,
            observation.drafted,
            observation.proposed,
            observation.accepted,
            strict=True,
        )
        outcomes, num_off, wasted = self._outcomes, 0, 0
        for choice, drafted, proposed, accepted in rows:
            arm = choice.drafter
            if arm is None or not drafted:
                num_off += 1
                continue
            if arm not in outcomes:
                outcomes[arm] = [0] * _SIDE**2
            outcomes[arm][proposed * _SIDE + accepted] += 1
            arms[arm] = arms.get(arm, 0) + drafted
            wasted += drafted - accepted
        self._chosen_off += num_off
        self._wasted += wasted


def _counted(outcomes: list[int]) -> ArmCounts:
    counts = ArmCounts()
    for place, count in enumerate(outcomes):
        if count:
            counts.add(place // _SIDE, place % _SIDE, count)
    return counts


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items() if total > 0.0}
