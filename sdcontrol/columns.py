"""Views and observations as arrays: one column per request, read from their objects once.

Every estimator and policy that computes over the batch starts here. Knows nothing of what hints
mean for acceptance or cost. Requests are the last axis everywhere.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, FloatArray, Hint, Observation, RequestView

__all__ = [
    "ACCEPTED",
    "ARM",
    "ASKED",
    "DRAFTED",
    "EMITTED",
    "NOBODY",
    "NO_LIMIT",
    "NO_MATCH",
    "PROPOSED",
    "SHADOWS",
    "Columns",
    "Outcomes",
    "Said",
    "columns_of",
    "ids_of",
    "kv_tokens_of",
    "read_steps",
    "said_of",
    "sorted_out",
]

IntArray = NDArray[np.int64]

NO_LIMIT = 1 << 30  # draft tokens, where a hint sets no limit
NO_MATCH = -1  # matched tokens, where a hint does not speak of matches

ARM, ASKED, DRAFTED, PROPOSED, ACCEPTED, EMITTED, SHADOWS = range(7)  # rows of `Outcomes.table`
NOBODY = -1  # arm of a request that did not draft; tokens of a shadow that nobody knows

_NO_HINT = Hint()
_COUNTED = tuple(map(attrgetter, ("drafted", "proposed", "accepted", "emitted")))
_SILENT = (False,) * 4  # columns of one arm's hints
_LAGS = 3  # the last of them


class Said(NamedTuple):
    """A view as it was read, before its numbers are sorted out. Do not write."""

    arms: tuple[str, ...]
    is_allowed: NDArray[np.bool_]  # [arms, requests]
    values: FloatArray  # what `sorted_out` takes; `says` comes first
    says: tuple[bool, ...]  # by arm and column, whether any hint says anything
    kv_tokens: int  # of all requests

    @property
    def lags(self) -> bool:
        """Whether any drafter's cache lags for any request."""
        return True in self.says[_LAGS :: len(_SILENT)]


class Columns(NamedTuple):
    """The requests of a view, `[requests]`, and their hints, `[arms, requests]`. Do not write."""

    arms: tuple[str, ...]  # whatever any request may use, in order of first appearance
    is_allowed: NDArray[np.bool_]  # [arms, requests]
    context_tokens: IntArray
    remaining_tokens: IntArray
    max_draft_tokens: IntArray  # at least 0, `NO_LIMIT` where no hint limits it
    match_tokens: IntArray  # at least 0, or `NO_MATCH`
    confidence: FloatArray  # NaN where nothing is known
    catch_up_tokens: IntArray
    kv_tokens: int  # of all requests
    said: Said


class Outcomes(NamedTuple):
    """What came of a step, or of several as of one, as arrays."""

    arms: tuple[str, ...]  # the view's, then others that were used or scored in shadow
    table: IntArray  # [SHADOWS + shadows, requests]; row `ARM` by index in `arms`, or `NOBODY`
    shadows: tuple[int, ...]  # the arm of each shadow, by index in `arms`


def columns_of(view: BatchView) -> Columns:
    """The columns of `view`, made at the first call and kept with it."""
    kept = view._columns
    if isinstance(kept, Columns):
        return kept
    said = said_of(view)
    numbers = sorted_out(said.values, *said.is_allowed.shape)
    columns = Columns(said.arms, said.is_allowed, *numbers, said.kv_tokens, said)
    object.__setattr__(view, "_columns", columns)
    return columns


def ids_of(view: BatchView) -> tuple[str, ...]:
    """Of the requests, in order; read at the first call, and kept with the view."""
    kept = view._ids
    if not isinstance(kept, tuple):
        kept = tuple([request.id for request in view.requests])
        object.__setattr__(view, "_ids", kept)
    return kept


def kv_tokens_of(view: BatchView) -> int:
    """Of all requests; not read again where that was done."""
    said = _kept(view)
    return said.kv_tokens if said else sum([request.context_tokens for request in view.requests])


def said_of(view: BatchView) -> Said:
    """The view's numbers as they were read, at the first call, and kept with it."""
    said = _kept(view)
    if said is None:
        said = _read(view.requests)
        object.__setattr__(view, "_columns", said)
    return said


def _kept(view: BatchView) -> Said | None:
    kept = view._columns
    if isinstance(kept, Columns):
        return kept.said
    return kept if isinstance(kept, Said) else None


def read_steps(observations: Sequence[Observation]) -> tuple[Said, Outcomes]:
    """Several steps, each of which was checked, as one that has all their requests, in order."""
    if len(observations) == 1:
        said = said_of(observations[0].view)
    else:
        read = _side_by_side([_kept(one.view) for one in observations])
        said = read or _read([request for one in observations for request in one.view.requests])
    return said, _read_outcomes(observations, said.arms)


def _side_by_side(read: Sequence[Said | None]) -> Said | None:
    """Views as one, in order; None where some were not read, or their hints speak of different things."""
    views = [view for view in read if view is not None]
    if len(views) < len(read):
        return None
    arms, _, values, says, _ = views[0]
    if any(view.arms != arms or view.says != says for view in views):
        return None
    tables = [view.values[len(says) :].reshape(2 + sum(says), -1) for view in views]
    allowed = [view.is_allowed for view in views]
    is_uniform = all(one is _everything(one.shape) for one in allowed)
    table = np.concatenate(tables, axis=1)
    shape = len(arms), table.shape[1]
    return Said(
        arms,
        _everything(shape) if is_uniform else np.concatenate(allowed, axis=1),
        np.concatenate((values[: len(says)], table.ravel())),
        says,
        sum([view.kv_tokens for view in views]),
    )


