"""From a view and a belief to a problem, and from its answer to a plan.

Knows names, hints and limits; nothing of how the best plan is found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import NO_LIMIT, columns_of
from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, Belief, Choice, Cost, FloatArray, Plan, family_of
from sdcontrol.estimators.price import sparse_budget
from sdcontrol.policies.problem import Answer, IntArray, Problem

__all__ = ["read", "read_drafted", "to_choices", "without_prefill"]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What follows from the arms' names alone."""

    arms: tuple[str, ...]  # neighbours where they share a family
    families: tuple[str, ...]
    family: IntArray  # [arms]
    rows: IntArray  # [arms], of the view's columns
    budgets: IntArray  # [arms], KV tokens that a round reads at most


def read(view: BatchView, belief: Belief, catch_up_horizon_tokens: int) -> Problem | None:
    """The problem of one step; None where nobody can draft.

    A catch-up of seconds c is charged to the step in proportion to the tokens that it serves:
    c * (most tokens that the step can emit) / min(remaining tokens, horizon), at most c.
    """
    columns = columns_of(view)
    layout = _layout(columns.arms, tuple(belief.survival))
    survival = _stack(layout.arms, belief)
    if not survival.size:
        return None
    gain, limit, reads, lag = _prepare(
        survival,
        (
            columns.context_tokens,
            columns.remaining_tokens,
            columns.max_draft_tokens,
            columns.is_allowed,
            columns.catch_up_tokens,
        ),
        layout.rows,
        layout.budgets,
    )
    verify = _verify(view, belief.cost, int(limit.max(axis=0).sum()))
    rounds = _rounds(layout, belief.cost, reads)
    catch_up = np.zeros(limit.shape)
    if lag.any():
        lines = _catch_up_lines(layout, belief.cost, lag)
        horizon = np.minimum(columns.remaining_tokens, catch_up_horizon_tokens)
        _spread(catch_up, lines, columns.catch_up_tokens[layout.rows], gain, horizon)
    _centre(reads, rounds, layout.family)
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
    layout = _layout(offered, tuple(belief.survival))
    if not layout.arms:
        return None
    index_of = {arm: a for a, arm in enumerate(layout.arms)}
    arm = np.array([index_of.get(c.drafter or "", -1) for c in plan.choices])
    planned = np.array([c.num_draft_tokens for c in plan.choices])
    limits = np.where(arm == np.arange(len(layout.arms))[:, None], planned, 0)
    gain, limit, reads, _ = _prepare(
        np.ascontiguousarray(_stack(layout.arms, belief)[:, :, : planned.max()]),
        (
            columns.context_tokens,
            columns.remaining_tokens,
            limits,
            np.ones(limits.shape, dtype=np.bool_),
            np.zeros_like(limits),
        ),
        np.arange(len(layout.arms)),
        layout.budgets,
    )
    rounds = _rounds(layout, belief.cost, reads)
    _centre(reads, rounds, layout.family)
    counts = np.array(drafted, dtype=np.int64)
    done, spent = _spent(rounds, layout.family, arm, counts)
    verify = _verify(view, belief.cost, int(planned.sum())) + spent
    return Problem(
        layout.arms, gain, limit, layout.family, verify, rounds, reads, np.zeros(limit.shape), done
    )


def without_prefill(problem: Problem, view: BatchView, cost: Cost) -> Problem:
    """The same step without the prompt tokens beside it."""
    alone = replace(view, prefill_tokens=0)
    difference = _verify(view, cost, 0)[0] - _verify(alone, cost, 0)[0]
    verify = _verify(alone, cost, len(problem.verify) - 1)
    spent = max(float(problem.verify[0]) - difference - float(verify[0]), 0.0)  # on drafting
    return replace(problem, verify=verify + spent)


def to_choices(problem: Problem, answer: Answer) -> tuple[Choice, ...]:
    """The choices of `answer`, one per request."""
    table = _choices(problem.arms, problem.lengths)
    cells = (answer.arm * problem.lengths + answer.length).tolist()
    return tuple([table[cell] for cell in cells])


