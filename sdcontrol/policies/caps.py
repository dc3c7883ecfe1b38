"""How many drafting rounds to open to each family.

A round has a base price, paid once for the batch, so it is opened for all or for none. Knows
nothing of who drafts in it: caps are judged by what requests could make of them, at a few prices
per draft token.
"""

from functools import cache

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.policies.arrays import column, counting, greatest, least, ones, running
from sdcontrol.policies.pricing import Prices
from sdcontrol.policies.problem import IntArray, Problem

__all__ = ["move_caps", "rank_caps"]

_SAMPLE = 24  # requests that combinations of caps are judged by
_WORK = 6144  # combinations of caps x sampled requests
_SOLVED = 1024  # candidates x lengths x requests
_SHARES = np.array([1.0, 0.5, 0.2])  # of the dearest draft token
_SCARCE = np.array([0.1, 0.25, 0.5, 0.75])  # prices of a draft token where KV slots are few
_TOTALS = 8


def rank_caps(prices: Prices) -> IntArray:
    """The most promising caps, `[candidates, families]`, judged by a sample of the requests.

    The Lagrangian bound: at a price p per draft token requests are independent, and for every total
    T what caps can be worth is at most the least over p of (value at p) + p * T - (price of T).
    """
    families, lengths, batch = prices.by_family.shape
    costly = prices.costly
    if not costly:
        return np.full((1, families), lengths - 1)
    few = len(prices.problem.verify) <= batch  # KV slots: then who gets them matters
    sample = prices.by_family[:, :, :: 1 if few else -(-batch // _SAMPLE)]
    sampled = sample.shape[2]
    levels, grid = _grid(families, tuple(costly), lengths, _WORK // sampled)
    tokens = _token_prices(prices.problem, prices.rate)
    value = _best_within(prices, sample, tokens, levels).reshape(-1, sampled)
    bound = (value @ ones(sampled, batch / sampled)).reshape(len(tokens), -1)
    bound -= prices.paid(grid) @ prices.base
    totals = _totals(prices.problem.verify, tokens, prices.rate)
    worth = least(bound[:, None] + (tokens[:, None] * totals)[:, :, None], axis=0)
    worth -= prices.rate * prices.problem.verify[totals][:, None]
    score = greatest(worth, axis=0)
    keep = max(1, min(_SOLVED // (lengths * batch), len(score)))
    chosen = (-score).argsort(kind="stable")[:keep] if keep > 1 else [score.argmax()]
    caps: IntArray = grid[chosen]
    return caps


def move_caps(prices: Prices, cap: IntArray, token: float) -> IntArray:
    """Each family's best cap given the others', at a price of `token` tokens per draft token."""
    if not prices.costly or not token:
        return cap
    families, lengths, batch = prices.by_family.shape
    cap = cap.copy()
    reach = running(np.maximum, prices.by_family - token * column(lengths))
    for f in prices.costly:
        value = reach[f]
        for g in range(families):
            if g != f:
                value = np.maximum(value, reach[g, cap[g]])
        rounds = counting(lengths)
        if prices.problem.drafted is not None:
            rounds = np.maximum(rounds - prices.problem.drafted[f], 0)
        cap[f] = (value @ ones(batch) - prices.base[f] * rounds).argmax()
    return cap


def _best_within(
    prices: Prices, sample: FloatArray, tokens: FloatArray, levels: IntArray
) -> FloatArray:
    """`[prices, caps, requests]`: every request's best under all combinations of caps."""
    families, lengths, batch = sample.shape
    # [families, prices, lengths, requests], then the best of at most so many tokens
    reach = sample[:, None] - (tokens[:, None] * counting(lengths))[:, :, None]
    reach = running(np.maximum, reach)
    ends, every = reach[:, :, -1:], reach
    if len(levels) < lengths:
        reach = reach[:, :, levels]
    floor: FloatArray = greatest(
        ends[[f for f in range(families) if f not in prices.costly]], axis=0, initial=0
    )
    value: FloatArray = floor
    for f in prices.costly:  # [prices, caps so far, requests]
        value = np.maximum(value[:, :, None], reach[f][:, None]).reshape(len(tokens), -1, batch)
    if len(levels) == lengths:
        return value
    alone = [np.maximum(floor, every[f]) for f in prices.costly]
    return np.concatenate([value, *alone], axis=1)


def _token_prices(problem: Problem, rate: float) -> FloatArray:
    """Prices of a draft token, from the steepest part of verification downwards, at most 1 token."""
    verify, last = problem.verify, len(problem.verify) - 1
    starts, ends, inverse = _spans(last)
    slope = rate * float(greatest((verify[ends] - verify[starts]) * inverse))
    tokens: FloatArray = min(slope, 1.0) * _SHARES
    if last < problem.batch * (problem.lengths - 1):
        tokens = np.concatenate([tokens, _SCARCE])
    return tokens


def _totals(verify: FloatArray, tokens: FloatArray, rate: float) -> IntArray:
    """Totals of draft tokens after which verification becomes dearer: even ones, and corners."""
    even = verify.searchsorted(verify[_evenly(len(verify) - 1)], "right") - 1
    corners = (rate * verify - tokens[:, None] * counting(len(verify))).argmin(axis=1)
    return np.concatenate([np.maximum(even, 0), corners])


@cache
def _evenly(last: int) -> IntArray:
    return np.linspace(last / _TOTALS, last, _TOTALS).astype(np.int64)


@cache
def _spans(last: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Where chords of the verification cost start and end, and 1 / length: quarters, the whole."""
    starts = np.array([0, last // 4, last // 2, last * 3 // 4, 0])
    ends = np.maximum([last // 4, last // 2, last * 3 // 4, last, last], starts + 1)
    return starts, ends, 1.0 / (ends - starts)


@cache
def _grid(
    families: int, costly: tuple[int, ...], lengths: int, work: int
) -> tuple[IntArray, IntArray]:
    """Caps to consider: `[levels]`, and their combinations `[caps, families]`.

    All lengths where their combinations fit the work, else fewer, denser near zero, and then every
    length of each family alone. Families that are not costly are never capped.
    """
    count = lengths
    while count > 2 and count ** len(costly) > work:
        count -= 1
    levels = np.arange(lengths)
    if count < lengths:
        levels = np.unique(np.round(np.linspace(0, levels[-1] ** 0.5, count) ** 2).astype(np.int64))
    axes = np.meshgrid(*[levels] * len(costly), indexing="ij")
    rows = [np.stack([axis.ravel() for axis in axes], axis=1)]
    if count < lengths:
        rows += [np.outer(np.arange(lengths), unit) for unit in np.eye(len(costly), dtype=np.int64)]
    combinations = np.concatenate(rows)
    grid = np.full((len(combinations), families), lengths - 1)
    grid[:, costly] = combinations
    return levels, grid
