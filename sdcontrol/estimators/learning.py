"""What outcomes teach: the levels of the request, its own counts, and the arm's average.

Knows nothing of where outcomes come from; arrays in, changed in place. The model is described in
`acceptance`.
"""

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import sorted_out
from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.estimators.averages import shrink
from sdcontrol.estimators.coming import note_all
from sdcontrol.estimators.evidence import (
    EVIDENCE,
    KNOWN,
    OBSERVED,
    Evidence,
    Known,
    Observed,
    prove,
)
from sdcontrol.estimators.hints import buckets_of
from sdcontrol.estimators.levels import (
    ACCEPTED,
    ALONE,
    GIVEN,
    KEPT,
    LEVELS,
    MEAN,
    TESTED,
    Kept,
    learn_one_kind,
    pool,
    rates_at,
    remix,
    settle,
    tell,
    weigh,
)

__all__ = ["absorb"]

IntArray = NDArray[np.int64]
Averages = tuple[FloatArray, FloatArray, FloatArray, FloatArray]
AVERAGES = "UniTuple(float64[:, :, ::1], 4)"
HINTS = "Tuple((int64[::1], int64[:, ::1]))"

_FAIR_SHARE = 4.0  # drafts times variance after which a request counts half in the arm average
_SHARE_RETURNS = 0.005  # of what a request gave, per draft
_ODD_DEVIATION = 4.0  # standard deviations at which a request counts half again
_YOUNG_DRAFTS = 4.5  # of a request, that tell whether new ones are all alike
_HINTED_TRUST = 0.5  # of an outcome that was hinted at: the hint has said much of it


@compiled("float64(float64[::1], float64)")
def _weight(state: FloatArray, variance: float) -> float:
    """Of an outcome in the arm's average: less the more its request gave, and the odder it is.

    Both by how far the arm's requests lie apart, `variance`: where they are alike, each may speak.
    """
    before = state[GIVEN] * (1.0 - _SHARE_RETURNS)
    state[GIVEN] = before + 1.0
    oddness = 1.0 + state[MEAN] ** 2 / (_ODD_DEVIATION**2 * variance)
    return 1.0 / float(oddness * (1.0 + before * variance / _FAIR_SHARE))


@compiled(f"void(int64[:, ::1], {KEPT})", is_inlined=True)
def _settle(arms: IntArray, kept: Kept) -> None:
    """What the levels of every (request, arm) that learnt something come to, once.

    And whether they were all at one level, from which it is learnt how often that is so of new ones.
    """
    (slots, likelihood, logs, state, _), (_, priors, _, one_kind) = kept
    is_settled = np.zeros(state.shape[:2], np.bool_)
    together, apart = np.zeros(priors.shape), np.zeros(len(priors))
    num_settled, num_young = np.zeros(len(priors), np.int64), np.zeros(len(priors), np.int64)
    for part in range(arms.shape[0]):
        for r in range(arms.shape[1]):
            arm, slot = arms[part, r], slots[r]
            if arm >= 0 and not is_settled[slot, arm]:
                is_settled[slot, arm] = True
                settle(likelihood[slot, arm], priors[arm], state[slot, arm], logs[slot, arm])
                together[arm] += logs[slot, arm]
                apart[arm] += state[slot, arm, ALONE]
                num_settled[arm] += 1
                num_young[arm] += state[slot, arm, GIVEN] < _YOUNG_DRAFTS
    for arm in range(len(priors)):
        if num_settled[arm] > 1 and num_young[arm]:
            probability = pool(together[arm], apart[arm], priors[arm], one_kind[arm])
            learn_one_kind(one_kind, arm, probability, num_young[arm] / num_settled[arm])


@compiled(f"int64[:, ::1]({EVIDENCE}, {HINTS})", is_inlined=True)
def _taught(evidence: Evidence, hints: tuple[IntArray, IntArray]) -> IntArray:
    """Where something was learnt: part, request, arm, and bucket of the hint, `[outcomes, 4]`."""
    (arms, outcomes), (column_of, buckets) = evidence, hints
    taught, count = np.empty((arms.size, 4), np.int64), 0
    for part in range(arms.shape[0]):
        for r in range(arms.shape[1]):
            arm = arms[part, r]
            if arm >= 0 and outcomes[part, r][TESTED].any():
                bucket = buckets[column_of[arm], r] if column_of[arm] >= 0 else 0
                taught[count] = part, r, arm, bucket
                count += 1
    return taught[:count]


