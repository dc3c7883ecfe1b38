"""From a view to the answer in one compiled call, before drafting or after some of it.

Where belief and cost are our own estimators'. The steps and the numbers are those of `reading` and
`maximise`; what lies between them is not handed out. Right after a forward whatever passes between Python and compiled code has to be fetched from
memory again: many small calls take longer than one (docs/log.md says by how much).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import said_of, sorted_out
from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, Belief, Cost, FloatArray, Plan
from sdcontrol.estimators.confidence import GIVEN, Given, condition
from sdcontrol.estimators.correction import CORRECTION, Correction, correct
from sdcontrol.estimators.overhead import Overheads
from sdcontrol.estimators.price import has_terms
from sdcontrol.estimators.pricing import PRICING, read_off, tabled
from sdcontrol.estimators.survival import TERMS, Survival, Terms, believe
from sdcontrol.policies.maximise import search
from sdcontrol.policies.posing import HORIZON, Horizon, pose, price, spare, spent
from sdcontrol.policies.problem import TABLES, Answer, IntArray, Tables
from sdcontrol.policies.prompts import Prompts, rate_beside
from sdcontrol.policies.reading import layout_of, rows_of
from sdcontrol.policies.weighing import SAME, TOLD, Pace, Told, weigh

__all__ = ["Answered", "answer_at_once", "refine_at_once"]

_Prices = tuple[
    tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    tuple[float, float],
    FloatArray,
    FloatArray,
    FloatArray,
]
"""Of `StepTerms`: pricing, edges, lines."""
_PRICES = f"Tuple(({PRICING}, float64[::1], float64[:,::1]))"

_Columns = tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]
_COLUMNS = (
    "Tuple((int64[::1], int64[::1], int64[:,::1], int64[:,::1], float64[:,::1], int64[:,::1]))"
)


_Beside = tuple[int, tuple[float, float]]
"""Prompt tokens of the step, and `Prompts.hurry`."""
_BESIDE = "Tuple((int64, UniTuple(float64, 2)))"


class Answered(NamedTuple):
    """An answer, and what its words need to be said."""

    arms: tuple[str, ...]
    lengths: int
    answer: Answer
    prices: tuple[float, float, int]  # of no drafts and of the most, in seconds; how many those are


def answer_at_once(
    view: BatchView,
    belief: Belief,
    horizon: Horizon,
    pace: Pace = SAME,
    *,
    prompts: Prompts | None = None,
    beside: Overheads | None = None,
) -> Answered | None:
    """What `maximise(read(...))` answers; None where it has to be asked."""
    survival, cost, said = belief.survival, belief.cost, said_of(view)
    if not (isinstance(survival, Survival) and survival.is_of(view) and has_terms(cost)):
        return None
    layout = layout_of(said.arms, survival.arms)
    if not layout.arms:
        return None
    prices = cost.terms(said.kv_tokens, len(view.requests), layout.families)
    (arm, length), numbers, most, believed = _answer(
        (said.values, said.is_allowed),
        (survival.terms, survival.correction, pace.told(layout.families)),
        (layout.rows, layout.budgets, layout.family),
        (*prices.pricing, prices.edges, prices.lines),
        (
            (*(beside or prices.beside), prices.padding, float(said.kv_tokens)),
            view.free_kv_tokens,
            horizon,
            _beside(view, cost, prompts),
        ),
    )
    survival.remember(*believed)  # refinement asks for it again
    tokens, seconds, first, last = numbers
    if seconds < 0.0:  # something is not finite
        return None
    answer = Answer(arm, length, tokens, seconds)
    return Answered(layout.arms, survival.terms[-1] + 1, answer, (first, last, most))


def refine_at_once(
    view: BatchView,
    plan: Plan,
    drafted: Sequence[int],
    belief: Belief,
    pace: Pace = SAME,
    *,
    prompts: Prompts | None = None,
) -> list[int] | None:
    """The lengths that `maximise(read_drafted(...))` answers; None where it has to be asked."""
    survival, cost, said = belief.survival, belief.cost, said_of(view)
    if not (isinstance(survival, Survival) and survival.is_of(view) and has_terms(cost)):
        return None
    offered = tuple(dict.fromkeys([c.drafter for c in plan.choices if c.drafter is not None]))
    layout = layout_of(offered, survival.arms)
    if survival.confidence is None or not layout.arms:
        return None
    prices = cost.terms(said.kv_tokens, len(view.requests), layout.families)
    planned = [choice.num_draft_tokens for choice in plan.choices]
    length, seconds = _refined(
        ((said.values, said.is_allowed), (np.array(planned), np.array(drafted))),
        (
            survival.before,
            (survival.terms[0], survival.terms[1][1]),
            survival.confidence,
            pace.told(layout.families),
        ),
        (rows_of(layout.arms, survival.arms), layout.budgets, layout.family),
        (*prices.pricing, prices.edges, prices.lines),
        (
            (prices.beside.drafting, prices.padding, float(said.kv_tokens)),
            view.free_kv_tokens,
            _beside(view, cost, prompts),
        ),
    )
    return None if seconds < 0.0 else length.tolist()


def _beside(view: BatchView, cost: Cost, prompts: Prompts | None) -> _Beside:
    if not view.prefill_tokens or prompts is None:
        return view.prefill_tokens, (1.0, 0.0)
    return view.prefill_tokens, prompts.hurry(view, cost)


@compiled(
    f"Tuple(({_COLUMNS}, float64[:,:,::1], float64[:,::1]))"
    f"(Tuple((float64[::1], boolean[:,::1])), {TERMS})",
    is_inlined=True,
)
def _believe(
    said: tuple[FloatArray, NDArray[np.bool_]], terms: Terms
) -> tuple[_Columns, FloatArray, FloatArray]:
    """The view's columns, the survival of all arms, and the share of their drafts that come."""
    (values, is_allowed), (index, averages, seated, depth) = said, terms
    columns = sorted_out(values, *is_allowed.shape)
    _, _, limit, match, confidence, _ = columns
    hints = limit, match, confidence, is_allowed
    survival, coming = believe(index, averages, seated, hints, depth)
    return columns, survival, coming


