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
from sdcontrol.estimators.deviations import ACCEPTED, ODDS_RATIO, TESTED
from sdcontrol.estimators.hints import bucket_of

__all__ = ["TERMS", "Survival", "Terms", "believe"]

IntArray = NDArray[np.int64]

_OWN_SHRINK_TOKENS = (
    16.0  # tokens that the model is worth against own counts, at variance 1 and more
)


Terms = tuple[
    IntArray,
    tuple[FloatArray, NDArray[np.bool_]],
    tuple[IntArray, FloatArray, FloatArray, FloatArray],
    int,
]
"""What survival is computed from beside hints: index, `[arms]`, among all arms; odds and `is_tree` of
the averages; slots, `[requests]`, and what `Deviations` keeps; draft tokens. Do not write."""
_INDEX = "int64[::1]"
_AVERAGES = "Tuple((float64[:,:,::1], boolean[::1]))"
_SEATED = "Tuple((int64[::1], float64[:,:,::1], float64[:,:,:,::1], float64[::1]))"
TERMS = f"Tuple(({_INDEX}, {_AVERAGES}, {_SEATED}, int64))"


class Survival(Mapping[str, FloatArray]):
    """By arm, `[requests, K]`: rows of `table`, `[arms, requests, K]`, in the order of `arms`.

    The table is computed when first asked for, and `terms` are the estimator's own arrays: whoever
    wants it as it is now asks before the next observation is learnt.
    """

    def __init__(self, view: BatchView, arms: tuple[str, ...], terms: Terms) -> None:
        self.arms = arms
        self.terms = terms
        self._view = view
        self._table: FloatArray | None = None

    @property
    def table(self) -> FloatArray:
        """Survival of all arms, `[arms, requests, K]`."""
        if self._table is not None:
            return self._table
        columns, (index, averages, seated, depth) = columns_of(self._view), self.terms
        hints = (
            columns.max_draft_tokens,
            columns.match_tokens,
            columns.confidence,
            columns.is_allowed,
        )
        table: FloatArray = believe(index, averages, seated, hints, depth)
        self._table = table
        return table

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


@compiled(
    f"float64[:,:,::1]({_INDEX}, {_AVERAGES}, {_SEATED},"
    " Tuple((int64[:,::1], int64[:,::1], float64[:,::1], boolean[:,::1])), int64)"
)
def believe(
    index: IntArray,  # [arms], among all arms
    averages: tuple[FloatArray, NDArray[np.bool_]],  # odds, is_tree
    requests: tuple[IntArray, FloatArray, FloatArray, FloatArray],  # slots, and of `Deviations`
    hints: tuple[IntArray, IntArray, FloatArray, NDArray[np.bool_]],  # of `Columns`
    depth: int,
) -> FloatArray:
    """Survival, `[arms, requests, depth]`: products of hazards (chains) or rates (trees)."""
    odds, is_tree = averages
    slots, state, counts, variances = requests
    limits, match_tokens, confidence, is_allowed = hints
    survival = np.zeros((len(index), len(slots), depth))
    for a in range(len(index)):
        arm = index[a]
        shrink = _OWN_SHRINK_TOKENS / min(variances[arm], 1.0)
        for r in range(len(slots)):
            own, ratio = counts[slots[r], arm], state[slots[r], arm, ODDS_RATIO]
            bucket, before = bucket_of(match_tokens[a, r], confidence[a, r]), 1.0
            for j in range(min(depth, limits[a, r]) if is_allowed[a, r] else 0):
                own_odds = odds[arm, bucket, j] * ratio
                hits = shrink * own_odds + own[ACCEPTED, j] * (1.0 + own_odds)
                rate = hits / ((1.0 + own_odds) * (shrink + own[TESTED, j]))
                survival[a, r, j] = rate * before
                if not is_tree[arm]:
                    before = survival[a, r, j]
    return survival
