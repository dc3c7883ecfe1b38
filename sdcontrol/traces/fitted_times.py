"""Step times fitted to a recording: straight lines in what a step computes and reads.

    verify      1, the first 8 and 32 tokens, those beyond 64, requests, draft tokens, KV,
                KV x draft tokens, prefill tokens, prefill step
    draft       1, rounds, draft tokens, KV read, catch-up tokens; per family
    overhead    1, requests, emitted tokens, prefill tokens
    controller  1, requests

All coefficients are at least 0. Lines are fitted to means, not medians: what a replay adds up is the
time of many steps. Knows observations and seconds; nothing of models or machines.
"""

import copy
from collections.abc import Iterable, Sequence

import numpy as np

from sdcontrol.core import FloatArray, Observation, Timing, family_of
from sdcontrol.errors import TraceError
from sdcontrol.estimators.loads import draft_loads
from sdcontrol.traces.step_times import DraftWork, StepWork

__all__ = ["FittedTimes", "Line", "work_of"]

_OUTLIER = 4.0  # times the predicted: an interruption, counted as the fit, not as the machine
_ROUNDS_OF_FIT = 3
_LEAST_STEPS = 8


class Line:
    """A non-negative combination of features, by weighted least squares on relative errors."""

    def __init__(self, features: Sequence[Sequence[float]], seconds: Sequence[float]) -> None:
        x = np.asarray(features, dtype=float)
        y = np.asarray(seconds, dtype=float)
        usable = np.isfinite(y) & (y >= 0.0)
        x, y = x[usable], y[usable]
        fitted = _fit(x, y)
        total = float((x @ fitted).sum())  # interruptions shape nothing, but they are time spent
        self.coefficients: list[float] = (fitted * (y.sum() / total if total else 1.0)).tolist()

    def seconds(self, features: Sequence[float]) -> float:
        """What steps with these features take on average."""
        return sum([c * f for c, f in zip(self.coefficients, features, strict=True)])


class FittedTimes:
    """Step times of the machine and models that were recorded, and of the recorded controller.

    Raises `TraceError` where there is too little to fit.
    """

    def __init__(self, observations: Iterable[Observation]) -> None:
        verify: list[tuple[list[float], float]] = []
        overhead: list[tuple[list[float], float]] = []
        controller: list[tuple[list[float], float]] = []
        drafts: dict[str, list[tuple[list[float], float]]] = {}
        for observation in observations:
            work, timing = work_of(observation), observation.timing
            if not work.num_tokens:
                continue
            verify.append((_verify_features(work), timing.verify_seconds))
            overhead.append((_overhead_features(work), timing.overhead_seconds))
            if work.num_requests:
                controller.append(([1.0, work.num_requests], timing.controller_seconds))
            for family, seconds in timing.draft_seconds.items():
                if family in work.drafts:
                    rows = drafts.setdefault(family, [])
                    rows.append((_draft_features(work.drafts[family]), seconds))
        if len(verify) < _LEAST_STEPS:
            raise TraceError(
                f"{len(verify)} steps to fit step times to; record at least {_LEAST_STEPS}, or "
                "give a cost model"
            )
        self.verify, self.overhead = _line(verify), _line(overhead)
        self.controller = _line(controller) if controller else None
        self.drafts = {family: _line(rows) for family, rows in drafts.items()}

    def with_controller_of(self, observations: Iterable[Observation]) -> "FittedTimes":
        """The same machine, and a controller that takes as long as it did in these steps."""
        fitted = copy.copy(self)
        rows = [
            ([1.0, len(seen.view.requests)], seen.timing.controller_seconds)
            for seen in observations
            if seen.view.requests
        ]
        fitted.controller = _line(rows) if rows else None
        return fitted

    def timing(self, work: StepWork) -> Timing:
        """Average seconds of such a step. Raises `TraceError` for a family never seen to draft."""
        return Timing(
            draft_seconds={f: self._draft(f, w) for f, w in work.drafts.items()},
            verify_seconds=self.verify.seconds(_verify_features(work)),
            controller_seconds=self._controller(work),
            overhead_seconds=self.overhead.seconds(_overhead_features(work)),
        )

    def _draft(self, family: str, work: DraftWork) -> float:
        line = self.drafts.get(family)
        if line is None:
            raise TraceError(
                f"no step with drafts of {family!r} was recorded, only of {[*self.drafts]}; record "
                "some, or give a cost model"
            )
        return line.seconds(_draft_features(work))

    def _controller(self, work: StepWork) -> float:
        if self.controller is None or not work.num_requests:
            return 0.0
        return self.controller.seconds([1.0, work.num_requests])