def _stack(arms: tuple[str, ...], belief: Belief) -> FloatArray:
    """Survival `[arms, requests, K]`, K the most of any arm."""
    tables = [belief.survival[arm] for arm in arms]
    if not tables:
        return np.zeros((0, 0, 0))
    depth = max(rows.shape[1] for rows in tables)
    stacked = np.zeros((len(arms), len(tables[0]), depth))
    for a, rows in enumerate(tables):
        stacked[a, :, : rows.shape[1]] = rows
    return stacked


def _verify(view: BatchView, cost: Cost, most_tokens: int) -> FloatArray:
    """Seconds beside the drafting, `[draft tokens + 1]`, as far as KV slots and limits go."""
    batch, kv_tokens = len(view.requests), float(columns_of(view).context_tokens.sum())
    draft_tokens = max(min(most_tokens, view.free_kv_tokens), 0)
    first = batch + view.prefill_tokens
    tokens = np.arange(float(first), first + draft_tokens + 0.5)
    seconds = cost.verify_seconds(tokens, kv_tokens, batch) + cost.overhead_seconds()
    return np.asarray(seconds, dtype=np.float64)


def _rounds(layout: _Layout, cost: Cost, reads: FloatArray) -> FloatArray:
    """Seconds of a round by the requests in it, at the family's average KV tokens per request.

    The last column is that of all requests with half the KV tokens.
    """
    batch = reads.shape[1]
    rounds = np.zeros((len(layout.families), batch + 2))
    count, share = _counts(batch)
    means = _means(reads, layout.family, len(layout.families)).tolist()
    for f, (name, mean) in enumerate(zip(layout.families, means, strict=True)):
        rounds[f, 1:] = cost.draft_seconds(name, count, share * mean)
    return rounds


def _catch_up_lines(layout: _Layout, cost: Cost, lag: IntArray) -> FloatArray:
    """Seconds of a catch-up as base and price per token, `[arms, 2]`, through fewest and most."""
    lines = np.zeros(lag.shape)
    price = getattr(cost, "catch_up_seconds", None)
    for a, (fewest, most) in enumerate(lag.tolist()):
        if price is not None and most:
            family = family_of(layout.arms[a])
            low, high = float(price(family, fewest)), float(price(family, most))
            slope = (high - low) / max(most - fewest, 1)
            lines[a] = low - slope * fewest, slope
    return lines


@cache
def _layout(offered: tuple[str, ...], believed: tuple[str, ...]) -> _Layout:
    known = [arm for arm in offered if arm in believed]
    families = tuple(dict.fromkeys(map(family_of, known)))
    arms = tuple(sorted(known, key=lambda arm: families.index(family_of(arm))))
    budgets = [sparse_budget(arm) for arm in arms]
    return _Layout(
        arms=arms,
        families=families,
        family=np.array([families.index(family_of(arm)) for arm in arms], dtype=np.int64),
        rows=np.array([offered.index(arm) for arm in arms], dtype=np.int64),
        budgets=np.array([NO_LIMIT if b is None else b for b in budgets], dtype=np.int64),
    )


@cache
def _choices(arms: tuple[str, ...], lengths: int) -> tuple[Choice, ...]:
    return tuple(Choice.of(arm, n) for arm in arms for n in range(lengths))


@cache
def _counts(batch: int) -> tuple[FloatArray, FloatArray]:
    """Requests in a round, 1..batch and batch again; the last one reads half the KV."""
    count = np.append(np.arange(1.0, batch + 1.0), float(batch))
    return count, np.append(count[:-1], 0.5 * batch)


_Limits = tuple[IntArray, IntArray, IntArray, NDArray[np.bool_], IntArray]
"""Context, remaining, most draft tokens, whether allowed, and catch-up tokens, of the columns."""
_Prepared = tuple[FloatArray, IntArray, FloatArray, IntArray]


