"""Ask the drafters of a batch for their guesses, and keep the bad ones away.

Knows drafters and plans; nothing of models, caches or acceptance. A drafter that raises or returns
nonsense is quarantined: its family is offered no more, the step goes on without it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sdcontrol.core import BatchView, Confidence, Plan, family_of
from sdcontrol.engine.drafters.base import (
    Draft,
    Drafter,
    DraftInFull,
    DraftTask,
    KeepDrafting,
)
from sdcontrol.engine.drafters.vetting import Offer, Offers, check_drafts
from sdcontrol.engine.quarantine import Quarantine
from sdcontrol.engine.request import Request
from sdcontrol.engine.shadows import ShadowDrafts
from sdcontrol.errors import ConfigError

__all__ = ["Drafting", "Drafts"]

Refine = Callable[[BatchView, Plan, Confidence], Plan]
NO_DRAFT = Draft()
NO_OFFER: Offer = ((), {})


class Drafts(NamedTuple):
    """What came of drafting. Rows follow the view."""

    drafts: tuple[Draft, ...]  # as submitted to verification
    drafted: tuple[int, ...]  # tokens computed, before anything was cut
    confidence: Confidence | None
    seconds: dict[str, float]  # by family

    @staticmethod
    def none(num_requests: int) -> "Drafts":
        """Nobody drafted."""
        return Drafts((NO_DRAFT,) * num_requests, (0,) * num_requests, None, {})


class Drafting:
    """The drafters of one engine."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        vocab_size: int,
        allow_trees: bool,
        max_draft_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters: dict[str, Drafter] = {}
        for drafter in drafters:
            if drafter.family in self._drafters:
                raise ConfigError(f"two drafters are named {drafter.family!r}; rename one")
            self._drafters[drafter.family] = drafter
        self._vocab_size = vocab_size
        self._allow_trees = allow_trees
        self._max_draft_tokens = max_draft_tokens
        self._offers = Offers()
        self.is_idle = False  # nobody will ever ask: drafters are told nothing
        self._clock = clock
        self.quarantine = Quarantine()

    @property
    def families(self) -> tuple[str, ...]:
        """Every family, quarantined or not."""
        return tuple(self._drafters)

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Why, by family."""
        return self.quarantine.reasons

    def take_faults(self) -> tuple[str, ...]:
        """The quarantines since the last call."""
        return self.quarantine.take_faults()

    def start(self, request: Request) -> None:
        """A request begins."""
        request.is_started = True
        self._tell_all(request, lambda drafter: drafter.start(request))

    def commit(self, committed: Sequence[tuple[Request, int]]) -> None:
        """Requests have new tokens, so many each."""
        for family, drafter in self._in_use():
            told = [one for one in committed if one[0].may_draft(family)]
            try:
                if told:
                    drafter.commit_all(told)
            except Exception as error:
                self.quarantine.put(family, error)

    def lose_cache(self, request: Request) -> None:
        """A request was preempted."""
        self._tell_all(request, lambda drafter: drafter.lose_cache(request))

    def finish(self, request: Request) -> None:
        """A request ended, or is to begin again."""
        if request.is_started:
            self._tell_all(request, lambda drafter: drafter.finish(request))
        request.is_started = False

    def offers(self, requests: Sequence[Request]) -> list[Offer]:
        """By request, the arms that it may use now, and what their drafters know beforehand."""
        offers = [NO_OFFER] * len(requests)
        for family, drafter in self._in_use():
            rows = [row for row, request in enumerate(requests) if request.may_draft(family)]
            try:
                own = self._offers.of(drafter, [requests[row] for row in rows]) if rows else []
            except Exception as error:
                self.quarantine.put(family, error)
                continue
            for row, offer in zip(rows, own, strict=True):
                before = offers[row]
                offers[row] = offer if before is NO_OFFER else self._offers.join(before, offer)
        return offers

    def propose(
        self,
        requests: Sequence[Request],
        view: BatchView,
        plan: Plan,
        refine: Refine | None,
        *,
        between_rounds: bool = True,
        refines_hinted: bool = True,
    ) -> Drafts:
        """Draft what `plan` asks for; `refine`, if any, may shorten it in the end.

        With `between_rounds`, also on the way; without, drafters need not ask. Without
        `refines_hinted`, only where drafters said how sure they are, and no hint had said that before.
        """
        session = _Session(view, plan, refine)
        may_ask = False
        seconds: dict[str, float] = {}
        for family, rows in _rows_by_family(plan).items():
            started = self._clock()
            drafter = self._drafters[family]
            tasks = self._tasks(rows, requests, plan)
            keep = session.keeper(rows) if refine and between_rounds else DraftInFull(tasks)
            try:
                session.take(rows, self._checked(drafter, tasks, keep))
            except Exception as error:
                self.quarantine.put(family, error)
                session.drop(rows)
            seconds[family] = self._clock() - started
            may_ask = may_ask or not drafter.is_free
        return session.close(seconds, may_ask=may_ask, must_ask=refines_hinted)

    def shadows(
        self, requests: Sequence[Request], plan: Plan, lengths: Sequence[int]
    ) -> ShadowDrafts:
        """What every free arm would have drafted for each request, of these many tokens.

        None where it was used itself, may not be, or has nothing to draft. See `shadows.agreements`.
        """
        return {
            drafter.name: self._shadow(drafter, requests, plan, lengths)
            for drafter in self._drafters.values()
            if drafter.is_free and drafter.family not in self.quarantined
        }

    def _shadow(
        self, drafter: Drafter, requests: Sequence[Request], plan: Plan, lengths: Sequence[int]
    ) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(requests)
        try:
            rows = [
                row
                for row, choice in enumerate(plan.choices)
                if choice.drafter != drafter.name and _may_draft(drafter, requests[row])
            ]
            tasks = [DraftTask(requests[row], drafter.name, lengths[row]) for row in rows]
            found = self._checked(drafter, tasks, DraftInFull(tasks)) if tasks else ()
        except Exception as error:
            self.quarantine.put(drafter.family, error)
            return drafts
        for row, draft in zip(rows, found, strict=True):
            drafts[row] = draft
        return drafts

    def _checked(
        self,
        drafter: Drafter,
        tasks: Sequence[DraftTask],
        keep: KeepDrafting,
    ) -> Sequence[Draft]:
        drafts = drafter.propose(tasks, keep)
        check_drafts(drafts, tasks, vocab_size=self._vocab_size, allow_trees=self._allow_trees)
        return drafts

    def _in_use(self) -> list[tuple[str, Drafter]]:
        """The drafters that are told of requests, by family."""
        if self.is_idle:
            return []
        return [(f, d) for f, d in self._drafters.items() if f not in self.quarantined]

    def _tell_all(self, request: Request, tell: Callable[[Drafter], None]) -> None:
        for family, drafter in self._in_use():
            try:
                if request.may_draft(family):
                    tell(drafter)
            except Exception as error:
                self.quarantine.put(family, error)

    def _tasks(
        self, rows: Sequence[int], requests: Sequence[Request], plan: Plan
    ) -> list[DraftTask]:
        most, choices, tasks = self._max_draft_tokens, plan.choices, []
        for row in rows:
            arm, length = choices[row].drafter, choices[row].num_draft_tokens
            assert arm is not None
            tasks.append(DraftTask(requests[row], arm, length if length < most else most))
        return tasks


def _may_draft(drafter: Drafter, request: Request) -> bool:
    """Whether it is allowed, and has something to draft by what it says."""
    if not request.may_draft(drafter.family):
        return False
    hint = drafter.hint(request, drafter.name)
    return hint is None or hint.max_draft_tokens != 0


class _Session:
    """The drafts of one step while they are made."""

    def __init__(self, view: BatchView, plan: Plan, refine: Refine | None) -> None:
        self._view = view
        self._plan = plan
        self._refine = refine
        self._drafts: list[Draft] = [NO_DRAFT] * len(view.requests)
        self._limits = [choice.num_draft_tokens for choice in plan.choices]

    def keeper(self, rows: Sequence[int]) -> KeepDrafting:
        def keep(drafts: Sequence[Draft]) -> Sequence[int]:
            self.take(rows, drafts)
            self._shorten()
            return [self._limits[row] for row in rows]

        return keep

    def take(self, rows: Sequence[int], drafts: Sequence[Draft]) -> None:
        for row, draft in zip(rows, drafts, strict=True):
            self._drafts[row] = draft

    def drop(self, rows: Sequence[int]) -> None:
        self.take(rows, [NO_DRAFT] * len(rows))

    def close(self, seconds: dict[str, float], *, may_ask: bool, must_ask: bool) -> Drafts:
        drafted = tuple([len(draft.tokens) for draft in self._drafts])
        confidence = self._confidence()
        is_asked = must_ask or (may_ask and confidence is not None)
        if is_asked and self._refine is not None and any(drafted):
            self._shorten()
        kept = zip(self._drafts, drafted, self._limits, strict=True)
        drafts = [d if nodes <= limit else d.truncated(limit) for d, nodes, limit in kept]
        return Drafts(tuple(drafts), drafted, confidence, seconds)

    def _shorten(self) -> None:
        """Ask the planner; a longer answer than the plan's counts as the plan's.

        Tokens that were drawn, and hang together with what is known since, stay: `Draft.num_settled`.
        """
        assert self._refine is not None
        confidence = self._confidence() or ((),) * len(self._drafts)
        refined = self._refine(self._view, self._plan, confidence)
        rows = zip(self._limits, refined.choices, self._drafts, strict=True)
        self._limits = [min(n, max(c.num_draft_tokens, d.num_settled)) for n, c, d in rows]

    def _confidence(self) -> Confidence | None:
        rows = tuple([draft.confidence for draft in self._drafts])
        return rows if any(rows) else None


def _rows_by_family(plan: Plan) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    families: dict[str, str] = {}
    for row, choice in enumerate(plan.choices):
        arm = choice.drafter
        if arm is not None:
            family = families.get(arm) or families.setdefault(arm, family_of(arm))
            rows.setdefault(family, []).append(row)
    return rows