@compiled(
    "Tuple((int64[::1], int64[::1], float64, float64))"
    f"({TABLES}, UniTuple(float64[::1], 2), int64[::1], Tuple(({TOLD}, {_BESIDE})))",
    is_inlined=True,
)
def _found(
    tables: Tables,
    others: tuple[
        FloatArray, FloatArray
    ],  # verification without the prompt, if any; of one token, `[1]`
    remaining: IntArray,
    told: tuple[Told, _Beside],
) -> tuple[IntArray, IntArray, float, float]:
    """What `search` finds, in tokens of the average request; beside a prompt at its price of a second."""
    _, limits, family, verify, rounds, reads, catch_up, drafted = tables
    (alone, one), (pace, (prefill_tokens, hurry)) = others, told
    weighed = weigh(tables, one[0], remaining, pace)
    problem = weighed, limits, family, verify, rounds, reads, catch_up, drafted
    if prefill_tokens == 0:
        return search(problem, 0.0, False)
    rate = rate_beside(problem, alone, hurry)
    arm, length, tokens, seconds = search(problem, rate, True)
    return arm, length, tokens, seconds if rate >= 0.0 else -1.0


@compiled(
    "Tuple((UniTuple(int64[::1], 2), UniTuple(float64, 4), int64, "
    "Tuple((float64[:,:,::1], float64[:,::1]))))("
    "Tuple((float64[::1], boolean[:,::1])), "
    f"Tuple(({TERMS}, {CORRECTION}, {TOLD})), UniTuple(int64[::1], 3), {_PRICES}, "
    f"Tuple((UniTuple(float64, 4), int64, {HORIZON}, {_BESIDE})))"
)
def _answer(
    said: tuple[FloatArray, NDArray[np.bool_]],
    believed: tuple[Terms, Correction, Told],
    layout: tuple[IntArray, IntArray, IntArray],  # rows, budgets, family
    prices: _Prices,
    numbers: tuple[tuple[float, float, float, float], int, Horizon, _Beside],
) -> tuple[
    tuple[IntArray, IntArray],
    tuple[float, float, float, float],
    int,
    tuple[FloatArray, FloatArray],
]:
    """Arms, lengths; expected tokens, seconds, those of no drafts and of the most; how many those are; and what is
    believed, see `Survival.remember`.
    """
    (terms, correction, told), (rows, _, family) = believed, layout
    kept, weights, coefficients, edges, lines = prices
    (plain, drafting, padding, kv_tokens), most_drafts, horizon, beside = numbers
    columns, offered, coming = _believe(said, terms)
    context, remaining, limit, match, confidence, lagging = columns
    correct(offered, (context, match, confidence), correction)
    posed = pose(offered[rows], (context, remaining, limit, said[1]), layout)
    by_line = np.zeros((0, 0)), lines
    lags, paid = (lagging, remaining), (horizon, padding)
    rounds, catch_up = price(posed, by_line, lags, (rows, family), paid)
    gain, limits, reads, _, most_tokens = posed
    load, most = (kv_tokens, float(len(context))), max(min(most_tokens, most_drafts), 0)
    asked = edges, load[1] + beside[0], most, drafting
    verify, grid = tabled(kept, weights, coefficients, load, asked)
    alone = read_off((kept[0], grid, edges), load[1], most if beside[0] else 0, drafting)
    verify[0] += plain - drafting
    alone[0] += plain - drafting
    spare(reads, verify, coming, rows)
    others = alone, read_off((kept[0], grid, edges), 1.0, 0, plain)
    drafted = np.zeros(len(rounds), np.int64)
    tables = gain, limits, family, verify, rounds, reads, catch_up, drafted
    arm, length, _, seconds = _found(tables, others, remaining, (told, beside))
    tokens = float(len(arm))
    for r in range(len(arm)):
        tokens += gain[arm[r], r, length[r]]
    return (arm, length), (tokens, seconds, verify[0], verify[-1]), most, (offered, coming)