def _read(requests: Sequence[RequestView]) -> Said:
    """Two loops: right after a forward a comprehension is one more piece of code to fetch."""
    contexts, remaining, menus, hints = [], [], [], []
    for request in requests:
        contexts.append(request.context_tokens)
        remaining.append(request.remaining_tokens)
        menus.append(request.drafters)
        hints.append(request.hints)
    is_uniform = bool(menus) and menus.count(menus[0]) == len(menus)
    arms = tuple(dict.fromkeys(menus[0] if is_uniform else chain.from_iterable(menus)))
    says: list[bool] = []
    values: list[float | None] = [*contexts, *remaining]
    for arm in arms:
        _add_what_is_said(arm, hints, says, values)
    shape = len(arms), len(requests)
    is_allowed = _everything(shape) if is_uniform else _allowed(arms, menus)
    numbers = np.array(says + values, np.float64)
    return Said(arms, is_allowed, numbers, tuple(says), sum(contexts))


def _add_what_is_said(
    arm: str,
    hints: Sequence[Mapping[str, Hint]],
    says: list[bool],
    values: list[float | None],
) -> None:
    """Add which columns of an arm say anything, and what those say, by request."""
    limits: list[float | None] = []
    matches: list[float | None] = []
    confidences: list[float | None] = []
    lags: list[float | None] = []
    for menu in hints:
        hint = menu.get(arm, _NO_HINT)
        limits.append(hint.max_draft_tokens)
        matches.append(hint.match_tokens)
        confidences.append(hint.confidence)
        lags.append(hint.catch_up_tokens)
    for said in (limits, matches, confidences, lags):
        is_said = said.count(0 if said is lags else None) < len(said)
        says.append(is_said)
        if is_said:
            values += said


@lru_cache
def _everything(shape: tuple[int, int]) -> NDArray[np.bool_]:
    return np.ones(shape, np.bool_)  # shared by columns, which nobody writes to


def _allowed(arms: tuple[str, ...], menus: list[tuple[str, ...]]) -> NDArray[np.bool_]:
    rows = {menu: [arm in menu for arm in arms] for menu in dict.fromkeys(menus)}
    allowed = np.array([rows[menu] for menu in menus], np.bool_).reshape(len(menus), len(arms))
    return np.ascontiguousarray(allowed.T)


@compiled(
    "Tuple((int64[::1], int64[::1], int64[:,::1], int64[:,::1], float64[:,::1], int64[:,::1]))"
    "(float64[::1], int64, int64)",
    is_inlined=True,
)
def sorted_out(
    values: FloatArray, arms: int, requests: int
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The numeric columns, of `Said.values`; NaN is None."""
    columns = len(_SILENT)
    at = columns * arms
    context, remaining = np.empty(requests, np.int64), np.empty(requests, np.int64)
    for r in range(requests):
        context[r], remaining[r] = values[at + r], values[at + requests + r]
    at += 2 * requests
    shape = arms, requests
    counts = np.full(shape, NO_LIMIT), np.full(shape, NO_MATCH), np.zeros(shape, np.int64)
    confidence = np.full(shape, np.nan)
    for c in range(columns * arms):
        if values[c] == 0.0:
            continue
        a, column = c // columns, c % columns
        for r in range(requests):
            value = values[at + r]
            if column == 0 and value == value:
                counts[0][a, r] = max(value, 0.0)
            elif column == 1 and value == value:
                counts[1][a, r] = max(value, float(NO_MATCH))
            elif column == 2:
                confidence[a, r] = value
            elif value == value:
                counts[2][a, r] = max(value, 0.0)
        at += requests
    limit, match, catch_up = counts
    return context, remaining, limit, match, confidence, catch_up


def _read_outcomes(observations: Sequence[Observation], arms: tuple[str, ...]) -> Outcomes:
    drafters = [choice.drafter for one in observations for choice in one.plan.choices]
    shadowed = dict.fromkeys([arm for one in observations for arm in one.shadow])
    index = _positions(arms)
    if not (index.keys() >= shadowed.keys() and index.keys() >= set(drafters)):
        used = [arm for arm in drafters if arm is not None]
        arms = tuple(dict.fromkeys([*arms, *used, *shadowed]))
        index = _positions(arms)
    values = [index[arm] for arm in drafters]
    for one in observations:
        values += _asked(one)
    for column in _COUNTED:
        values += chain.from_iterable([column(one) for one in observations])
    for arm in shadowed:  # nobody knows of the steps in which it was not scored
        for one in observations:
            values += map(_known, one.shadow.get(arm) or (None,) * len(one.accepted))
    table = np.array(values, np.int64).reshape(SHADOWS + len(shadowed), len(drafters))
    return Outcomes(arms, table, tuple([index[arm] for arm in shadowed]))


def _asked(observation: Observation) -> Sequence[int]:
    """Draft tokens that drafters were asked for; as many as came of a step in which something failed."""
    if observation.faults:
        return observation.drafted
    return [choice.num_draft_tokens for choice in observation.plan.choices]


def _known(count: int | None) -> int:
    return NOBODY if count is None else count


@lru_cache
def _positions(arms: tuple[str, ...]) -> dict[str | None, int]:
    return {None: NOBODY, **{arm: index for index, arm in enumerate(arms)}}
