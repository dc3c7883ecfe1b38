"""A running request of a simulation, and what its drafters would do at the position it is at.

Knows recorded outcomes; nothing of schedulers, policies or time. Kinds of drafters go by family, as
in the engine: `ngram` looks up and is free, `sparse_kv:<budget>` is offered where the context is
longer than its budget, anything else is a draft model whose cache may lag.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NoReturn

from sdcontrol.core import Hint, family_of
from sdcontrol.errors import CounterfactualError
from sdcontrol.estimators.price import sparse_budget
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.scheduling.scheduler import ScheduledRequest
from sdcontrol.traces.workload import SimulatedRequest

__all__ = ["FREE_FAMILIES", "Foreknowledge", "LiveRequest", "RecordedArm", "lag_hint"]

FREE_FAMILIES = frozenset({"ngram"})
_NO_LIMIT = 1 << 30
_UNKNOWN_HINT = Hint()
_NOTHING_DRAFTED: Mapping[int, tuple[float, ...]] = {}


def is_draft_model(family: str) -> bool:
    """Whether drafters of this family have a cache of their own, which may lag."""
    return family not in FREE_FAMILIES and family != "sparse_kv"


@lru_cache(maxsize=65536)
def _lookup_hint(most: int | None, match: int | None, confidence: float | None) -> Hint:
    return Hint(max_draft_tokens=most, match_tokens=match, confidence=confidence)


@lru_cache(maxsize=65536)
def lag_hint(lag: int) -> Hint:
    """What a draft model's hint says: how far its cache lags."""
    return Hint(catch_up_tokens=lag)


class RecordedArm:
    """`ArmOutcomes`, unpacked for one look-up at a time; positions count output tokens."""

    __slots__ = (
        "_path",
        "accepted",
        "budget",
        "chain_nodes",
        "confidence",
        "depth",
        "drafted",
        "family",
        "is_counted",
        "is_free",
        "is_model",
        "limits",
        "matches",
        "name",
    )

    def __init__(
        self,
        name: str,
        outcomes: ArmOutcomes,
        drafted: Mapping[int, tuple[float, ...]] = _NOTHING_DRAFTED,
    ) -> None:
        self.name = name
        self.drafted = drafted  # confidences by position, where a draft was made
        self.family = family_of(name)
        self.is_free = self.family in FREE_FAMILIES
        self.is_model = is_draft_model(self.family)  # has a cache of its own, which may lag
        self.budget = sparse_budget(name) or _NO_LIMIT  # KV tokens that a round reads at most
        self.depth = outcomes.depth
        self.accepted = outcomes.accepted.tobytes()
        most, matches = outcomes.max_draft_tokens, outcomes.match_tokens
        self.limits = None if most is None else most.tobytes()
        self.matches = None if matches is None else matches.tobytes()
        confidence, path = outcomes.confidence, outcomes.path
        self.confidence: list[float] | None = None if confidence is None else confidence.tolist()
        self._path: list[int] | None = None if path is None else path.tolist()
        chain = outcomes.chain_nodes
        self.chain_nodes = None if chain is None else chain.tobytes()
        self.is_counted = path is None and confidence is None  # `accepted` and `limits` say all

    def hint(self, position: int) -> Hint:
        """What a look-up says before it drafts."""
        limits, matches = self.limits, self.matches
        if limits is None and matches is None:
            return _UNKNOWN_HINT
        confidence = self.confidence[position] if self.confidence is not None else None
        return _lookup_hint(
            None if limits is None else limits[position],
            None if matches is None else matches[position],
            confidence if confidence is not None and confidence == confidence else None,  # no NaN
        )

    def limit(self, position: int) -> int:
        """The most that could be drafted."""
        return _NO_LIMIT if self.limits is None else self.limits[position]

    def accepted_of(self, position: int, num_draft_tokens: int) -> int:
        """How many of the first `num_draft_tokens`, or nodes, are accepted."""
        if self._path is not None:
            return (self._path[position] & ((1 << num_draft_tokens) - 1)).bit_count()
        accepted = self.accepted[position]
        return accepted if accepted < num_draft_tokens else num_draft_tokens

    def first_accepted(self, position: int) -> int:
        """How many may be drafted so that all are accepted."""
        if self._path is None:
            return min(self.accepted[position], self.limit(position))
        path = self._path[position]
        return (path ^ (path + 1)).bit_length() - 1  # the trailing ones

    def is_chain(self, position: int, num_draft_tokens: int) -> bool:
        """Whether so many nodes form a chain."""
        return self.chain_nodes is None or num_draft_tokens <= self.chain_nodes[position]

    def nodes(self, position: int, num_draft_tokens: int) -> tuple[int, ...]:
        """The accepted nodes among the first `num_draft_tokens`."""
        if self._path is None:
            return tuple(range(self.accepted_of(position, num_draft_tokens)))
        path = self._path[position]
        return tuple(node for node in range(num_draft_tokens) if path >> node & 1)

    def confidence_of(self, position: int, num_draft_tokens: int) -> tuple[float, ...]:
        """In each draft token; empty: nothing is known.

        As recorded where such a draft was made; beyond it as if all tokens before were accepted.
        """
        if self.confidence is None:
            return ()
        seen = self.drafted.get(position, ())
        if len(seen) >= num_draft_tokens:
            return seen[:num_draft_tokens]
        known = self.confidence[position + len(seen) : position + num_draft_tokens]
        known += (known or self.confidence)[-1:] * (num_draft_tokens - len(seen) - len(known))
        return (*seen, *known)


