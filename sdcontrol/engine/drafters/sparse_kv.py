"""Draft with the target itself, attending to a budget of its own cached pages.

No KV memory of its own: drafts write only slots beyond the committed length, in blocks that nobody
shares, and verification writes the same slots again before it reads them. Positions stay absolute;
chains only.

    pages of a request     0 1 | 2 3 4 5 6 7 8 | 9 10 | 11
    table, budget 6 pages  0 1                   8 9 10 11       sinks and recent pages
    table, scored          0 1     4     7         9 10 11       sinks, best pages, recent pages
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from sdcontrol.core import Hint
from sdcontrol.engine.drafters.base import Draft, DraftRequest, DraftTask, KeepDrafting
from sdcontrol.engine.drafters.host import DraftHost, ModelDrafter
from sdcontrol.engine.drafters.pages import PageScorer, WantedPages
from sdcontrol.engine.drafters.rounds import RoundModel, draft_in_rounds, request_of
from sdcontrol.engine.packing import IntArray, PageTable, Segment
from sdcontrol.engine.request import Request
from sdcontrol.errors import ConfigError

__all__ = ["SparseArm", "SparseKVDrafter"]

FAMILY = "sparse_kv"
_RECENT_SHARE = 4  # scored: one page in four of the budget is for the most recent ones


@dataclass(frozen=True, slots=True)
class SparseArm:
    """One budget. `sparse_kv:<tokens>` keeps recent pages, `sparse_kv:<tokens>:scored` the best."""

    budget_tokens: int
    is_scored: bool = False

    @property
    def name(self) -> str:
        """The name that a policy chooses."""
        return f"{FAMILY}:{self.budget_tokens}" + (":scored" if self.is_scored else "")

    @staticmethod
    def parse(name: str) -> "SparseArm":
        """The arm of this name; raises `ConfigError`."""
        parts = name.split(":")
        scored = parts[2:] == ["scored"]
        if parts[0] != FAMILY or len(parts) not in (2, 3) or (len(parts) == 3 and not scored):
            raise ConfigError(f"{name!r}: write sparse_kv:<tokens> or sparse_kv:<tokens>:scored")
        if not parts[1].isdigit() or int(parts[1]) < 1:
            raise ConfigError(f"{name!r}: the budget must be a positive number of tokens")
        return SparseArm(int(parts[1]), scored)


class SparseKVDrafter(ModelDrafter):
    """Self-drafting under one or several budgets; all of them share a forward."""

    name = FAMILY

    def __init__(self, arms: Sequence[SparseArm], *, sink_tokens: int = 16) -> None:
        if not arms or len({arm.name for arm in arms}) < len(arms):
            raise ConfigError(f"sparse_kv needs distinct budgets, got {[arm.name for arm in arms]}")
        self._arms = {arm.name: arm for arm in arms}
        self._budgets = sorted({arm.budget_tokens for arm in arms})
        self._offers: list[Mapping[str, Hint | None]] = [  # by how many budgets leave something out
            MappingProxyType({arm.name: None for arm in arms if arm.budget_tokens < least})
            for least in (*self._budgets, self._budgets[-1] + 1)
        ]
        self._sink_tokens = sink_tokens
        self._scorer: PageScorer | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        """One per budget."""
        return tuple(self._arms)

    def attach(self, host: DraftHost) -> None:
        """Draft with the engine's target; a budget must hold sinks and two further pages."""
        page = host.config.block_size
        self._sink_pages = -(-self._sink_tokens // page)
        for arm in self._arms.values():
            if arm.budget_tokens // page < self._sink_pages + 2:
                raise ConfigError(
                    f"{arm.name}: a budget of {arm.budget_tokens} tokens is under "
                    f"{self._sink_pages + 2} pages of {page}; raise it to at least "
                    f"{(self._sink_pages + 2) * page}"
                )
        self._host = host
        if any(arm.is_scored for arm in self._arms.values()):
            self._scorer = host.scorer = PageScorer(host)

    def start(self, request: DraftRequest) -> None:
        """Page scores need the queries of the latest full page: those are never taken over."""
        if self._scorer is not None:
            assert isinstance(request, Request)
            request.scheduled.recompute_tail_tokens = 2 * self._host.config.block_size

    def arms_for(self, request: DraftRequest) -> tuple[str, ...]:
        """The budgets that leave something out."""
        length = len(request.tokens)
        return tuple(name for name, arm in self._arms.items() if arm.budget_tokens < length)

    def offers(self, requests: Sequence[DraftRequest]) -> Sequence[Mapping[str, Hint | None]]:
        """As `arms_for` says; the same arms are the same object."""
        offers, budgets = self._offers, self._budgets
        return [offers[bisect_left(budgets, len(request.tokens))] for request in requests]

    def commit_all(self, committed: Sequence[tuple[DraftRequest, int]]) -> None:
        """Nothing of ours hangs on it."""

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> list[Draft]:
        """Chains, one forward a round for all budgets."""
        tables = self._tables([(request_of(task), self._arms[task.arm]) for task in tasks])

        def segment(request: Request, drafted: Sequence[int]) -> Segment:
            start = len(request.tokens) - 1 + len(drafted)
            return Segment(
                tokens=[drafted[-1] if drafted else request.tokens[-1]],
                start=start,
                table=tables[request.id],
                slots=request.slots(start, 1, self._host.config.block_size),
            )

        target = self._host.target
        model = RoundModel(target, segment, self._host.verification, target.vocab_size)
        return draft_in_rounds(tasks, keep_drafting, model)

    def _tables(self, drafting: Sequence[tuple[Request, SparseArm]]) -> dict[str, PageTable]:
        """By request, what its arm lets it see; all pages are chosen together."""
        page, sinks = self._host.config.block_size, self._sink_pages
        first_recent: list[int] = []
        wanted: dict[str, WantedPages] = {}
        for request, arm in drafting:
            budget = arm.budget_tokens // page
            recent = max(budget // _RECENT_SHARE, 1) if arm.is_scored else budget - sinks
            last = (len(request.tokens) - 1) // page  # the page that the last token lies in
            first_recent.append(last + 1 - recent)
            if arm.is_scored:
                count = budget - sinks - recent
                wanted[request.id] = WantedPages(request, sinks, last + 1 - recent, count)
        chosen: dict[str, IntArray] = {}
        if self._scorer is not None and wanted:
            pages = self._scorer.choose(list(wanted.values()))
            chosen = dict(zip(wanted, pages, strict=True))
        nothing: IntArray = np.empty(0, dtype=np.int64)
        return {
            request.id: _sparse_table(
                request.page_table(page).blocks, sinks, chosen.get(request.id, nothing), first, page
            )
            for (request, _), first in zip(drafting, first_recent, strict=True)
        }


def _sparse_table(
    blocks: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    sink_pages: int,
    chosen: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
    first_recent: int,
    page: int,
) -> PageTable:
    """Sinks, then `chosen` blocks `[..., pages]`, then everything from `first_recent` on."""
    lead = chosen.shape[:-1]
    sinks = np.broadcast_to(blocks[:sink_pages], (*lead, sink_pages))
    recent = np.broadcast_to(blocks[first_recent:], (*lead, len(blocks) - first_recent))
    table = np.concatenate((sinks, chosen, recent), axis=-1)
    return PageTable(table, shift=(first_recent - sink_pages - chosen.shape[-1]) * page)