def work_of(observation: Observation) -> StepWork:
    """What an observed step computed and read."""
    view = observation.view
    context = [request.context_tokens for request in view.requests]
    loads = draft_loads(observation)
    return StepWork(
        num_requests=len(context),
        draft_tokens=sum(observation.proposed),
        kv_tokens=sum(context),
        prefill_tokens=view.prefill_tokens,
        emitted_tokens=sum(observation.emitted),
        drafts={
            family: DraftWork(_rounds(observation, family), (load.kv_tokens,), load.catch_up_tokens)
            for family, load in loads.items()
        },
        verified_kv_tokens=sum(n * kv for n, kv in zip(observation.proposed, context, strict=True)),
    )


def _rounds(observation: Observation, family: str) -> tuple[int, ...]:
    """Requests that drafted in each round."""
    drafted = [
        n
        for n, choice in zip(observation.drafted, observation.plan.choices, strict=True)
        if choice.drafter is not None and family_of(choice.drafter) == family
    ]
    return tuple(sum(n > place for n in drafted) for place in range(max(drafted, default=0)))


def _verify_features(work: StepWork) -> list[float]:
    tokens = work.num_requests + work.draft_tokens
    return [
        1.0,
        min(tokens, 8),
        min(tokens, 32),
        max(tokens - 64, 0),
        work.num_requests,
        work.draft_tokens,
        work.kv_tokens,
        work.verified_kv_tokens,
        work.prefill_tokens,
        1.0 if work.prefill_tokens else 0.0,
    ]


def _overhead_features(work: StepWork) -> list[float]:
    return [1.0, work.num_requests, work.emitted_tokens, work.prefill_tokens]


def _draft_features(work: DraftWork) -> list[float]:
    return [
        1.0,
        len(work.requests_by_round),
        sum(work.requests_by_round),
        sum(work.kv_tokens_by_round),
        work.catch_up_tokens,
    ]


def _line(rows: Sequence[tuple[list[float], float]]) -> Line:
    return Line([features for features, _ in rows], [seconds for _, seconds in rows])


def _fit(x: FloatArray, y: FloatArray) -> FloatArray:
    """Coefficients `[features]`, weighted by what the fit before predicts, interruptions cut off."""
    scale = np.where(x.max(axis=0) > 0.0, x.max(axis=0), 1.0)
    predicted: FloatArray = np.full(len(y), max(float(np.median(y)), 1e-9))
    coefficients = np.zeros(x.shape[1])
    for _ in range(_ROUNDS_OF_FIT):
        cut = np.minimum(y, _OUTLIER * predicted)
        weights = 1.0 / predicted
        coefficients = _non_negative(x / scale * weights[:, None], cut * weights)
        floor = 1e-3 * max(float(np.mean(y)), 1e-9)
        predicted = np.maximum(x / scale @ coefficients, floor)
    return np.asarray(coefficients / scale)


def _non_negative(x: FloatArray, y: FloatArray) -> FloatArray:
    """Least squares with coefficients of at least 0 (Lawson and Hanson 1974, active sets)."""
    gram, moment = x.T @ x, x.T @ y
    solution = np.zeros(x.shape[1])
    active = np.zeros(x.shape[1], dtype=bool)
    tolerance = 1e-10 * max(float(np.abs(moment).max(initial=0.0)), 1e-300)
    for _ in range(4 * x.shape[1]):
        gradient = np.where(active, -np.inf, moment - gram @ solution)
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        active[best] = True
        while True:
            free = np.flatnonzero(active)
            trial = np.zeros(x.shape[1])
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
            low = free[trial[free] <= 0.0]
            if not len(low):
                break
            steps = solution[low] / np.maximum(solution[low] - trial[low], 1e-300)
            solution += float(steps.min()) * (trial - solution)
            active &= solution > 1e-15 * max(float(solution.max(initial=0.0)), 1e-300)
            if not active.any():
                break
        solution = np.where(active, trial, 0.0)
    return solution