@compiled(
    f"Tuple((boolean[:, ::1], boolean[::1]))(int64[:, ::1], {EVIDENCE}, {KEPT}, {AVERAGES})",
    is_inlined=True,
)
def _count(
    taught: IntArray, evidence: Evidence, kept: Kept, averages: Averages
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Count every outcome; the averages in which any does, and the arms of which several requests had some."""
    (slots, _, _, state, _), (_, _, variances, _) = kept
    tested, accepted, _, _ = averages
    is_stale = np.zeros(tested.shape[:2], np.bool_)
    is_shared, first = np.zeros(len(tested), np.bool_), np.full(len(tested), -1)
    for part, r, arm, bucket in taught:
        outcome, slot = evidence[1][part, r], slots[r]
        is_stale[arm, bucket] = True
        is_shared[arm] |= first[arm] >= 0 and first[arm] != slot
        first[arm] = slot
        weight = _weight(state[slot, arm], variances[arm])
        for j in range(outcome.shape[1]):
            tested[arm, bucket, j] += weight * outcome[TESTED, j]
            accepted[arm, bucket, j] += weight * outcome[ACCEPTED, j]
    return is_stale, is_shared


@compiled(
    f"float64[:, ::1](int64[:, ::1], {EVIDENCE}, {KEPT}, float64[:, :, ::1], boolean[::1])",
    is_inlined=True,
)
def _tell(
    taught: IntArray,
    evidence: Evidence,
    kept: Kept,
    odds: FloatArray,
    is_tree: NDArray[np.bool_],
) -> FloatArray:
    """Tell requests of their outcomes, beside the averages; the summed levels of each arm."""
    (slots, likelihood, _, state, counts), (_, priors, _, _) = kept
    rates = np.empty((*odds.shape, len(LEVELS)))
    is_known = np.zeros(odds.shape[:2], np.bool_)
    totals = np.zeros((len(odds), len(LEVELS)))
    for part, r, arm, bucket in taught:
        if not is_known[arm, bucket]:
            is_known[arm, bucket] = True
            rates_at(odds[arm, bucket], rates[arm, bucket])
        own = likelihood[slots[r], arm], counts[slots[r], arm]
        how = _HINTED_TRUST if bucket else 1.0, is_tree[arm]
        tell(own, priors[arm], rates[arm, bucket], evidence[1][part, r], how)
        weigh(own[0], priors[arm], state[slots[r], arm], totals[arm])
    return totals


@compiled(f"void(boolean[:, ::1], {AVERAGES}, float64[:, ::1], boolean[::1])", is_inlined=True)
def _shrink(
    is_stale: NDArray[np.bool_], averages: Averages, priors: FloatArray, is_tree: NDArray[np.bool_]
) -> None:
    """Set the odds of those averages whose counts, or priors, have changed."""
    tested, accepted, prior, odds = averages
    for a in range(len(is_stale)):
        for b in range(is_stale.shape[1]):
            if is_stale[a, b]:
                counted = tested[a, b], accepted[a, b], prior[a, b]
                shrink(counted, priors[a], is_tree[a], odds[a, b])


@compiled(f"void({EVIDENCE}, {KEPT}, {HINTS}, {AVERAGES}, boolean[::1])", is_inlined=True)
def _learn(
    evidence: Evidence,
    kept: Kept,
    hints: tuple[IntArray, IntArray],
    averages: Averages,
    is_tree: NDArray[np.bool_],
) -> None:
    """Learn every outcome of `Evidence`.

    Where several requests learnt something of an arm, its averages do first: else what they have in common would
    be learnt twice, by the averages, and as how far each is from what those were. Of a lone request nobody can
    tell what it has in common with others.

    `hints` are the row of each arm, negative where nothing is hinted, in the buckets that follow,
    `[rows, requests]`.
    """
    odds, priors, population = averages[3], kept[1][1], kept[1]
    before = odds.copy()
    taught = _taught(evidence, hints)
    is_stale, is_shared = _count(taught, evidence, kept, averages)
    _shrink(is_stale, averages, priors, is_tree)
    for a in range(len(odds)):
        if is_shared[a]:
            before[a] = odds[a]
    totals = _tell(taught, evidence, kept, before, is_tree)
    for a in range(len(odds)):
        is_stale[a] = totals[a].any() and remix(population, a, totals[a])
    _shrink(is_stale, averages, priors, is_tree)
    _settle(evidence[0], kept)


@compiled(
    f"void({OBSERVED}, {KNOWN}, Tuple((float64[::1], int64, int64, int64[::1])), {KEPT},"
    f" Tuple(({AVERAGES}, float64[:,::1])))"
)
def absorb(
    observed: Observed,
    known: Known,
    said: tuple[FloatArray, int, int, IntArray],  # `Said.values`, arms, requests; each arm's column
    kept: Kept,
    counted: tuple[Averages, FloatArray],  # and `ArmAverages.coming`
) -> None:
    """Learn from steps: what came, and what is proven of it."""
    (averages, coming), (values, arms, requests, column_of) = counted, said
    _, _, limits, match_tokens, confidence, _ = sorted_out(values, arms, requests)
    note_all(observed, limits, kept[0], coming)
    evidence = prove(observed, known, limits, averages[0].shape[2])
    buckets = buckets_of(match_tokens, confidence)
    _learn(evidence, kept, (column_of, buckets), averages, known[0])
