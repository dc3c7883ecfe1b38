"""From a view to the answer in one compiled call, where belief and cost are our own estimators'.

The steps and the numbers are those of `reading` and `maximise`; what lies between them is not handed
out. Right after a forward whatever passes between Python and compiled code has to be fetched from
memory again: many small calls take longer than one (docs/log.md says by how much).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import said_of, sorted_out
from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, Belief, FloatArray
from sdcontrol.estimators.price import has_terms
from sdcontrol.estimators.pricing import PRICING, tabled
from sdcontrol.estimators.survival import TERMS, Survival, Terms, believe
from sdcontrol.policies.maximise import search
from sdcontrol.policies.posing import pose, price
from sdcontrol.policies.problem import Answer, IntArray
from sdcontrol.policies.reading import layout_of

__all__ = ["Answered", "answer_at_once"]

_Prices = tuple[
    tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    tuple[float, float],
    FloatArray,
    FloatArray,
    FloatArray,
]


class Answered(NamedTuple):
    """An answer, and what its words need to be said."""

    arms: tuple[str, ...]
    lengths: int
    answer: Answer
    prices: tuple[float, float, int]  # of no drafts and of the most, in seconds; how many those are


def answer_at_once(view: BatchView, belief: Belief, horizon_tokens: int) -> Answered | None:
    """What `maximise(read(...))` answers; None where it has to be asked."""
    survival, cost = belief.survival, belief.cost
    if view.prefill_tokens or not isinstance(survival, Survival) or not has_terms(cost):
        return None
    said = said_of(view)
    layout = layout_of(said.arms, survival.arms)
    if not layout.arms:
        return None
    prices = cost.terms(said.kv_tokens, len(view.requests), layout.families)
    arm, length, numbers, most = _answer(
        (said.values, said.is_allowed),
        survival.terms,
        (layout.rows, layout.budgets, layout.family),
        (*prices.pricing, prices.edges, prices.lines),
        (prices.beside, float(said.kv_tokens), view.free_kv_tokens, horizon_tokens),
    )
    tokens, seconds, first, last = numbers
    if seconds < 0.0:  # something is not finite
        return None
    answer = Answer(arm, length, tokens, seconds)
    return Answered(layout.arms, survival.terms[-1] + 1, answer, (first, last, most))


@compiled(
    "Tuple((int64[::1], int64[::1], UniTuple(float64, 4), int64))("
    "Tuple((float64[::1], boolean[:,::1])), "
    f"{TERMS}, UniTuple(int64[::1], 3), Tuple(({PRICING}, float64[::1], float64[:,::1])), "
    "Tuple((float64, float64, int64, int64)))"
)
def _answer(
    said: tuple[FloatArray, NDArray[np.bool_]],
    terms: Terms,
    layout: tuple[IntArray, IntArray, IntArray],  # rows, budgets, family
    prices: _Prices,  # of `StepTerms`
    numbers: tuple[float, float, int, int],  # seconds beside, KV tokens, most drafts, horizon
) -> tuple[IntArray, IntArray, tuple[float, float, float, float], int]:
    """Arms, lengths; expected tokens, seconds, those of no drafts and of the most; how many those are."""
    values, is_allowed = said
    index, averages, seated, depth = terms
    rows, _, family = layout
    kept, weights, coefficients, edges, lines = prices
    beside, kv_tokens, most_drafts, horizon = numbers
    arms, requests = is_allowed.shape
    context, remaining, limit, match, confidence, lagging = sorted_out(values, arms, requests)
    hints = limit, match, confidence, is_allowed
    offered = believe(index, averages, seated, hints, depth)
    survival = np.empty(offered.shape)
    for a in range(arms):
        survival[a] = offered[rows[a]]
    posed = pose(survival, (context, remaining, limit, is_allowed), layout)
    by_line = np.zeros((0, 0)), lines
    rounds, catch_up = price(posed, by_line, (lagging, remaining), (rows, family), horizon)
    gain, limits, reads, _, most_tokens = posed
    asked = edges, float(requests), max(min(most_tokens, most_drafts), 0), beside
    verify, _ = tabled(kept, weights, coefficients, (kv_tokens, float(requests)), asked)
    drafted = np.zeros(len(rounds), np.int64)
    problem = gain, limits, family, verify, rounds, reads, catch_up, drafted
    arm, length, tokens, seconds = search(problem, 0.0, False)
    return arm, length, (tokens, seconds, verify[0], verify[-1]), len(verify) - 1
