"""The price and the yield of a plan, by the formulas that every policy and every check share.

    step = verify(sum(1 + n_r) + prefill, sum(context_r), B) + padding(sum(context_r)) * max n_r
           + sum over families and rounds j of draft(family, #requests with n_r >= j, kv they read)
           + catch-up + overhead, of a step with drafts or without
    gain = sum over requests of (1 + sum_{j < n_r} survival[d_r][r, j])

`verify_seconds` of a cost is that of tokens spread evenly over the requests, padding included.

Knows nothing of how survival and cost are estimated, nor of how a plan is found.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeGuard

import numpy as np

from sdcontrol.core import BatchView, Cost, FloatArray, Plan, RequestView, family_of
from sdcontrol.estimators.overhead import Overheads
from sdcontrol.estimators.pricing import Pricing
from sdcontrol.outcomes import DEPTH

__all__ = [
    "StepTerms",
    "TabledCost",
    "TermedCost",
    "catch_up_seconds",
    "catch_up_tokens",
    "drafting_seconds",
    "even_draft",
    "expected_gain",
    "forward_seconds",
    "has_terms",
    "is_tabled",
    "overheads_of",
    "padding_seconds",
    "round_kv_tokens",
    "sparse_budget",
    "step_seconds",
    "waited_of",
]


class StepTerms(NamedTuple):
    """What the prices of a step are computed from. Do not write."""

    pricing: Pricing  # see `forward.tabled`
    edges: FloatArray  # sizes that tokens are padded to
    beside: Overheads  # seconds beside forward and drafting
    padding: float  # see `TabledCost.padding_seconds`
    lines: FloatArray  # see `TabledCost.lines`


class TabledCost(Cost, Protocol):
    """A cost that gives prices as a table and as lines: the same, with fewer calls."""

    def step_table(
        self, first_tokens: int, most_draft_tokens: int, kv_tokens: float, num_requests: int
    ) -> FloatArray:
        """`verify_seconds` and `overhead_seconds` together, `[most_draft_tokens + 1]`.

        Entry `n` is for `first_tokens + n` tokens, without padding to the longest draft.
        """
        ...

    def lines(self, families: tuple[str, ...]) -> FloatArray:
        """By family `[families, 5]`: a round's seconds, constant, per request and per KV token; a
        catch-up's, constant and per token.
        """
        ...

    def padding_seconds(self, kv_tokens: float) -> float:
        """What a token more of the longest draft adds, however many are as long; in proportion to KV."""
        ...


class TermedCost(TabledCost, Protocol):
    """A cost that says what its prices are computed from, for whoever computes them elsewhere."""

    def terms(self, kv_tokens: float, num_requests: int, families: tuple[str, ...]) -> StepTerms:
        """Of steps at this load."""
        ...


def has_terms(cost: Cost) -> TypeGuard[TermedCost]:
    """Whether a cost is a `TermedCost`."""
    return hasattr(cost, "terms")


def is_tabled(cost: Cost) -> TypeGuard[TabledCost]:
    """Whether a cost is a `TabledCost`."""
    return hasattr(cost, "step_table")


def step_seconds(view: BatchView, plan: Plan, cost: Cost) -> float:
    """Expected seconds of the step that `plan` makes of `view`; 0 for a view without requests."""
    if not view.requests:
        return 0.0
    num_tokens = len(view.requests) + view.prefill_tokens
    num_tokens += sum(choice.num_draft_tokens for choice in plan.choices)
    kv_tokens = sum(request.context_tokens for request in view.requests)
    longest = max(choice.num_draft_tokens for choice in plan.choices)
    verify = forward_seconds(cost, num_tokens, kv_tokens, len(view.requests), longest)
    drafting = sum(drafting_seconds(view, plan, cost).values())
    catch_up = sum(
        catch_up_seconds(cost, family, tokens)
        for family, tokens in catch_up_tokens(view, plan).items()
    )
    return verify + drafting + catch_up + overheads_of(cost)[not plan.is_off]


def overheads_of(cost: Cost) -> Overheads:
    """Of steps without drafts and with them; one for both where the cost does not tell them apart."""
    overheads: Callable[[], Overheads] | None = getattr(cost, "overheads", None)
    if overheads is not None:
        return overheads()
    seconds = cost.overhead_seconds()
    return Overheads(seconds, seconds)


def waited_of(cost: Cost) -> float:
    """Seconds beside its forward of a step without drafts that is not launched ahead; 0 where a cost has none of its own."""
    waited: Callable[[], float] | None = getattr(cost, "waited_seconds", None)
    return waited() if waited is not None else 0.0


def forward_seconds(
    cost: Cost, num_tokens: float, kv_tokens: float, num_requests: int, longest_draft: float
) -> float:
    """Expected seconds of a forward whose longest draft has `longest_draft` tokens."""
    padding = padding_seconds(cost, kv_tokens)
    if is_tabled(cost):
        table = cost.step_table(int(num_tokens), 0, kv_tokens, num_requests)
        return float(table[0]) - cost.overhead_seconds() + longest_draft * padding
    seconds = float(cost.verify_seconds(num_tokens, kv_tokens, num_requests))
    return seconds + (longest_draft - float(even_draft(num_tokens, num_requests))) * padding


def even_draft(num_tokens: FloatArray | float, num_requests: int) -> FloatArray:
    """The draft tokens of each request where all have as many; `DEPTH` at most, for a prompt drafts nothing."""
    drafts = np.maximum(num_tokens, num_requests) / max(num_requests, 1) - 1.0
    return np.minimum(drafts, DEPTH)  # clip takes ten times as long


def padding_seconds(cost: Cost, kv_tokens: float) -> float:
    """What a token more of the longest draft adds; 0 where the cost does not price it."""
    price = getattr(cost, "padding_seconds", None)
    return float(price(kv_tokens)) if price is not None else 0.0


def expected_gain(view: BatchView, plan: Plan, survival: Mapping[str, FloatArray]) -> float:
    """Expected tokens of the step: one per request, and every draft token that survives.

    `survival[drafter]` is `[requests, K]`; drafts beyond `K` count as never accepted.
    """
    gain = float(len(view.requests))
    for row, choice in enumerate(plan.choices):
        if choice.drafter is not None and choice.drafter in survival:
            gain += float(survival[choice.drafter][row, : choice.num_draft_tokens].sum())
    return gain


def drafting_seconds(view: BatchView, plan: Plan, cost: Cost) -> dict[str, float]:
    """Expected seconds of all drafting rounds, by family. Arms of a family share their rounds."""
    seconds: dict[str, float] = {}
    for family, (depths, kv_tokens) in _drafting_by_family(view, plan).items():
        rounds = np.arange(1, int(depths.max()) + 1)
        still_drafting = depths[None, :] >= rounds[:, None]  # [rounds, requests]
        per_round = cost.draft_seconds(
            family, still_drafting.sum(axis=1).astype(float), still_drafting @ kv_tokens
        )
        seconds[family] = float(np.sum(per_round))
    return seconds


def catch_up_tokens(view: BatchView, plan: Plan) -> dict[str, int]:
    """Tokens that lagging drafter caches compute before the first round, by family."""
    tokens: dict[str, int] = defaultdict(int)
    for request, choice in zip(view.requests, plan.choices, strict=True):
        hint = request.hints.get(choice.drafter) if choice.drafter is not None else None
        if choice.drafter is not None and hint is not None and hint.catch_up_tokens > 0:
            tokens[family_of(choice.drafter)] += hint.catch_up_tokens
    return dict(tokens)


def catch_up_seconds(cost: Cost, family: str, num_tokens: float) -> float:
    """Seconds to bring a lagging drafter cache up to date; 0 where the cost does not price it."""
    price = getattr(cost, "catch_up_seconds", None)
    return float(price(family, num_tokens)) if price is not None and num_tokens > 0 else 0.0


def round_kv_tokens(request: RequestView, arm: str) -> int:
    """KV tokens that one drafting round of `arm` reads for `request`.

    `min(context, budget)` for `sparse_kv:<budget>[:...]`, the context for every other arm.
    """
    budget = sparse_budget(arm)
    return request.context_tokens if budget is None else min(request.context_tokens, budget)


def sparse_budget(arm: str) -> int | None:
    """The KV budget in the name of a `sparse_kv:<budget>[:...]` arm; None for arms named otherwise."""
    family, _, rest = arm.partition(":")
    budget = rest.partition(":")[0]
    return int(budget) if family == "sparse_kv" and budget.isdecimal() else None


def _drafting_by_family(view: BatchView, plan: Plan) -> dict[str, tuple[FloatArray, FloatArray]]:
    """For each drafting family: draft lengths and KV tokens of its requests, both `[requests]`."""
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for request, choice in zip(view.requests, plan.choices, strict=True):
        if choice.drafter is not None:
            kv_tokens = round_kv_tokens(request, choice.drafter)
            rows[family_of(choice.drafter)].append((choice.num_draft_tokens, kv_tokens))
    arrays = {family: np.array(pairs, dtype=float).T for family, pairs in rows.items()}
    return {family: (columns[0], columns[1]) for family, columns in arrays.items()}
