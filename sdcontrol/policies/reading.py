"""From a view and a belief to a problem, and from its answer to a plan.

Knows names, hints and limits; nothing of how the best plan is found.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sdcontrol.columns import NO_LIMIT, columns_of
from sdcontrol.core import BatchView, Belief, Choice, Cost, FloatArray, Plan, family_of
from sdcontrol.estimators.overhead import Overheads
from sdcontrol.estimators.price import (
    even_draft,
    is_tabled,
    overheads_of,
    padding_seconds,
    sparse_budget,
)
from sdcontrol.estimators.survival import Survival
from sdcontrol.policies.asking import draft_seconds, survival_table, verify_seconds
from sdcontrol.policies.posing import Horizon, Posed, Prices, lags_of, pose, price, spare, spent
from sdcontrol.policies.problem import Answer, IntArray, Problem

__all__ = [
    "Layout",
    "layout_of",
    "least_seconds",
    "read",
    "read_drafted",
    "rows_of",
    "to_choices",
    "without_prefill",
]


_MOST_KEPT = 256  # of what follows from names and sizes: views may offer ever new menus
_NO_TABLE: FloatArray = np.zeros((0, 0))
_AT_ONCE: Horizon = 1.0, 1.0, 1.0, 0.0


class Layout(NamedTuple):
    """What follows from the arms' names alone."""

    arms: tuple[str, ...]  # neighbours where they share a family
    families: tuple[str, ...]
    family: IntArray  # [arms]
    rows: IntArray  # [arms], of the view's columns
    budgets: IntArray  # [arms], KV tokens that a round reads at most


def read(
    view: BatchView, belief: Belief, horizon: Horizon, beside: Overheads | None = None
) -> Problem | None:
    """The problem of one step; None where nobody can draft. `beside` is what the cost says unless given.

    A catch-up of seconds c is charged to the step in proportion to the tokens that it serves:
    c * (most tokens that the step can emit) / min(those of the remaining that it serves, horizon), at most c.
    """
    columns, cost = columns_of(view), belief.cost
    layout = layout_of(columns.arms, tuple(belief.survival))
    survival = _stack(layout.arms, belief.survival, len(view.requests))
    if not survival.size:
        return None
    posed = pose(
        survival,
        (
            columns.context_tokens,
            columns.remaining_tokens,
            columns.max_draft_tokens,
            columns.is_allowed,
        ),
        (layout.rows, layout.budgets, layout.family),
    )
    rounds, catch_up = price(
        posed,
        _prices(layout, cost, posed, columns.catch_up_tokens if columns.said.lags else None),
        (columns.catch_up_tokens, columns.remaining_tokens),
        (layout.rows, layout.family),
        (horizon, padding_seconds(cost, float(columns.kv_tokens))),
    )
    gain, limit, reads, _, most_tokens = posed
    verify = _verify(view, cost, view.prefill_tokens, most_tokens)
    plain, drafting = beside or overheads_of(cost)
    if more := drafting - cost.overhead_seconds():
        verify += more
    if plain != drafting:
        verify[0] += plain - drafting
    if isinstance(belief.survival, Survival):
        rows = rows_of(layout.arms, belief.survival.arms)
        spare(reads, verify, belief.survival.coming, rows)
    drafted = np.zeros(len(rounds), dtype=np.int64)
    return Problem(
        layout.arms, gain, limit, layout.family, verify, rounds, reads, catch_up, drafted
    )


