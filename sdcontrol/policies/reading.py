"""From a view and a belief to a problem, and from its answer to a plan.

Knows names, hints and limits; nothing of how the best plan is found.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from sdcontrol.core import BatchView, Belief, Choice, Cost, FloatArray, Hint, Plan, family_of
from sdcontrol.estimators.price import sparse_budget
from sdcontrol.policies.arrays import column, running
from sdcontrol.policies.problem import IntArray, Problem

__all__ = ["read", "read_drafted", "to_plan"]

_MOST_PRICED = 8  # different catch-ups of an arm that are priced one by one


def read(view: BatchView, belief: Belief, catch_up_horizon_tokens: int) -> Problem:
    """The problem of one step. `view` has requests and `belief` at least one position.

    A catch-up of seconds c is charged to the step in proportion to the tokens that it serves:
    c * (most tokens that the step can emit) / min(remaining tokens, horizon), at most c.
    """
    requests = view.requests
    batch = len(requests)
    layout = _layout(tuple(belief.survival))
    arms = layout.arms
    lengths = 1 + max(rows.shape[1] for rows in belief.survival.values())
    context = np.array([request.context_tokens for request in requests], dtype=np.float64)
    limit, catch_up_tokens = _limits(view, arms, lengths - 1)
    gain = _gain([belief.survival[arm] for arm in arms], lengths, batch, limit)
    draft_tokens = max(min(batch * (lengths - 1), view.free_kv_tokens), 0)
    tokens = np.arange(
        batch + view.prefill_tokens, batch + view.prefill_tokens + draft_tokens + 1.0
    )
    verify = belief.cost.verify_seconds(tokens, float(np.add.reduce(context)), batch)
    table, excess = _rounds(belief.cost, layout, context)
    catch_up = None
    if catch_up_tokens:
        catch_up = _catch_up(view, belief.cost, arms, catch_up_tokens)
    if catch_up is not None:
        horizon = np.minimum([r.remaining_tokens for r in requests], catch_up_horizon_tokens)
        catch_up = catch_up * np.minimum((1.0 + gain[:, -1]) / np.maximum(horizon, 1), 1.0)
    return Problem(
        arms=arms,
        family=layout.family,
        members=layout.members,
        gain=gain,
        limit=limit,
        verify=verify + belief.cost.overhead_seconds(),
        round=table,
        excess=excess,
        catch_up=catch_up,
    )


def read_drafted(view: BatchView, plan: Plan, drafted: list[int], belief: Belief) -> Problem:
    """The problem of how much of `plan` to submit, once `drafted[r]` tokens of it are drafted.

    Every request keeps its arm and may only draft less. Rounds that were drafted are part of the
    step whatever is submitted; rounds to come have their price.
    """
    arms = tuple(dict.fromkeys(c.drafter for c in plan.choices if c.drafter in belief.survival))
    layout = _layout(tuple(arm for arm in arms if arm is not None))
    batch, depth = len(view.requests), max(choice.num_draft_tokens for choice in plan.choices)
    limit = np.zeros((len(layout.arms), batch), dtype=np.int64)
    rounds = np.zeros(len(layout.families), dtype=np.int64)
    for r, choice in enumerate(plan.choices):
        if choice.drafter in layout.arms:
            a = layout.arms.index(choice.drafter)
            limit[a, r] = choice.num_draft_tokens
            rounds[layout.family[a]] = max(rounds[layout.family[a]], drafted[r])
    context = np.array([request.context_tokens for request in view.requests], dtype=np.float64)
    rows = [belief.survival[arm][:, :depth] for arm in layout.arms]
    table, excess = _rounds(belief.cost, layout, context)
    tokens = np.arange(float(sum(choice.num_draft_tokens for choice in plan.choices)) + 1)
    verify = belief.cost.verify_seconds(
        tokens + (batch + view.prefill_tokens), float(np.add.reduce(context)), batch
    )
    spent = belief.cost.overhead_seconds()
    for f, count in enumerate(rounds.tolist()):
        members = [r for r in range(batch) if limit[layout.family == f, r].any()]
        for j in range(1, count + 1):
            spent += float(table[f, sum(drafted[r] >= j for r in members)])
    return Problem(
        arms=layout.arms,
        family=layout.family,
        members=layout.members,
        gain=_gain(rows, depth + 1, batch, limit),
        limit=limit,
        verify=verify + spent,
        round=table,
        excess=excess,
        drafted=rounds,
    )


def to_plan(problem: Problem, view: BatchView, arm: IntArray, length: IntArray, why: str) -> Plan:
    """The plan of `length[r]` tokens by `arms[arm[r]]`, within every request's limits."""
    if problem.limit is not None:
        length = np.minimum(length, problem.limit[arm, np.arange(problem.batch)])
    choices = _choices(problem.arms, problem.lengths)
    off = Choice.off()
    chosen = [
        choices[a][n] if problem.arms[a] in request.drafters else off
        for request, a, n in zip(view.requests, arm.tolist(), length.tolist(), strict=True)
    ]
    return Plan(tuple(chosen), why)