@compiled(
    "Tuple((float64[:,:,::1], int64[:,::1], float64[:,::1], int64[:,::1]))(float64[:,:,::1], "
    "Tuple((int64[::1], int64[::1], int64[:,::1], bool_[:,::1], int64[:,::1])), "
    "int64[::1], int64[::1])"
)
def _prepare(
    survival: FloatArray, columns: _Limits, rows: IntArray, budgets: IntArray
) -> _Prepared:
    """Gain, limits, KV tokens per round, and each arm's fewest and most catch-up tokens."""
    context, remaining, most, is_allowed, catch_up = columns
    arms, requests, depth = survival.shape
    gain, limit = np.zeros((arms, requests, depth + 1)), np.zeros((arms, requests), dtype=np.int64)
    reads, lag = np.zeros((arms, requests)), np.zeros((arms, 2), dtype=np.int64)
    for a in range(arms):
        row = rows[a]
        for r in range(requests):
            if is_allowed[row, r]:
                limit[a, r] = max(min(depth, remaining[r] - 1, most[row, r]), 0)
            for j in range(depth):
                here = survival[a, r, j] if j < limit[a, r] else 0.0
                gain[a, r, j + 1] = gain[a, r, j] + here
            reads[a, r] = min(context[r], budgets[a])
            tokens = catch_up[row, r]
            if tokens > 0:
                lag[a, 0] = tokens if lag[a, 0] == 0 else min(lag[a, 0], tokens)
                lag[a, 1] = max(lag[a, 1], tokens)
    return gain, limit, reads, lag


@compiled("float64[::1](float64[:,::1], int64[::1], int64)")
def _means(reads: FloatArray, family: IntArray, families: int) -> FloatArray:
    """Of KV tokens per request and round, `[families]`."""
    total, count = np.zeros(families), np.zeros(families)
    for a in range(len(family)):
        for r in range(reads.shape[1]):
            total[family[a]] += reads[a, r]
        count[family[a]] += reads.shape[1]
    return total / count


@compiled("void(float64[:,::1], float64[:,::1], int64[::1])")
def _centre(reads: FloatArray, rounds: FloatArray, family: IntArray) -> None:
    """Make `reads` the seconds per round beyond those of an average request."""
    batch = reads.shape[1]
    means = _means(reads, family, len(rounds))
    for a in range(len(family)):
        f = family[a]
        per_token = (rounds[f, batch] - rounds[f, batch + 1]) / max(0.5 * batch * means[f], 1.0)
        for r in range(batch):
            reads[a, r] = (reads[a, r] - means[f]) * max(per_token, 0.0)


@compiled("void(float64[:,::1], float64[:,::1], int64[:,::1], float64[:,:,::1], int64[::1])")
def _spread(
    catch_up: FloatArray, lines: FloatArray, lags: IntArray, gain: FloatArray, horizon: IntArray
) -> None:
    """Charge every catch-up to this step as far as it serves it."""
    for a in range(len(lines)):
        for r in range(len(horizon)):
            lag = lags[a, r]
            if lag > 0:
                share = (1.0 + gain[a, r, -1]) / max(horizon[r], 1)
                catch_up[a, r] = (lines[a, 0] + lines[a, 1] * lag) * min(share, 1.0)


@compiled("Tuple((int64[::1], float64))(float64[:,::1], int64[::1], int64[::1], int64[::1])")
def _spent(
    rounds: FloatArray, family: IntArray, arm: IntArray, drafted: IntArray
) -> tuple[IntArray, float]:
    """By family, the rounds that were drafted; and the seconds of all of them."""
    done, seconds = np.zeros(len(rounds), dtype=np.int64), 0.0
    for r in range(len(arm)):
        if arm[r] >= 0:
            done[family[arm[r]]] = max(done[family[arm[r]]], drafted[r])
    for f in range(len(rounds)):
        for j in range(done[f]):
            count = 0
            for r in range(len(arm)):
                if arm[r] >= 0 and family[arm[r]] == f and drafted[r] > j:
                    count += 1
            seconds += rounds[f, count]
    return done, seconds
