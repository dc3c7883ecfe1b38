"""Step times fitted to a recording: straight lines in what a step computes and reads.

    verify      1, the first 8 and 32 tokens, those beyond 64, requests, further tokens, KV,
                KV x draft tokens, KV x longest draft, prefill tokens, prefill step, whether a
                model drafted before
    draft       1, rounds, draft tokens, KV read, catch-up tokens; per family
    overhead    1, requests, emitted tokens, prefill tokens, arms offered, drafts in shadow, and
                whether there are such
    controller  1, requests

`lines` says how they are fitted: to means, not medians, since what a replay adds up is the time of
many steps. Where forwards are padded, tokens are those that are computed; attention may compute all
requests as if their drafts were as long as the longest. Knows observations and seconds; nothing of
models or machines.
"""

import copy
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from sdcontrol.core import Observation, Timing, family_of
from sdcontrol.errors import TraceError
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.estimators.loads import draft_loads
from sdcontrol.logs import EventLog
from sdcontrol.traces.fitted_cost import FittedCost, FittedRound
from sdcontrol.traces.lines import Line
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.simulated_drafts import FREE_FAMILIES
from sdcontrol.traces.step_times import DraftWork, LinearDrafter, StepWork

__all__ = ["FittedTimes", "work_of"]

_log = EventLog(__name__)
_LEAST_STEPS = 8
_SIMPLE_VERIFY = ((0,), (4, 5, 9), (4, 5))  # 1, all tokens, those that logits are made of
_PROMPT = 9  # prefill tokens
_SIMPLE_DRAFT = ((1,),)  # rounds
_SIMPLE = ((0,),)  # 1
_EXTENT = ("requests", "tokens of context")
_SAID, _REFUSED = 2.0, 4.0  # times the largest that was recorded
_FEW = 4  # steps with drafts of a family: of fewer, rounds may be taken for catch-up

_Rows = list[tuple[list[float], float]]


class FittedTimes:
    """Step times of the machine and models that were recorded, and of the recorded controller.

    `FittedTimes.of(trace)` takes all of it from the trace. `token_edges` are the numbers of tokens
    that its forwards were padded to, `machine` is what the controller knew of it. Steps whose forward took no
    time, as an engine says where it also captured a graph or compiled, are left out.
    Raises `TraceError` where there is too little to fit.
    """

    def __init__(
        self,
        observations: Iterable[Observation],
        token_edges: Sequence[int] = (),
        machine: KnownMachine | None = None,
    ) -> None:
        self.token_edges, self.machine = tuple(sorted(token_edges)), machine
        verify: _Rows = []
        overhead: _Rows = []
        controller: _Rows = []
        drafts: dict[str, _Rows] = {}
        extents: list[tuple[int, int]] = []
        for observation in observations:
            work, timing = work_of(observation), observation.timing
            if not work.num_tokens or timing.verify_seconds == 0.0:
                continue  # a step that also captured a graph or compiled does not tell what its phases take
            extents.append(_extent(work))
            verify.append((self._verify_features(work), timing.verify_seconds))
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
        self._most = tuple(max(column) for column in zip(*extents, strict=True))
        self._has_prompts, self._warned = any(row[_PROMPT] for row, _ in verify), set[str]()
        self._least_lag, self._mean_rounds = _least_lags(drafts), _mean_rounds(drafts)
        self.verify, self.overhead = _line(verify, _SIMPLE_VERIFY), _line(overhead)
        self.controller = _line(controller) if controller else None
        self.drafts = {family: _line(rows, _SIMPLE_DRAFT) for family, rows in drafts.items()}

    @classmethod
    def of(cls, trace: Trace) -> "FittedTimes":
        """Fitted to all steps of `trace`, for a controller that knows what the recorded one knew."""
        return cls(trace.observations(), trace.token_edges, trace.machine)

    @property
    def cost(self) -> FittedCost:
        """These times as the prices of plans, as well as a `Cost` can tell them."""
        once, per_request, per_token, *_, if_offered, if_shadow = self.overhead.coefficients
        planning = (0.0, 0.0) if self.controller is None else self.controller.coefficients
        *verify, if_model = self.verify.coefficients
        rounds = {}
        for family, line in self.drafts.items():
            per_step, per_round, per_draft, per_kv_token, caught_up = line.coefficients
            per_step += 0.0 if family in FREE_FAMILIES else if_model
            per_round += per_step / self._mean_rounds[family]
            rounds[family] = FittedRound(
                LinearDrafter(per_round, per_draft, per_kv_token), caught_up
            )
        return FittedCost(
            verify,
            once + if_offered + if_shadow + planning[0],
            per_request + per_token + planning[1],
            rounds,
            self.token_edges,
        )

    def with_controller_of(self, observations: Iterable[Observation]) -> "FittedTimes":
        """The same machine, and a controller that takes as long as it did in these steps."""
        fitted = copy.copy(self)
        rows = [
            ([1.0, len(seen.view.requests)], seen.timing.controller_seconds)
            for seen in observations
            if seen.view.requests
        ]
        fitted.controller = _line(rows) if rows else None
        fitted._warned = set()
        return fitted

    def timing(self, work: StepWork) -> Timing:
        """Average seconds of such a step.

        Warned of once each: over twice the requests or context of any step that was recorded, a prompt where
        none was, rounds that were hardly recorded but with catch-up. Raises `TraceError` for over 4 times, and for a
        family never seen to draft.
        """
        self._check_extent(work)
        return Timing(
            draft_seconds={f: self._draft(f, w) for f, w in work.drafts.items()},
            verify_seconds=self.verify.seconds(self._verify_features(work)),
            controller_seconds=self._controller(work),
            overhead_seconds=self.overhead.seconds(_overhead_features(work)),
        )

    def _check_extent(self, work: StepWork) -> None:
        for name, value, most in zip(_EXTENT, _extent(work), self._most, strict=True):
            if value <= _SAID * most:
                continue
            told = f"a step of {value} {name}, while no recorded step has more than {most}"
            remedy = "record steps as large, simulate a lighter load, or give a cost model"
            if value > _REFUSED * most:
                raise TraceError(f"{told}; {_REFUSED:g} times as many is the limit: {remedy}")
            self._warn(name, told, remedy)
        if work.prefill_tokens and not self._has_prompts:
            told = f"a step of {work.prefill_tokens} prompt tokens, while no recorded step has any"
            self._warn("prompts", told, "record prompts too, or give a cost model")
        for family, draft in work.drafts.items():
            if _lag(_draft_features(draft)) < self._least_lag.get(family, 0.0):
                told = f"rounds of {family!r} without the catch-up that the few recorded ones had"
                self._warn(family, told, "record more of them, or give a cost model")

    def _warn(self, subject: str, reason: str, remedy: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            _log.warning("step_times_extrapolated", reason=reason, remedy=remedy)

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

    def _verify_features(self, work: StepWork) -> list[float]:
        tokens = work.num_requests + work.draft_tokens
        if not work.prefill_tokens:
            tokens = _padded(tokens, self.token_edges)
        return [
            1.0,
            min(tokens, 8),
            min(tokens, 32),
            max(tokens - 64, 0),
            work.num_requests,
            tokens - work.num_requests,
            work.kv_tokens,
            work.verified_kv_tokens,
            work.longest_draft * work.kv_tokens,
            work.prefill_tokens,
            1.0 if work.prefill_tokens else 0.0,
            1.0 if any(family not in FREE_FAMILIES for family in work.drafts) else 0.0,
        ]


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
        longest_draft=max(observation.proposed, default=0),
        offered_arms=sum(len(request.drafters) for request in view.requests),
        shadow_drafts=len(observation.shadow) * len(context),
    )