def _limits(
    view: BatchView, arms: tuple[str, ...], depth: int
) -> tuple[IntArray | None, dict[int, list[int]]]:
    """Draft limits `[arms, requests]` where one binds, and requests' catch-up tokens by arm."""
    most = [request.remaining_tokens - 1 for request in view.requests]
    limit: IntArray | None = None
    if min(most) < depth:
        limit = np.repeat(np.clip(most, 0, depth)[None, :], len(arms), axis=0)
    catch_up: dict[int, list[int]] = {}
    menus = [request.hints for request in view.requests]
    for a, arm in enumerate(arms):
        hints = [menu.get(arm) for menu in menus]
        bounds = [hint.max_draft_tokens for hint in hints if hint is not None]
        if not bounds:
            continue
        if any(bound is not None and bound < depth for bound in bounds):
            limit = np.full((len(arms), len(most)), depth) if limit is None else limit
            np.minimum(limit[a], [_bound(hint, depth) for hint in hints], out=limit[a])
        tokens = [0 if hint is None else hint.catch_up_tokens for hint in hints]
        if any(tokens):
            catch_up[a] = tokens
    return limit, catch_up


def _bound(hint: Hint | None, depth: int) -> int:
    if hint is None or hint.max_draft_tokens is None:
        return depth
    return max(hint.max_draft_tokens, 0)


def _gain(
    survival: list[FloatArray], lengths: int, batch: int, limit: IntArray | None
) -> FloatArray:
    gain = np.zeros((len(survival), lengths, batch))
    for a, rows in enumerate(survival):
        gain[a, 1 : rows.shape[1] + 1] = rows.T
    if limit is not None:
        gain *= column(lengths) <= limit[:, None, :]
    return running(np.add, gain)


def _rounds(
    cost: Cost, layout: "_Layout", context: FloatArray
) -> tuple[FloatArray, FloatArray | None]:
    """`round` and `excess`: the price of a round is linear in KV around the family's average."""
    batch = len(context)
    table = np.zeros((len(layout.families), batch + 1))
    excess: FloatArray | None = None
    count, share = _counts(batch)
    for f, (name, members) in enumerate(layout.families.items()):
        reads = [context if b is None else np.minimum(context, b) for _, b in members]
        mean = sum(float(np.add.reduce(rows)) for rows in reads) / (len(reads) * batch)
        kv_tokens = share * mean
        seconds = np.asarray(cost.draft_seconds(name, count, kv_tokens))
        table[f, 1:] = seconds[:-1] if seconds.ndim else seconds
        per_token = float(seconds[-2] - seconds[-1]) if seconds.ndim else 0.0
        if per_token > 0.0:
            excess = np.zeros((len(layout.arms), batch)) if excess is None else excess
            for (a, _), rows in zip(members, reads, strict=True):
                excess[a] = (rows - mean) * (per_token / (0.5 * batch * mean))
    return table, excess


def _catch_up(
    view: BatchView, cost: Cost, arms: tuple[str, ...], tokens: dict[int, list[int]]
) -> FloatArray | None:
    """Seconds `[arms, requests]` of each request's catch-up, whole; None where it has no price."""
    price = getattr(cost, "catch_up_seconds", None)
    if price is None or not tokens:
        return None
    seconds = np.zeros((len(arms), len(view.requests)))
    for a, counts in tokens.items():
        priced = sorted(set(counts) - {0})
        if len(priced) > _MOST_PRICED:  # on a straight line between these
            priced = priced[:: -(-len(priced) // _MOST_PRICED)] + priced[-1:]
        prices = [float(price(family_of(arms[a]), count)) for count in priced]
        seconds[a] = np.where(counts, np.interp(counts, priced, prices), 0.0)
    return seconds


@cache
def _choices(arms: tuple[str, ...], lengths: int) -> tuple[tuple[Choice, ...], ...]:
    return tuple(tuple(Choice.of(arm, n) for n in range(lengths)) for arm in arms)


@cache
def _counts(batch: int) -> tuple[FloatArray, FloatArray]:
    """Requests in a round, 1..batch and batch again; the last one reads half the KV."""
    count = np.append(np.arange(1.0, batch + 1.0), float(batch))
    return count, np.append(count[:-1], 0.5 * batch)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What follows from the arms' names alone."""

    arms: tuple[str, ...]  # grouped by family
    families: dict[str, tuple[tuple[int, int | None], ...]]  # members: arm index and KV budget
    family: IntArray  # [arms]
    members: tuple[slice, ...]  # [families]


@cache
def _layout(offered: tuple[str, ...]) -> _Layout:
    names = tuple(dict.fromkeys(map(family_of, offered)))
    arms = tuple(sorted(offered, key=lambda arm: names.index(family_of(arm))))
    members = {
        name: tuple((a, sparse_budget(arm)) for a, arm in enumerate(arms) if family_of(arm) == name)
        for name in names
    }
    return _Layout(
        arms=arms,
        families=members,
        family=np.array([names.index(family_of(arm)) for arm in arms]),
        members=tuple(slice(m[0][0], m[-1][0] + 1) for m in members.values()),
    )
