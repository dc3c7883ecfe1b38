"""Ask the drafters of a batch for their guesses, and keep the bad ones away.

Knows drafters and plans; nothing of models, caches or acceptance. A drafter that raises or returns
nonsense is quarantined: its family is offered no more, the step goes on without it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdcontrol.core import BatchView, Choice, Confidence, Hint, Plan, family_of
from sdcontrol.engine.drafters.base import ROOT, Draft, Drafter, DraftTask
from sdcontrol.engine.request import Request
from sdcontrol.errors import ConfigError, DrafterFault
from sdcontrol.logs import EventLog

__all__ = ["Drafting", "Drafts"]

log = EventLog(__name__)

Refine = Callable[[BatchView, Plan, Confidence], Plan]
NO_DRAFT = Draft()
_LAW_TOLERANCE = 1e-2  # of the sum of a row: a distribution may be in bfloat16


@dataclass(frozen=True, slots=True)
class Drafts:
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
        self._faults: list[str] = []
        self._clock = clock
        self.quarantined: dict[str, str] = {}  # family: why

    @property
    def families(self) -> tuple[str, ...]:
        """Every family, quarantined or not."""
        return tuple(self._drafters)

    def allowed(self, speculation: bool | Sequence[str]) -> frozenset[str]:
        """The families that a request may use: all, none, or those named; raises `ConfigError`."""
        if isinstance(speculation, bool):
            return frozenset(self.families if speculation else ())
        named = {family_of(name) for name in speculation}
        if unknown := named - set(self.families):
            raise ConfigError(f"unknown drafters {sorted(unknown)}; there are {[*self.families]}")
        return frozenset(named)

    def reinstate(self, family: str) -> None:
        """Let a quarantined family draft again."""
        self.quarantined.pop(family, None)

    def take_faults(self) -> tuple[str, ...]:
        """The quarantines since the last call."""
        faults, self._faults = tuple(self._faults), []
        return faults

    def start(self, request: Request) -> None:
        """A request begins."""
        self._tell_all(request, lambda drafter: drafter.start(request))

    def commit(self, request: Request, num_new_tokens: int) -> None:
        """A request has new tokens."""
        self._tell_all(request, lambda drafter: drafter.commit(request, num_new_tokens))

    def lose_cache(self, request: Request) -> None:
        """A request was preempted."""
        self._tell_all(request, lambda drafter: drafter.lose_cache(request))

    def finish(self, request: Request) -> None:
        """A request ended."""
        self._tell_all(request, lambda drafter: drafter.finish(request))

    def offers(self, request: Request) -> tuple[tuple[str, ...], dict[str, Hint]]:
        """The arms that a request may use now, and what their drafters know beforehand."""
        arms: list[str] = []
        hints: dict[str, Hint] = {}

        def ask(drafter: Drafter) -> None:
            for arm in drafter.arms_for(request):
                hint = drafter.hint(request, arm)
                check_offer(drafter, arm, hint)
                arms.append(arm)
                if hint is not None:
                    hints[arm] = hint

        self._tell_all(request, ask)
        usable = [arm for arm in arms if family_of(arm) not in self.quarantined]
        return tuple(usable), hints

    def propose(
        self, requests: Sequence[Request], view: BatchView, plan: Plan, refine: Refine
    ) -> Drafts:
        """Draft what `plan` asks for; `refine` may shorten it on the way."""
        session = _Session(view, plan, refine)
        seconds: dict[str, float] = {}
        for family, rows in _rows_by_family(plan).items():
            started = self._clock()
            drafter = self._drafters[family]
            tasks = [self._task(requests[row], plan.choices[row]) for row in rows]
            try:
                session.take(rows, self._checked(drafter, tasks, session.keeper(rows)))
            except Exception as error:
                self._quarantine(family, error)
                session.drop(rows)
            seconds[family] = self._clock() - started
        return session.close(seconds)

    def _checked(
        self,
        drafter: Drafter,
        tasks: Sequence[DraftTask],
        keep: Callable[[Sequence[Draft]], Sequence[int]],
    ) -> Sequence[Draft]:
        drafts = drafter.propose(tasks, keep)
        if len(drafts) != len(tasks):
            raise DrafterFault(f"{len(drafts)} drafts for {len(tasks)} tasks; return one per task")
        for task, draft in zip(tasks, drafts, strict=True):
            check_draft(draft, task, vocab_size=self._vocab_size, allow_trees=self._allow_trees)
        return drafts

    def _tell_all(self, request: Request, tell: Callable[[Drafter], None]) -> None:
        for family, drafter in self._drafters.items():
            if family in self.quarantined or not request.may_draft(family):
                continue
            try:
                tell(drafter)
            except Exception as error:
                self._quarantine(family, error)

    def _task(self, request: Request, choice: Choice) -> DraftTask:
        assert choice.drafter is not None
        most = min(choice.num_draft_tokens, self._max_draft_tokens)
        return DraftTask(request, choice.drafter, most)

    def _quarantine(self, family: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.quarantined[family] = reason
        log.warning("drafter_quarantined", family=family, reason=reason)
        self._faults.append(f"drafter {family} quarantined: {reason}")


class _Session:
    """The drafts of one step while they are made."""

    def __init__(self, view: BatchView, plan: Plan, refine: Refine) -> None:
        self._view = view
        self._plan = plan
        self._refine = refine
        self._drafts: list[Draft] = [NO_DRAFT] * len(view.requests)
        self._limits = [choice.num_draft_tokens for choice in plan.choices]

    def keeper(self, rows: Sequence[int]) -> Callable[[Sequence[Draft]], Sequence[int]]:
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

    def close(self, seconds: dict[str, float]) -> Drafts:
        drafted = tuple(len(draft.tokens) for draft in self._drafts)
        confidence = self._confidence()
        if confidence is not None:
            self._shorten()
        kept = zip(self._drafts, self._limits, strict=True)
        drafts = tuple(draft.truncated(limit) for draft, limit in kept)
        return Drafts(drafts, drafted, confidence, seconds)

    def _shorten(self) -> None:
        """Ask the planner; a longer answer than the plan's counts as the plan's."""
        refined = self._refine(self._view, self._plan, self._confidence() or ())
        pairs = zip(self._limits, refined.choices, strict=True)
        self._limits = [min(limit, choice.num_draft_tokens) for limit, choice in pairs]

    def _confidence(self) -> Confidence | None:
        rows = tuple(draft.confidence for draft in self._drafts)
        return rows if any(rows) else None


def _rows_by_family(plan: Plan) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for row, choice in enumerate(plan.choices):
        if choice.drafter is not None:
            rows.setdefault(family_of(choice.drafter), []).append(row)
    return rows


def check_offer(drafter: Drafter, arm: str, hint: Hint | None) -> None:
    """Raise `DrafterFault` unless `arm` is one of the drafter's, and `hint` can be true."""
    if arm not in drafter.arms or family_of(arm) != drafter.family:
        raise DrafterFault(f"{arm!r} is none of the arms {drafter.arms}")
    if hint is None:
        return
    if not isinstance(hint, Hint):
        raise DrafterFault(f"a hint is a {type(hint).__name__}; return a Hint or None")
    counts = (hint.max_draft_tokens, hint.match_tokens, hint.catch_up_tokens)
    if any(count is not None and count < 0 for count in counts):
        raise DrafterFault(f"{hint}: counts of tokens are at least 0")
    if hint.confidence is not None and not 0.0 <= hint.confidence <= 1.0:
        raise DrafterFault(f"{hint}: a confidence lies in [0, 1]")