def read_drafted(
    view: BatchView, plan: Plan, drafted: Sequence[int], belief: Belief
) -> Problem | None:
    """The problem of how much of `plan` to submit, once `drafted[r]` tokens of it are drafted.

    Every request keeps its arm and may only draft less. Rounds that were drafted are part of the
    step whatever is submitted; rounds to come have their price. None where no arm is believed in.
    """
    columns = columns_of(view)
    offered = tuple(dict.fromkeys(c.drafter for c in plan.choices if c.drafter is not None))
    layout = layout_of(offered, tuple(belief.survival))
    if not layout.arms:
        return None
    index_of = {arm: a for a, arm in enumerate(layout.arms)}
    arm = np.array([index_of.get(c.drafter or "", -1) for c in plan.choices])
    planned = np.array([c.num_draft_tokens for c in plan.choices])
    limits = np.where(arm == np.arange(len(layout.arms))[:, None], planned, 0)
    own, nothing = np.arange(len(layout.arms)), np.zeros_like(limits)
    survival = _stack(layout.arms, belief.survival, len(view.requests))
    posed = pose(
        np.ascontiguousarray(survival[:, :, : planned.max()]),
        (columns.context_tokens, columns.remaining_tokens, limits, np.ones(limits.shape, np.bool_)),
        (own, layout.budgets, layout.family),
    )
    rounds, catch_up = price(
        posed,
        _prices(layout, belief.cost, posed, None),
        (nothing, columns.remaining_tokens),
        (own, layout.family),
        (_AT_ONCE, padding_seconds(belief.cost, float(columns.kv_tokens))),
    )
    gain, limit, reads, _, _ = posed
    done, seconds = spent(rounds, layout.family, arm, np.array(drafted, dtype=np.int64))
    verify = _verify(view, belief.cost, view.prefill_tokens, int(planned.sum()))
    verify += seconds + overheads_of(belief.cost).drafting - belief.cost.overhead_seconds()
    return Problem(layout.arms, gain, limit, layout.family, verify, rounds, reads, catch_up, done)


def least_seconds(problem: Problem, view: BatchView, cost: Cost) -> float:
    """A step of the same KV tokens with a single token to compute, after the same drafting."""
    drafting = problem.verify[0] - _verify(view, cost, view.prefill_tokens, 0)[0]
    return float(_verify(view, cost, 1 - len(view.requests), 0)[0] + drafting)


def without_prefill(problem: Problem, view: BatchView, cost: Cost) -> Problem:
    """The same step without the prompt tokens beside it."""
    most = len(problem.verify) - 1
    beside = problem.verify - _verify(
        view, cost, view.prefill_tokens, most
    )  # and of rounds that are made
    return problem._replace(verify=_verify(view, cost, 0, most) + beside)


def to_choices(arms: tuple[str, ...], lengths: int, answer: Answer) -> tuple[Choice, ...]:
    """The choices of `answer` to a problem of these arms and lengths, one per request."""
    table, choices = _choices(arms, lengths), []
    for arm, length in zip(answer.arm.tolist(), answer.length.tolist(), strict=True):
        choices.append(table[arm][length])  # in no comprehension, nor by numpy: see `columns`
    return tuple(choices)


def _stack(
    arms: tuple[str, ...], survival: Mapping[str, FloatArray], num_requests: int
) -> FloatArray:
    """Survival `[arms, requests, K]`, K the most of any arm."""
    if isinstance(survival, Survival):
        table = survival.table
        if (survival.arms, table.shape[1]) == (arms, num_requests):
            return table
    if not arms:
        return np.zeros((0, 0, 0))
    try:
        alike = np.array([survival[arm] for arm in arms], np.float64)
    except (TypeError, ValueError):  # of different depths, or no tables
        alike = np.zeros(0)
    if alike.ndim == 3 and alike.shape[1] == num_requests:
        return alike
    tables = [survival_table(survival, arm, num_requests) for arm in arms]
    depth = max([rows.shape[1] for rows in tables])
    stacked = np.zeros((len(arms), num_requests, depth))
    for a, rows in enumerate(tables):
        stacked[a, :, : rows.shape[1]] = rows
    return stacked


