"""Steps to plan, drawn at random, and the best that can be made of them: by trying everything.

What the tests and the benchmark of the goodput policy share. Prices follow the design's formulas,
on costs and plans alone, or on the arrays of a problem: nothing here knows how the policy searches.
"""

from dataclasses import dataclass

import numpy as np

from sdcontrol.core import (
    BatchView,
    Belief,
    FloatArray,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
    family_of,
)
from sdcontrol.estimators.price import (
    catch_up_seconds,
    catch_up_tokens,
    even_draft,
    expected_gain,
    overheads_of,
    padding_seconds,
    round_kv_tokens,
    step_seconds,
)
from sdcontrol.policies.problem import IntArray, Problem

ARMS = ("ngram", "sparse_kv:512", "sparse_kv:2048", "draft_model")
SHAPES = ("linear", "stairs", "ridge")
HORIZON = (64.0, 64.0, 1.0, 0.0)  # tokens over which the policy spreads a catch-up


@dataclass(frozen=True)
class DrawnCost:
    """Verification linear, in stairs, or flat up to a ridge, and padded to the longest draft; drafting
    with a base per round.
    """

    shape: str
    base: float
    per_token: float
    edge: int
    per_kv_token: float
    rounds: dict[str, tuple[float, float, float]]  # base, per request, per KV token
    round_edge: int = 1
    per_catch_up_token: float = 0.0
    padding: float = 0.0  # per token of the longest draft, whatever KV is read

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        tokens = np.asarray(num_tokens, dtype=np.float64)
        if self.shape == "stairs":
            tokens = self.edge * np.ceil(tokens / self.edge)
        if self.shape == "ridge":
            tokens = 2.0 * np.maximum(tokens - 2 * self.edge, 0.0)
        seconds = self.base + self.per_token * tokens + self.per_kv_token * np.asarray(kv_tokens)
        if self.padding:
            seconds = seconds + self.padding * even_draft(num_tokens, num_requests)
        return np.asarray(seconds)

    def padding_seconds(self, kv_tokens: float) -> float:
        return float(self.padding)

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        base, each, per_kv_token = self.rounds[family]
        count = num_requests
        if self.round_edge > 1:
            count = self.round_edge * np.ceil(np.asarray(num_requests) / self.round_edge)
        return np.asarray(base + each * count + per_kv_token * kv_tokens)

    def overhead_seconds(self) -> float:
        return 0.02

    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        return self.per_catch_up_token * num_tokens