def check_draft(draft: Draft, task: DraftTask, *, vocab_size: int, allow_trees: bool) -> None:
    """Raise `DrafterFault` unless `draft` is a possible answer to `task`."""
    nodes = len(draft.tokens)
    if nodes > task.num_draft_tokens:
        raise DrafterFault(f"{nodes} draft tokens where {task.num_draft_tokens} were asked for")
    if len(draft.parents) != nodes or len(draft.confidence) not in (0, nodes):
        raise DrafterFault(
            f"{nodes} tokens, {len(draft.parents)} parents, {len(draft.confidence)} confidences; "
            "give one of each per node (confidence may be empty)"
        )
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in draft.tokens):
        raise DrafterFault(f"a draft token is no int in [0, {vocab_size}): {draft.tokens}")
    if not all(0.0 <= belief <= 1.0 for belief in draft.confidence):
        raise DrafterFault(f"confidences {draft.confidence} do not all lie in [0, 1]")
    if not all(ROOT <= parent < index for index, parent in enumerate(draft.parents)):
        raise DrafterFault(f"parents {draft.parents} do not stand before their children")
    if len(set(zip(draft.parents, draft.tokens, strict=True))) != nodes:
        raise DrafterFault("two siblings draft the same token")
    if not allow_trees and not draft.is_chain:
        raise DrafterFault("this verification takes chains only, and the draft is a tree")
    if draft.distribution is not None:
        _check_distribution(draft.distribution, nodes, vocab_size)


def _check_distribution(law: Tensor, nodes: int, vocab_size: int) -> None:
    if law.shape != (nodes, vocab_size):
        raise DrafterFault(f"distribution of shape {tuple(law.shape)}, not {(nodes, vocab_size)}")
    off_by = (law.sum(dim=-1, dtype=torch.float32) - 1.0).abs()
    if not bool(((law >= 0.0).all(dim=-1) & (off_by < _LAW_TOLERANCE)).all()):
        raise DrafterFault("a row of the distribution is negative, NaN, or does not sum to 1")
