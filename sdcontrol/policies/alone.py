"""The best choice of a lone request: every one of them is tried.

Nothing couples it to others, so no search is needed, and building the arrays of one would take
longer than the trial. Knows the same prices as `reading`, and nothing of batches.
"""

from dataclasses import dataclass

import numpy as np

from sdcontrol.core import BatchView, Belief, Choice, family_of
from sdcontrol.estimators.price import round_kv_tokens

__all__ = ["Alone", "best_alone"]


@dataclass(frozen=True, slots=True)
class Alone:
    """What the only request should do."""

    choice: Choice
    rate: float  # tokens per second that it is expected to bring
    plain_rate: float  # the same without drafts


def best_alone(
    view: BatchView, belief: Belief, catch_up_horizon_tokens: int, rate: float | None
) -> Alone:
    """The choice of largest gain / seconds, or gain - rate * seconds, for a view of one request."""
    request, cost = view.requests[0], belief.cost
    chains = _chains(view, belief)
    deepest = max(map(len, chains.values()), default=0)
    tokens = np.arange(deepest + 1.0) + (1 + view.prefill_tokens)
    verify = cost.verify_seconds(tokens, float(request.context_tokens), 1).tolist()
    overhead = cost.overhead_seconds()
    plain = verify[0] + overhead
    best, choice, expected = _score(1.0, plain, rate), Choice.off(), 1.0 / plain
    for arm, survival in chains.items():
        round_seconds = float(
            cost.draft_seconds(family_of(arm), 1.0, float(round_kv_tokens(request, arm)))
        )
        gain = 1.0
        spent = overhead + _catch_up(view, belief, arm, sum(survival), catch_up_horizon_tokens)
        for n, accepted in enumerate(survival, start=1):
            gain += accepted
            spent += round_seconds
            seconds = verify[n] + spent
            score = _score(gain, seconds, rate)
            if score > best:
                best, choice, expected = score, Choice.of(arm, n), gain / seconds
    return Alone(choice, expected, 1.0 / plain)


def _chains(view: BatchView, belief: Belief) -> dict[str, list[float]]:
    """Survival of the tokens that each arm may draft."""
    most = min(view.requests[0].remaining_tokens - 1, view.free_kv_tokens)
    bounds = {arm: _most(view, arm, most) for arm in belief.survival}
    return {
        arm: belief.survival[arm][0, :bound].tolist() for arm, bound in bounds.items() if bound > 0
    }


def _score(gain: float, seconds: float, rate: float | None) -> float:
    return gain / seconds if rate is None else gain - rate * seconds


def _most(view: BatchView, arm: str, most: int) -> int:
    """The most tokens that the request may draft with `arm`."""
    request = view.requests[0]
    if arm not in request.drafters:
        return 0
    hint = request.hints.get(arm)
    if hint is not None and hint.max_draft_tokens is not None:
        return min(most, hint.max_draft_tokens)
    return most


def _catch_up(
    view: BatchView, belief: Belief, arm: str, most_gain: float, horizon_tokens: int
) -> float:
    """Seconds of catch-up that the step is charged, as `reading.read` spreads them."""
    hint = view.requests[0].hints.get(arm)
    price = getattr(belief.cost, "catch_up_seconds", None)
    if hint is None or hint.catch_up_tokens <= 0 or price is None:
        return 0.0
    horizon = max(min(view.requests[0].remaining_tokens, horizon_tokens), 1)
    seconds = float(price(family_of(arm), hint.catch_up_tokens))
    return seconds * min((1.0 + most_gain) / horizon, 1.0)