def drawn_cost(
    generator: np.random.Generator, batch: int, arms: tuple[str, ...], shape: str
) -> DrawnCost:
    """Prices from the range in which the best plan is hard to see."""
    scale, (apart,) = 8.0 / max(batch, 4), generator.spawn(1)
    rounds = {
        family_of(arm): (0.0, 0.0, 0.0)
        if arm == "ngram"
        else (
            generator.choice([0.01, 0.05, 0.2]) * generator.uniform(0.5, 2.0),
            generator.choice([0.0, 0.002, 0.02]) * generator.uniform(0.3, 2.0) * scale,
            generator.uniform(0.0, 2e-5) * scale,
        )
        for arm in arms
    }
    slope = generator.choice([0.002, 0.01, 0.05, 0.15, 0.4]) * generator.uniform(0.5, 2.0)
    return DrawnCost(
        shape=shape,
        base=generator.uniform(0.5, 2.0),
        per_token=slope * scale,
        edge=int(generator.integers(2, 9)) * max(1, batch // 8),
        per_kv_token=generator.uniform(0.0, 1e-4),
        rounds=rounds,
        round_edge=int(generator.choice([1, 4], p=[0.7, 0.3])),
        per_catch_up_token=generator.choice([0.0, 0.01]) * generator.uniform(0.5, 2.0),
        padding=apart.choice([0.0, 0.01, 0.05], p=[0.6, 0.2, 0.2]) * apart.uniform(0.5, 2.0),
    )


def drawn_instance(
    generator: np.random.Generator, batch: int, depth: int, arms: tuple[str, ...], shape: str
) -> tuple[BatchView, Belief]:
    """A view and a belief: now and then a lagging cache, few KV slots, or a prefill chunk."""
    cost = drawn_cost(generator, batch, arms, shape)
    spread = int(generator.integers(3))
    survival = {}
    for arm in arms:
        rates = (
            generator.uniform(0.2, 1.0, (batch, depth)),
            np.repeat(generator.uniform(0.3, 0.98, (batch, 1)), depth, axis=1),
            np.full((batch, depth), generator.uniform(0.3, 0.98)),
        )[spread]
        survival[arm] = np.cumprod(rates, axis=1)
    requests = []
    lags = generator.random() < 0.3
    for r in range(batch):
        allowed = tuple(arm for arm in arms if generator.random() < 0.9)
        for arm in arms:
            survival[arm][r] *= arm in allowed
        remaining = int(generator.integers(1, 20)) if generator.random() < 0.3 else 100
        context = int(generator.integers(20, 4000))
        hints = {}
        if lags and arms[-1] in allowed and generator.random() < 0.6:
            hints = {arms[-1]: Hint(catch_up_tokens=int(generator.integers(1, 200)))}
        requests.append(RequestView(str(r), context, 5, remaining, 0.0, allowed, hints))
    free = batch * depth if generator.random() < 0.8 else int(generator.integers(0, 2 * batch))
    prefill = int(generator.integers(16, 200)) if generator.random() < 0.2 else 0
    return BatchView(0, tuple(requests), free, prefill), Belief(survival, cost)


def small_instance(generator: np.random.Generator, turn: int) -> tuple[BatchView, Belief]:
    """Small enough for every plan to be tried: up to 5 requests, 3 drafters, 4 tokens."""
    batch = int(generator.integers(1, 6))
    depth = 4 if batch < 5 or turn % 10 == 0 else 3
    arms = ("a", "b", "c") if turn % 2 else ("ngram", "sparse_kv:512", "draft_model")
    return drawn_instance(generator, batch, depth, arms, SHAPES[turn % 3])


def charged_seconds(view: BatchView, belief: Belief, row: int, arm: str) -> float:
    """A request's catch-up, spread over the tokens that it will serve."""
    request = view.requests[row]
    hint = request.hints.get(arm)
    if hint is None or not hint.catch_up_tokens:
        return 0.0
    most = belief.survival[arm][row, : max(request.remaining_tokens - 1, 0)].sum()
    share = (1.0 + most) / max(min(request.remaining_tokens, HORIZON[0]), 1)
    return catch_up_seconds(belief.cost, family_of(arm), hint.catch_up_tokens) * min(share, 1.0)


def worth(view: BatchView, plan: Plan, belief: Belief) -> tuple[float, float]:
    """Expected tokens and seconds of a plan, catch-ups spread. Raises where it is impossible."""
    plan.check(view)
    seconds = step_seconds(view, plan, belief.cost)
    for family, tokens in catch_up_tokens(view, plan).items():
        seconds -= catch_up_seconds(belief.cost, family, tokens)
    for row, choice in enumerate(plan.choices):
        if choice.drafter is not None:
            seconds += charged_seconds(view, belief, row, choice.drafter)
    return expected_gain(view, plan, belief.survival), seconds


def goodput_of(view: BatchView, plan: Plan, belief: Belief) -> float:
    """Expected tokens per second of a plan."""
    gain, seconds = worth(view, plan, belief)
    return gain / seconds


def all_plans(view: BatchView, belief: Belief) -> tuple[FloatArray, FloatArray]:
    """Expected tokens and seconds of every possible plan, both `[plans]`."""
    families = sorted({family_of(arm) for arm in belief.survival})
    options: list[list[tuple[float, ...]]] = []  # family, tokens, gain, KV per round, catch-up
    for r, request in enumerate(view.requests):
        options.append([(-1, 0, 0.0, 0, 0.0)])
        for arm in request.drafters:
            gains = np.cumsum(belief.survival[arm][r])
            family, reads = families.index(family_of(arm)), round_kv_tokens(request, arm)
            lag = charged_seconds(view, belief, r, arm)
            for n in range(1, min(len(gains), request.remaining_tokens - 1) + 1):
                options[-1].append((family, n, gains[n - 1], reads, lag))
    picks = np.indices([len(row) for row in options]).reshape(len(options), -1)
    columns = [np.array(row)[pick].T for row, pick in zip(options, picks, strict=True)]
    family, tokens, gains, reads, lags = np.stack(columns, axis=1)  # each [requests, plans]
    drafted = tokens.sum(axis=0)
    batch, cost = len(view.requests), belief.cost
    kv_tokens = float(sum(request.context_tokens for request in view.requests))
    num_tokens = batch + view.prefill_tokens + drafted
    seconds = cost.verify_seconds(num_tokens, kv_tokens, batch)
    seconds = seconds + np.where(drafted == 0, *overheads_of(cost))
    longer = tokens.max(axis=0) - even_draft(num_tokens, batch)
    seconds = seconds + longer * padding_seconds(cost, kv_tokens)
    seconds = seconds + lags.sum(axis=0)
    for f, name in enumerate(families):
        for j in range(1, int(tokens.max()) + 1):
            drafts = (family == f) & (tokens >= j)
            count = drafts.sum(axis=0)
            priced = cost.draft_seconds(name, count, (drafts * reads).sum(axis=0))
            seconds = seconds + np.where(count > 0, priced, 0.0)
    is_possible = drafted <= view.free_kv_tokens
    return (batch + gains.sum(axis=0))[is_possible], seconds[is_possible]


def local_search(problem: Problem, arm: IntArray, length: IntArray) -> float:
    """The rate at which no request can do better alone, from a plan on. Takes its time."""
    arm, length, rate = arm.copy(), length.copy(), 0.0
    while True:
        before, rate = rate, _rate(problem, arm, length)
        if rate <= before * (1.0 + 1e-9):
            return rate
        for r in range(problem.batch):
            length[r] = 0
            tokens = int(length.sum())
            room = min(problem.lengths, len(problem.verify) - tokens)
            counts = _drafting(problem, arm, length)
            rows = np.arange(len(counts))[:, None]
            more = problem.rounds[rows, counts + 1] - problem.rounds[rows, counts]
            seconds = np.cumsum(more, axis=1)[problem.family][:, :room]
            seconds = seconds - more[problem.family][:, :1]  # from no round on
            seconds = seconds + problem.verify[tokens : tokens + room] - problem.verify[tokens]
            steps = np.arange(room)
            seconds += problem.catch_up[:, r, None] * (steps > 0)
            seconds += problem.reading[:, r, None] * steps
            seconds += problem.rounds[-1, 1] * np.maximum(steps - length.max(), 0)
            worth = problem.gain[:, r, :room] - rate * seconds
            worth[steps > problem.limit[:, r, None]] = -np.inf
            arm[r], length[r] = np.unravel_index(int(worth.argmax()), worth.shape)


def multi_start(problem: Problem, generator: np.random.Generator, starts: int = 24) -> float:
    """The best rate of local searches from uniform and from random plans."""
    batch, best = problem.batch, 0.0
    rows = np.arange(batch)
    for start in range(starts):
        if start % 2:
            arm = generator.integers(0, len(problem.arms), batch)
            length = generator.integers(0, problem.lengths, batch)
        else:
            arm = np.full(batch, start // 2 % len(problem.arms))
            length = np.full(batch, 1 + start // 2 // len(problem.arms) * 2)
        length = np.minimum(length, problem.limit[arm, rows])
        length[np.cumsum(length) >= len(problem.verify)] = 0
        best = max(best, local_search(problem, arm, length))
    return best


def _drafting(problem: Problem, arm: IntArray, length: IntArray) -> IntArray:
    """Requests that draft in round j of each family, `[families, lengths]`; column 0 is empty."""
    counts = np.zeros((len(problem.rounds) - 1, problem.lengths), dtype=np.int64)
    for f, n in zip(problem.family[arm], length, strict=True):
        counts[f, 1 : n + 1] += 1
    return counts


def _rate(problem: Problem, arm: IntArray, length: IntArray) -> float:
    rows = np.arange(problem.batch)
    counts = _drafting(problem, arm, length)
    seconds = problem.verify[length.sum()]
    seconds += sum(problem.rounds[f, counts[f, 1:]].sum() for f in range(len(counts)))
    seconds += problem.rounds[-1, 1] * length.max()
    seconds += (problem.catch_up[arm, rows] * (length > 0)).sum()
    seconds += (problem.reading[arm, rows] * length).sum()
    return float((problem.batch + problem.gain[arm, rows, length].sum()) / seconds)


def observation_of(view: BatchView, plan: Plan, seconds: float, accepted: int = 0) -> Observation:
    """What came of `plan` where `accepted` tokens of every draft were right."""
    lengths = tuple(choice.num_draft_tokens for choice in plan.choices)
    taken = tuple(min(n, accepted) for n in lengths)
    emitted = tuple(n + 1 for n in taken)
    timing = Timing(verify_seconds=seconds)
    return Observation(view, plan, lengths, lengths, taken, emitted, timing)
