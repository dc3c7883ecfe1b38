"""The vocabulary: what an engine shows, what a controller answers, what is observed.

Frozen values without tensors, and the protocols at the seams. Knows nothing of models, policies,
caches or files; everything else in the project imports this module, and it imports errors and refusals only.

    view = BatchView(...)              an engine says what it has
    plan = planner.plan(view)          a controller answers: which drafter, how many tokens
    planner.observe(Observation(...))  and learns what came of it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sdcontrol import observed_refusals, refusals
from sdcontrol.errors import PlanError

__all__ = [
    "Backend",
    "BatchView",
    "Belief",
    "Choice",
    "Confidence",
    "Cost",
    "FloatArray",
    "Hint",
    "Observation",
    "Plan",
    "Planner",
    "RequestView",
    "Timing",
    "family_of",
]

FloatArray = NDArray[np.float64]
Confidence = tuple[tuple[float, ...], ...]
"""Per request of the view, the drafter's confidence in each token drafted so far, in [0, 1]."""


def family_of(drafter: str) -> str:
    """The family of a drafter arm: the name before the first ":"."""
    return drafter.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Hint:
    """What a drafter knows of a request before it drafts."""

    max_draft_tokens: int | None = None  # it cannot draft more than this now; None: no limit
    match_tokens: int | None = None  # length of the context match (n-gram)
    confidence: float | None = None  # in [0, 1], that the first draft token is accepted
    catch_up_tokens: int = 0  # tokens it must compute before its first draft token

    def __post_init__(self) -> None:
        refusals.check_hint(self)