def _rounds(observation: Observation, family: str) -> tuple[int, ...]:
    """Requests that drafted in each round."""
    drafted = [
        n
        for n, choice in zip(observation.drafted, observation.plan.choices, strict=True)
        if choice.drafter is not None and family_of(choice.drafter) == family
    ]
    return tuple(sum(n > place for n in drafted) for place in range(max(drafted, default=0)))


def _extent(work: StepWork) -> tuple[int, int]:
    """What lines may not be drawn far beyond; see `_EXTENT`."""
    return work.num_requests, work.kv_tokens


def _padded(num_tokens: int, edges: Sequence[int]) -> int:
    """The next edge; as many where there is none."""
    place = bisect_left(edges, num_tokens)
    return edges[place] if place < len(edges) else num_tokens


def _overhead_features(work: StepWork) -> list[float]:
    return [
        1.0,
        work.num_requests,
        work.emitted_tokens,
        work.prefill_tokens,
        work.offered_arms,
        work.shadow_drafts,
        1.0 if work.offered_arms else 0.0,
        1.0 if work.shadow_drafts else 0.0,
    ]


def _draft_features(work: DraftWork) -> list[float]:
    return [
        1.0,
        len(work.requests_by_round),
        sum(work.requests_by_round),
        sum(work.kv_tokens_by_round),
        work.catch_up_tokens,
    ]


def _mean_rounds(drafts: Mapping[str, _Rows]) -> dict[str, float]:
    """Rounds of a family's step with drafts; at least 1."""
    return {
        family: max(sum(features[1] for features, _ in rows) / len(rows), 1.0)
        for family, rows in drafts.items()
    }


def _least_lags(drafts: Mapping[str, _Rows]) -> dict[str, float]:
    """Tokens of catch-up per round, at least, of families with few steps."""
    few = {family: rows for family, rows in drafts.items() if len(rows) < _FEW}
    return {family: min(_lag(features) for features, _ in rows) for family, rows in few.items()}


def _lag(features: Sequence[float]) -> float:
    """Tokens of catch-up per round, of the features of drafting."""
    _, rounds, *_, catch_up_tokens = features
    return catch_up_tokens / max(rounds, 1.0)


def _line(rows: _Rows, simple: Sequence[Sequence[int]] = _SIMPLE) -> Line:
    return Line([features for features, _ in rows], [seconds for _, seconds in rows], simple=simple)
