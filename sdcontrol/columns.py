"""A view as arrays: one column per request, read from its objects once.

Every estimator and policy that computes over the batch starts here. Knows nothing of what hints
mean for acceptance or cost. Requests are the last axis everywhere.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import BatchView, FloatArray, Hint, RequestView

__all__ = ["NO_LIMIT", "NO_MATCH", "Columns", "columns_of"]

IntArray = NDArray[np.int64]

NO_LIMIT = 1 << 30  # draft tokens, where a hint sets no limit
NO_MATCH = -1  # matched tokens, where a hint does not speak of matches


@dataclass(frozen=True, slots=True)
class Columns:
    """The requests of a view, `[requests]`, and their hints, `[arms, requests]`. Do not write."""

    arms: tuple[str, ...]  # whatever any request may use, in order of first appearance
    context_tokens: IntArray
    remaining_tokens: IntArray
    is_allowed: NDArray[np.bool_]  # [arms, requests]
    max_draft_tokens: IntArray  # at least 0, `NO_LIMIT` where no hint limits it
    match_tokens: IntArray  # at least 0, or `NO_MATCH`
    confidence: FloatArray  # NaN where nothing is known
    catch_up_tokens: IntArray
    all_allowed: bool  # every request may use every arm


def columns_of(view: BatchView) -> Columns:
    """The columns of `view`, made at the first call and kept with it."""
    kept = view._columns
    if not isinstance(kept, Columns):
        kept = _read(view.requests)
        object.__setattr__(view, "_columns", kept)
    return kept


def _read(requests: tuple[RequestView, ...]) -> Columns:
    menus = [request.drafters for request in requests]
    distinct = dict.fromkeys(menus)
    arms = tuple(dict.fromkeys(arm for menu in distinct for arm in menu))
    shape = len(arms), len(requests)
    is_allowed = np.ones(shape, dtype=np.bool_)
    all_allowed = len(distinct) == 1
    if not all_allowed:
        table = np.array([[arm in menu for menu in distinct] for arm in arms], dtype=np.bool_)
        index_of = {menu: index for index, menu in enumerate(distinct)}
        is_allowed = table.reshape(len(arms), len(distinct))[:, [index_of[menu] for menu in menus]]
    columns = Columns(
        arms=arms,
        context_tokens=np.array([r.context_tokens for r in requests], dtype=np.int64),
        remaining_tokens=np.array([r.remaining_tokens for r in requests], dtype=np.int64),
        is_allowed=is_allowed,
        max_draft_tokens=np.full(shape, NO_LIMIT, dtype=np.int64),
        match_tokens=np.full(shape, NO_MATCH, dtype=np.int64),
        confidence=np.full(shape, np.nan),
        catch_up_tokens=np.zeros(shape, dtype=np.int64),
        all_allowed=all_allowed,
    )
    hints = [request.hints for request in requests]
    hinted = set().union(*hints)
    for index, arm in enumerate(arms):
        if arm in hinted:
            _read_arm(columns, index, [menu.get(arm) for menu in hints])
    return columns


def _read_arm(columns: Columns, arm: int, hints: list[Hint | None]) -> None:
    """Fill in what the hints of one arm say."""
    rows: list[int] | slice = slice(None)
    found = [hint for hint in hints if hint is not None]
    if len(found) < len(hints):
        rows = [row for row, hint in enumerate(hints) if hint is not None]
    limits = [hint.max_draft_tokens for hint in found]
    columns.max_draft_tokens[arm, rows] = [NO_LIMIT if n is None else max(n, 0) for n in limits]
    matches = [hint.match_tokens for hint in found]
    columns.match_tokens[arm, rows] = [NO_MATCH if n is None else max(n, 0) for n in matches]
    confidence = [hint.confidence for hint in found]
    if any(value is not None for value in confidence):
        columns.confidence[arm, rows] = [np.nan if c is None else c for c in confidence]
    catch_up = [hint.catch_up_tokens for hint in found]
    if any(catch_up):
        columns.catch_up_tokens[arm, rows] = catch_up
