"""A view as arrays: one column per request, read from its objects once.

Every estimator and policy that computes over the batch starts here. Knows nothing of what hints
mean for acceptance or cost. Requests are the last axis everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import BatchView, FloatArray, Hint, RequestView

__all__ = ["NO_LIMIT", "NO_MATCH", "Columns", "columns_of"]

IntArray = NDArray[np.int64]

NO_LIMIT = 1 << 30  # draft tokens, where a hint sets no limit
NO_MATCH = -1  # matched tokens, where a hint does not speak of matches

_NO_HINT = Hint()
_NOTHING_SAID = np.array([NO_LIMIT, NO_MATCH, 0])[:, None, None]  # tokens: limit, match, catch-up
_LEAST = np.array([0, NO_MATCH, 0])[:, None, None]


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
    all_allowed = bool(menus) and menus.count(menus[0]) == len(menus)
    distinct = menus[:1] if all_allowed else dict.fromkeys(menus)
    arms = tuple(dict.fromkeys([arm for menu in distinct for arm in menu]))
    counts = np.empty((3, len(arms), len(requests)), np.int64)
    counts[:] = _NOTHING_SAID
    columns = Columns(
        arms=arms,
        context_tokens=np.array([request.context_tokens for request in requests], np.int64),
        remaining_tokens=np.array([request.remaining_tokens for request in requests], np.int64),
        is_allowed=_everything(counts.shape[1:]) if all_allowed else _allowed(arms, menus),
        max_draft_tokens=counts[0],
        match_tokens=counts[1],
        confidence=_unknown(counts.shape[1:]),
        catch_up_tokens=counts[2],
        all_allowed=all_allowed,
    )
    hints = [request.hints for request in requests]
    hinted = set().union(*hints)
    for index, arm in enumerate(arms):
        if arm in hinted:
            _read_hints(columns, index, [menu.get(arm, _NO_HINT) for menu in hints])
    np.maximum(counts, _LEAST, out=counts)
    return columns


@lru_cache
def _everything(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    return np.ones(shape, np.bool_)  # shared by columns, which nobody writes to


def _unknown(shape: tuple[int, ...]) -> FloatArray:
    confidence = np.empty(shape)
    confidence.fill(np.nan)
    return confidence


def _allowed(arms: tuple[str, ...], menus: Sequence[tuple[str, ...]]) -> NDArray[np.bool_]:
    rows = {menu: [arm in menu for arm in arms] for menu in dict.fromkeys(menus)}
    allowed = np.array([rows[menu] for menu in menus], np.bool_).reshape(len(menus), len(arms))
    return np.ascontiguousarray(allowed.T)


def _read_hints(columns: Columns, arm: int, hints: Sequence[Hint]) -> None:
    """Fill in what the hints of one arm say."""
    _fill(columns.max_draft_tokens, arm, [hint.max_draft_tokens for hint in hints], NO_LIMIT)
    _fill(columns.match_tokens, arm, [hint.match_tokens for hint in hints], NO_MATCH)
    _fill(columns.confidence, arm, [hint.confidence for hint in hints], np.nan)
    catch_up = [hint.catch_up_tokens for hint in hints]
    if any(catch_up):
        columns.catch_up_tokens[arm] = catch_up


def _fill(
    table: IntArray | FloatArray, arm: int, values: Sequence[float | None], missing: float
) -> None:
    """Write the row of `arm`, with `missing`, which it holds already, in the place of None."""
    unknown = values.count(None)
    if unknown == 0:
        table[arm] = values  # type: ignore[assignment]
    elif unknown < len(values):
        table[arm] = [missing if value is None else value for value in values]