class LiveRequest:
    """A request from its submission to its last token."""

    __slots__ = (
        "_budgets",
        "arms",
        "draft_cached",
        "first_token_seconds",
        "generated",
        "hinting",
        "id",
        "menu",
        "menu_tokens",
        "most",
        "output_tokens",
        "scheduled",
        "source",
        "temperature",
    )

    def __init__(
        self, source: SimulatedRequest, scheduled: ScheduledRequest, drafters: tuple[str, ...]
    ) -> None:
        self.source = source
        self.scheduled = scheduled
        self.id = source.id
        self.temperature = source.temperature
        self.output_tokens = source.output_tokens
        self.most = source.most_output_tokens
        self.generated = 0
        self.first_token_seconds = 0.0
        self.draft_cached: dict[str, int] = {}  # by draft model; absent: ask the blocks
        acceptance = source.acceptance
        self.arms = {
            arm: RecordedArm(arm, acceptance[arm], source.drafted.get(arm, _NOTHING_DRAFTED))
            for arm in drafters
            if arm in acceptance
        }
        self._budgets = [(sparse_budget(arm) or 0, arm) for arm in self.arms]
        hinting = (arm for arm in self.arms.values() if arm.is_free or arm.is_model)
        self.hinting = tuple((arm.name, arm) for arm in hinting)
        self.menu: tuple[str, ...] = ()
        self.menu_tokens = 0  # context from which on the menu must be looked at again

    def update_menu(self, context_tokens: int) -> None:
        """What may be used with so much context; see `arms_for` of the engine's drafters."""
        self.menu = tuple(arm for budget, arm in self._budgets if budget < context_tokens)
        later = [budget for budget, _ in self._budgets if budget >= context_tokens]
        self.menu_tokens = min(later, default=_NO_LIMIT)

    def refuse(self, arm: str, num_draft_tokens: int) -> NoReturn:
        """Raise the `CounterfactualError` of a draft that nothing recorded answers for."""
        where = f"request {self.id!r}, output position {self.generated}"
        recorded = self.arms.get(arm)
        if recorded is None:
            raise CounterfactualError(
                f"{where}: no acceptance is recorded for arm {arm!r}, only for {[*self.arms]}; "
                "record the acceptance table with that drafter"
            )
        raise CounterfactualError(
            f"{where}: {num_draft_tokens} draft tokens by {arm!r} were planned, the table goes to "
            f"{recorded.depth}; plan at most that many, or record a deeper table"
        )


class Foreknowledge:
    """What the policy `oracle` sees of a simulation: the recorded acceptances themselves."""

    def __init__(self) -> None:
        self.live: Mapping[str, LiveRequest] = {}

    def accepted_tokens(self, request_id: str, generated_tokens: int, drafter: str) -> int:
        """Draft tokens of `drafter` that would be accepted after `generated_tokens` of output."""
        return self.live[request_id].arms[drafter].first_accepted(generated_tokens)
