"""Survival of drafts, from what the acceptance estimator keeps: a loop, compiled.

Knows nothing of how any of it was learnt. The model is described in `acceptance`.
"""

from collections.abc import Iterator, Mapping
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import columns_of
from sdcontrol.compiled import compiled
from sdcontrol.core import BatchView, FloatArray
from sdcontrol.estimators.coming import share_of
from sdcontrol.estimators.confidence import Given, condition
from sdcontrol.estimators.correction import NOTHING, Correction, beside_of, correct
from sdcontrol.estimators.hints import bucket_of
from sdcontrol.estimators.levels import (
    EXCESS,
    GIVEN,
    KEPT,
    POPULATION,
    RATIOS,
    REQUESTS,
    TESTED,
    Kept,
    Population,
    Requests,
    gather,
)

__all__ = ["TERMS", "Survival", "Terms", "believe", "finite"]

IntArray = NDArray[np.int64]

_OWN_SHRINK_TOKENS = 128.0  # tokens that the model is worth against own counts
_LEAST_HAZARD = 1e-4

Terms = tuple[IntArray, tuple[FloatArray, NDArray[np.bool_], FloatArray], Kept, int]
"""What survival is computed from beside hints: index, `[arms]`, among all arms; odds, `is_tree` and
`coming` of the averages; what is kept of requests and arms; draft tokens. Do not write."""
_INDEX = "int64[::1]"
_AVERAGES = "Tuple((float64[:,:,::1], boolean[::1], float64[:,::1]))"
TERMS = f"Tuple(({_INDEX}, {_AVERAGES}, {KEPT}, int64))"


class Survival(Mapping[str, FloatArray]):
    """By arm, `[requests, K]`: rows of `table`, `[arms, requests, K]`, in the order of `arms`.

    The table is computed when first asked for, and `terms` are the estimator's own arrays: whoever
    wants it as it is now asks before the next observation is learnt.
    """

    def __init__(
        self,
        view: BatchView,
        arms: tuple[str, ...],
        terms: Terms,
        correction: Correction = NOTHING,
    ) -> None:
        self.arms = arms
        self.terms = terms
        self.correction = correction
        self.confidence: Given | None = None
        self._view = view
        self._tables: tuple[FloatArray, FloatArray] | None = None
        self._unconditioned: Survival | None = None  # that was `given` the confidences

    @property
    def table(self) -> FloatArray:
        """Survival of all arms, `[arms, requests, K]`."""
        return self._computed()[0]

    @property
    def coming(self) -> FloatArray:
        """Share of the drafts asked for of which something comes, which `table` is of, `[arms, requests]`."""
        return self._computed()[1]

    @property
    def before(self) -> tuple[FloatArray, FloatArray]:
        """`table` and `coming` as they are without confidences. Do not write."""
        return self._first._computed()

    def is_of(self, view: BatchView) -> bool:
        """Whether it is of this view's requests and drafters: another may have fewer, with terms that are read by row."""
        return self._view is view

    @property
    def _first(self) -> "Survival":
        return self if self._unconditioned is None else self._unconditioned

    def remember(self, table: FloatArray, coming: FloatArray) -> None:
        """Somebody computed it, who had no confidences."""
        self._tables = table, coming

    def _computed(self) -> tuple[FloatArray, FloatArray]:
        if self._tables is None:
            self._tables = self._believed() if self.confidence is None else self._conditioned()
        return self._tables

    def _believed(self) -> tuple[FloatArray, FloatArray]:
        columns = columns_of(self._view)
        hints = (
            columns.max_draft_tokens,
            columns.match_tokens,
            columns.confidence,
            columns.is_allowed,
        )
        table, coming = believe(*self.terms[:-1], hints, self.terms[-1])
        said = columns.context_tokens, columns.match_tokens, columns.confidence
        correct(table, said, self.correction)
        return table, coming

    def _conditioned(self) -> tuple[FloatArray, FloatArray]:
        assert self.confidence is not None
        (table, coming), (index, (_, is_tree, _), *_) = self.before, self.terms
        table = table.copy()
        condition(table, self.confidence, index, is_tree, coming)
        return table, coming

    def corrected(self, weights: FloatArray) -> "Survival":
        """The same with a correction, `[arms, 3, features]`, on top; see `Correction`."""
        return Survival(self._view, self.arms, self.terms, (weights, beside_of(self._view)))

    def given(self, confidence: Given) -> "Survival":
        """The same, given confidences in what is drafted so far."""
        given = Survival(self._view, self.arms, self.terms, self.correction)
        given.confidence, given._unconditioned = confidence, self._first
        return given

    def now(self) -> Self:
        """Itself, computed."""
        assert self.table.ndim == 3
        return self

    def __getitem__(self, arm: str) -> FloatArray:
        if arm not in self.arms:
            raise KeyError(arm)
        rows: FloatArray = self.table[self.arms.index(arm)]
        return rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.arms)

    def __len__(self) -> int:
        return len(self.arms)


def finite(survival: Mapping[str, FloatArray]) -> Mapping[str, FloatArray]:
    """`survival` with every entry in [0, 1], as ours is; what is not a number counts as never accepted."""
    if isinstance(survival, Survival) or all(np.isfinite(rows).all() for rows in survival.values()):
        return survival
    return {
        arm: np.clip(np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0), 0.0, 1.0)
        for arm, rows in survival.items()
    }