def _verify(view: BatchView, cost: Cost, prefill_tokens: int, most_tokens: int) -> FloatArray:
    """Seconds beside drafting and padding, `[draft tokens + 1]`, as far as KV slots and limits go."""
    batch, kv_tokens = len(view.requests), float(columns_of(view).kv_tokens)
    draft_tokens = max(min(most_tokens, view.free_kv_tokens), 0)
    first = batch + prefill_tokens
    if is_tabled(cost):
        return cost.step_table(first, draft_tokens, kv_tokens, batch)
    tokens = np.arange(first, first + draft_tokens + 1, dtype=np.float64)
    seconds = verify_seconds(cost, tokens, kv_tokens, batch) + cost.overhead_seconds()
    padding = padding_seconds(cost, kv_tokens)
    if padding:
        seconds = seconds - padding * even_draft(tokens, batch)
    return np.asarray(seconds, dtype=np.float64)


def _prices(layout: Layout, cost: Cost, posed: Posed, lagging: IntArray | None) -> Prices:
    """Seconds of rounds, and of rounds and catch-up along lines; a table of rounds goes first.

    `lagging` is None where nobody lags.
    """
    if is_tabled(cost):
        return _NO_TABLE, cost.lines(layout.families)
    batch, families = posed[2].shape[1], len(layout.families)
    rounds, lines = np.zeros((families + 1, batch + 2)), np.zeros((families, 5))
    count, share = _counts(batch)
    kv_tokens = posed[3][:, None] * share
    for f, family in enumerate(layout.families):
        rounds[f, 1:] = draft_seconds(cost, family, count, kv_tokens[f])
    if lagging is not None and hasattr(cost, "catch_up_seconds"):
        lags = lags_of(lagging, (layout.rows, layout.family), families).tolist()
        for f, family in enumerate(layout.families):
            if lags[f][1]:
                lines[f, 3:] = _catch_up_line(cost, family, *lags[f])
    return rounds, lines


def _catch_up_line(cost: Cost, family: str, fewest: int, most: int) -> tuple[float, float]:
    """Base and price per token, on the line through the fewest and the most tokens."""
    seconds: Callable[[str, int], float] = cost.catch_up_seconds  # type: ignore[attr-defined]
    most = max(most, fewest + 1)
    low, high = float(seconds(family, fewest)), float(seconds(family, most))
    slope = (high - low) / (most - fewest)
    return low - slope * fewest, slope


@lru_cache(_MOST_KEPT)
def layout_of(offered: tuple[str, ...], believed: tuple[str, ...]) -> Layout:
    """The layout of a step that offers arms, for those of which something is believed."""
    known = [arm for arm in offered if arm in believed]
    families = tuple(dict.fromkeys(map(family_of, known)))
    arms = tuple(sorted(known, key=lambda arm: families.index(family_of(arm))))
    budgets = [sparse_budget(arm) for arm in arms]
    return Layout(
        arms=arms,
        families=families,
        family=np.array([families.index(family_of(arm)) for arm in arms], dtype=np.int64),
        rows=np.array([offered.index(arm) for arm in arms], dtype=np.int64),
        budgets=np.array([NO_LIMIT if b is None else b for b in budgets], dtype=np.int64),
    )


@lru_cache(_MOST_KEPT)
def rows_of(arms: tuple[str, ...], among: tuple[str, ...]) -> IntArray:
    """Where each arm is among others, `[arms]`."""
    return np.array([among.index(arm) for arm in arms], dtype=np.int64)


@lru_cache(_MOST_KEPT)
def _choices(arms: tuple[str, ...], lengths: int) -> tuple[tuple[Choice, ...], ...]:
    return tuple(tuple(Choice.of(arm, n) for n in range(lengths)) for arm in arms)


@lru_cache(_MOST_KEPT)
def _counts(batch: int) -> tuple[FloatArray, FloatArray]:
    """Requests in a round, 1..batch and batch again; the last one reads half the KV."""
    count = np.append(np.arange(1.0, batch + 1.0), float(batch))
    return count, np.append(count[:-1], 0.5 * batch)