@dataclass(frozen=True, slots=True)
class RequestView:
    """One decoding request, as a policy sees it. `ConfigError` for counts, drafters or hints that are none."""

    id: str
    context_tokens: int  # tokens in the KV cache once this step has run without drafts
    generated_tokens: int
    remaining_tokens: int  # at most this many more will be emitted
    temperature: float = 0.0
    drafters: tuple[str, ...] = ()  # what it may use now; empty = opted out
    hints: Mapping[str, Hint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refusals.check_request(self, Hint)


@dataclass(frozen=True, slots=True)
class BatchView:
    """The decoding requests of one step, in the order that plans and observations follow.

    `ConfigError` for requests that are none, or counts that are no whole numbers.
    """

    step: int
    requests: tuple[RequestView, ...]
    free_kv_tokens: int  # draft slots that all requests together may use
    prefill_tokens: int = 0  # prompt tokens computed in the same step
    others_wait: bool = False  # for the places of those that end; False: none does, or nobody knows
    _columns: object = field(default=None, init=False, repr=False, compare=False)  # see `columns`
    _ids: object = field(default=None, init=False, repr=False, compare=False)  # the same

    def __post_init__(self) -> None:
        refusals.check_view(self, RequestView)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which drafter, and how many tokens, for one request. Interned: few distinct ones exist.

    Raises `PlanError` unless the tokens are a whole number that goes with the drafter.
    """

    drafter: str | None
    num_draft_tokens: int

    def __post_init__(self) -> None:
        if type(self.num_draft_tokens) is not int:
            count = refusals.whole_tokens(self.drafter, self.num_draft_tokens)
            object.__setattr__(self, "num_draft_tokens", count)
        if (self.drafter is None) != (self.num_draft_tokens == 0) or self.num_draft_tokens < 0:
            raise PlanError(
                f"choice of {self.num_draft_tokens} draft tokens by {self.drafter!r}: a drafter "
                "goes with at least 1 token, no drafter with 0; use Choice.off()"
            )

    @staticmethod
    def of(drafter: str, num_draft_tokens: int) -> "Choice":
        """The interned choice; no draft tokens means no drafter."""
        if type(num_draft_tokens) is not int:  # 2.0 would be found where 2 is kept
            num_draft_tokens = refusals.whole_tokens(drafter, num_draft_tokens)
        return _intern(drafter, num_draft_tokens) if num_draft_tokens else _OFF

    @staticmethod
    def off() -> "Choice":
        """Decode this request without drafts."""
        return _OFF

    def __reduce__(self) -> tuple[object, ...]:
        return Choice.of, (self.drafter, self.num_draft_tokens)  # copies are interned too


@cache
def _intern(drafter: str, num_draft_tokens: int) -> Choice:
    return Choice(drafter, num_draft_tokens)


_OFF = Choice(None, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice per request of the view, in its order."""

    choices: tuple[Choice, ...]
    reason: str = ""

    @staticmethod
    def off(view: BatchView, reason: str = "") -> "Plan":
        """No drafts for anyone."""
        return Plan((_OFF,) * len(view.requests), reason)

    @staticmethod
    def uniform(view: BatchView, drafter: str, num_draft_tokens: int, reason: str = "") -> "Plan":
        """The same drafter and length for everyone who may use it, within the view's limits."""
        choices: list[Choice] = []
        free = view.free_kv_tokens
        for request in view.requests:
            allowed = drafter in request.drafters
            hint = request.hints.get(drafter) if allowed else None
            most = min(num_draft_tokens, request.remaining_tokens - 1, free) if allowed else 0
            if hint is not None and hint.max_draft_tokens is not None:
                most = min(most, hint.max_draft_tokens)
            choices.append(Choice.of(drafter, max(most, 0)))
            free -= choices[-1].num_draft_tokens
        return Plan(tuple(choices), reason)

    @property
    def is_off(self) -> bool:
        """Whether nobody drafts."""
        return all(choice is _OFF or not choice.num_draft_tokens for choice in self.choices)

    def check(self, view: BatchView) -> None:
        """Raise `PlanError` unless this plan is possible for `view`."""
        refusals.check_answer(self, Choice, len(view.requests))
        draft_tokens = 0
        for request, choice in zip(view.requests, self.choices, strict=True):
            length = choice.num_draft_tokens
            if length:
                if choice.drafter not in request.drafters or length >= request.remaining_tokens:
                    refusals.refuse_choice(request, choice)
                draft_tokens += length
        if draft_tokens > max(view.free_kv_tokens, 0):
            raise PlanError(
                f"plan drafts {draft_tokens} tokens, {view.free_kv_tokens} KV slots are free; "
                "draft fewer"
            )


@runtime_checkable
class Cost(Protocol):
    """What a step costs, in seconds. Every argument may be a number or an array; they broadcast.

    Optional are `catch_up_seconds(family, num_tokens)` of a lagging drafter cache, `padding_seconds(kv_tokens)`
    of a token more of a forward's longest draft, and `overheads()` of steps without drafts and with them.
    """

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """One target forward over `num_tokens`, spread evenly, reading `kv_tokens` of KV in all."""
        ...

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """One drafting round: `num_requests` requests draft one token each."""
        ...

    def overhead_seconds(self) -> float:
        """What a step costs beside verification and drafting."""
        ...


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed before a plan: who would accept what, and what it would cost.

    `survival[drafter]` is `[requests, K]`; entry `[r, j]` is the probability that draft node `j`
    of request `r`, in the drafter's order of submission, is accepted; 0 where the request may not
    use the drafter. For a chain: that the first `j + 1` draft tokens are all accepted.
    """

    survival: Mapping[str, FloatArray]
    cost: Cost


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall time of one step, by phase."""

    draft_seconds: Mapping[str, float] = field(default_factory=dict)  # by family, all rounds
    verify_seconds: float = 0.0
    controller_seconds: float = 0.0
    overhead_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        """The whole step."""
        drafted = sum(self.draft_seconds.values())
        return drafted + self.verify_seconds + self.controller_seconds + self.overhead_seconds


@dataclass(frozen=True, slots=True)
class Observation:
    """What came of one step. Tuples follow `view.requests`.

    `accepted < proposed` is an observed rejection; `accepted == proposed` is *censored*: nobody
    knows how far it would have gone. `drafted == 0` of a plan for more, which no hint foretold, is a rejection.
    """

    view: BatchView
    plan: Plan
    drafted: tuple[int, ...]  # draft tokens computed
    proposed: tuple[int, ...]  # draft tokens submitted to verification, after refinement
    accepted: tuple[int, ...]  # draft tokens accepted, before stop rules
    emitted: tuple[int, ...]  # tokens emitted, after stop rules, bonus token included
    timing: Timing
    accepted_nodes: tuple[tuple[int, ...], ...] | None = None  # trees: node indices of the path
    confidence: Confidence | None = None  # for every drafted token
    shadow: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    # ^ by free drafter: how many tokens it would have had accepted, without being used; None: unknown
    faults: tuple[str, ...] = ()  # guards and quarantines that fired; replayed, never re-measured
    launched_ahead: bool = False  # before the last step's tokens were known
    _is_sound: bool = field(default=False, init=False, repr=False, compare=False)  # the engine says

    def check(self) -> None:
        """Raise `ObservationError` unless this fits the view and `accepted <= proposed <= drafted`."""
        if not self._is_sound:
            observed_refusals.check_observation(self)


class Planner(Protocol):
    """Decides at every step. The engine knows no more of a controller than this."""

    def plan(self, view: BatchView) -> Plan:
        """Choose before drafting."""
        ...

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """Shorten after (a round of) drafting; never lengthens, only drops suffixes."""
        ...

    def observe(self, observation: Observation) -> None:
        """Learn what came of a step."""
        ...


class Backend(Protocol):
    """Something that decodes step by step: the live engine, or a replayed trace."""

    def step(self) -> Observation:
        """Run one step."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        ...