@compiled(
    "Tuple((int64[::1], float64))("
    "Tuple((Tuple((float64[::1], boolean[:,::1])), UniTuple(int64[::1], 2))), "
    "Tuple((Tuple((float64[:,:,::1], float64[:,::1])), Tuple((int64[::1], boolean[::1])), "
    f"{GIVEN}, {TOLD})), UniTuple(int64[::1], 3), {_PRICES}, "
    f"Tuple((UniTuple(float64, 3), int64, {_BESIDE})))"
)
def _refined(
    said: tuple[tuple[FloatArray, NDArray[np.bool_]], tuple[IntArray, IntArray]],
    believed: tuple[tuple[FloatArray, FloatArray], tuple[IntArray, NDArray[np.bool_]], Given, Told],
    layout: tuple[IntArray, IntArray, IntArray],  # rows among the view's, budgets, family
    prices: _Prices,
    numbers: tuple[tuple[float, float, float], int, _Beside],
) -> tuple[IntArray, float]:
    """Lengths, of planned and drafted ones, and the seconds of the step."""
    (before, arms, given, told), (rows, budgets, family) = believed, layout
    kept, weights, coefficients, edges, lines = prices
    (overhead, padding, kv_tokens), most_drafts, beside = numbers
    (values, is_allowed), (planned, drafted) = said
    context, remaining, _, _, _, _ = sorted_out(values, *is_allowed.shape)
    offered = before[0].copy()
    condition(offered, given, *arms, before[1])
    own, survival = np.arange(len(rows)), np.empty((len(rows), len(context), planned.max()))
    arm, limits = np.full(len(context), -1), np.zeros((len(rows), len(context)), np.int64)
    for a in range(len(rows)):
        survival[a] = offered[rows[a], :, : survival.shape[2]]
        for r in range(len(context)):
            if given[0][r] == rows[a]:
                arm[r], limits[a, r] = a, planned[r]
    may, nothing = np.ones(limits.shape, np.bool_), np.zeros_like(limits)
    posed = pose(survival, (context, remaining, limits, may), (own, budgets, family))
    by_line = np.zeros((0, 0)), lines
    rounds, catch_up = price(
        posed, by_line, (nothing, remaining), (own, family), ((1.0, 1.0, 1.0, 0.0), padding)
    )
    done, seconds = spent(rounds, family, arm, drafted)
    load, most = (kv_tokens, float(len(context))), max(min(planned.sum(), most_drafts), 0)
    asked = edges, load[1] + beside[0], most, overhead + seconds
    verify, grid = tabled(kept, weights, coefficients, load, asked)
    alone = read_off((kept[0], grid, edges), load[1], most if beside[0] else 0, asked[3])
    others = alone, read_off((kept[0], grid, edges), 1.0, 0, asked[3])
    tables = posed[0], posed[1], family, verify, rounds, posed[2], catch_up, done
    _, length, _, seconds = _found(tables, others, remaining, (told, beside))
    return length, seconds