@compiled("void(float64[::1], boolean, float64[:, ::1])", is_inlined=True)
def _reach(odds: FloatArray, is_tree: bool, reached: FloatArray) -> None:
    """P(token j is accepted) at each level, `[levels, K]`: products of hazards but of trees."""
    for k in range(len(RATIOS)):
        before = 1.0
        for j in range(len(odds)):
            own_odds = odds[j] * RATIOS[k]
            reached[k, j] = before * own_odds / (1.0 + own_odds)
            if not is_tree:
                before = reached[k, j]


@compiled("void(float64[:, ::1], boolean, float64[::1])", is_inlined=True)
def _correct_by_counts(counts: FloatArray, is_tree: bool, survival: FloatArray) -> None:
    """Let a request's own counts, `[2, K]`, correct its survival."""
    before, before_own = 1.0, 1.0
    for j in range(len(survival)):
        excess, tested = counts[EXCESS, j], counts[TESTED, j]
        rate = survival[j]
        hazard = rate / before + excess / (_OWN_SHRINK_TOKENS + tested)
        hazard = min(max(hazard, _LEAST_HAZARD), 1.0 - _LEAST_HAZARD)
        survival[j] = hazard * before_own
        if not is_tree:
            before, before_own = rate, survival[j]


@compiled(
    f"void(Tuple(({REQUESTS}, int64, {POPULATION})), UniTuple(int64[::1], 2), float64[:,:,::1],"
    " boolean, float64[:,::1])",
    is_inlined=True,
)
def _survive(
    own: tuple[Requests, int, Population],  # and the arm's index
    drafts: tuple[IntArray, IntArray],  # most tokens and buckets, `[requests]`
    reached: FloatArray,
    is_tree: bool,
    survival: FloatArray,
) -> None:
    """Set the survival of drafts by one arm, `[requests, draft tokens]`.

    Levels are those of each request, or of its batch if that is of one kind and the request does not
    stand out from the others; own counts correct.
    """
    (requests, arm, population), (most, buckets) = own, drafts
    prior = population[1][arm]
    slots, likelihood, _, state, counts = requests
    alike = np.full(len(reached), -1)  # by bucket, a request of which nothing is known
    levels, together = np.empty(len(RATIOS)), np.empty(len(RATIOS))
    probability = gather(requests, arm, population, together)
    for r in range(len(slots)):
        if most[r] == 0:
            continue
        slot, bucket, total, others = slots[r], buckets[r], 0.0, 0.0
        if state[slot, arm, GIVEN] == 0.0:
            if alike[bucket] >= 0 and most[r] <= most[alike[bucket]]:
                survival[r, : most[r]] = survival[alike[bucket], : most[r]]
                continue
            alike[bucket] = r
        for k in range(len(RATIOS)):
            levels[k] = prior[k] * likelihood[slot, arm, k]
            total += levels[k]
            others += together[k] / likelihood[slot, arm, k]
        member = probability / (probability + (1.0 - probability) * total * others)
        for k in range(len(RATIOS)):
            here = (1.0 - member) / total * levels[k] + member * together[k]
            for j in range(most[r]):
                survival[r, j] += here * reached[bucket, k, j]
        _correct_by_counts(counts[slot, arm], is_tree, survival[r, : most[r]])


@compiled(
    f"Tuple((float64[:,:,::1], float64[:,::1]))({_INDEX}, {_AVERAGES}, {KEPT},"
    " Tuple((int64[:,::1], int64[:,::1], float64[:,::1], boolean[:,::1])), int64)",
    is_inlined=True,
)
def believe(
    index: IntArray,  # [arms], among all arms
    averages: tuple[FloatArray, NDArray[np.bool_], FloatArray],
    kept: Kept,
    hints: tuple[IntArray, IntArray, FloatArray, NDArray[np.bool_]],  # of `Columns`
    depth: int,
) -> tuple[FloatArray, FloatArray]:
    """Survival, `[arms, requests, depth]`: products of hazards (chains) or rates (trees), of drafts that come or not.

    And the share of those that do, `[arms, requests]`.
    """
    odds, is_tree, filled = averages
    requests, population = kept
    limits, match_tokens, confidence, is_allowed = hints
    survival, coming = np.zeros((*limits.shape, depth)), np.ones(limits.shape)
    most, buckets = np.empty(limits.shape[1], np.int64), np.empty(limits.shape[1], np.int64)
    reached = np.empty((odds.shape[1], len(RATIOS), odds.shape[2]))  # of the arm at hand
    for a in range(len(index)):
        arm, is_ready = index[a], np.zeros(odds.shape[1], np.bool_)
        for r in range(len(most)):
            most[r] = max(min(depth, limits[a, r]), 0) if is_allowed[a, r] else 0
            buckets[r] = bucket_of(match_tokens[a, r], confidence[a, r])
            if most[r] and not is_ready[buckets[r]]:
                is_ready[buckets[r]] = True
                _reach(odds[arm, buckets[r]], is_tree[arm], reached[buckets[r]])
        own, drafts = (requests, arm, population), (most, buckets)
        _survive(own, drafts, reached, is_tree[arm], survival[a])
        if filled[arm, 1] < filled[arm, 0]:  # else all comes
            for r in range(len(most)):
                coming[a, r] = share_of(requests[3][requests[0][r], arm], filled[arm])
                for j in range(most[r]):
                    survival[a, r, j] *= coming[a, r]
    return survival, coming
