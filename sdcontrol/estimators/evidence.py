"""What one observation proves about acceptance: which draft tokens were tested, which accepted.

    proposed 4, accepted 2      accepted  1 1 0 .      tested  1 1 1 .     a rejection was seen
    proposed 2, accepted 2      accepted  1 1 . .      tested  1 1 . .     censored: not a word of 3
    trimmed to 2 of 4           accepted  1 1 c .      tested  1 1 1 .     c: what its confidence says

Knows nothing of estimates, except for the calibrated acceptance `c` of tokens that were drafted and
then trimmed: leaving those out would leave the confident ones only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray, Observation
from sdcontrol.errors import ObservationError
from sdcontrol.estimators.confidence import calibrated, flattened
from sdcontrol.estimators.deviations import ACCEPTED, TESTED

__all__ = ["NOBODY", "Evidence", "Outcomes", "outcomes_of", "prove"]

IntArray = NDArray[np.int64]
Evidence = tuple[IntArray, FloatArray]
"""Of the drafts and then of every shadow: arm, `[parts, requests]`, negative where there was none;
and the weight of known outcomes and of hits, `[parts, requests, 2, K]`."""

_Trees = tuple[NDArray[np.bool_], NDArray[np.bool_]]
_Known = tuple[FloatArray, IntArray, FloatArray]
_TREES = "Tuple((boolean[::1], boolean[:, ::1]))"
_CONFIDENCE = "Tuple((float64[::1], int64[::1], float64[:, ::1]))"

_COUNTED = ("plan", "drafted", "proposed", "accepted", "emitted")
_ARM, _DRAFTED, _PROPOSED, _HITS, _EMITTED = range(5)
NOBODY = -1  # arm of a request that did not draft
_UNKNOWN = -1  # tokens of a shadow
_NO_NODES: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)
_NO_CONFIDENCE = flattened(())


@dataclass(frozen=True, slots=True)
class Outcomes:
    """An observation as arrays."""

    counts: IntArray  # [5, requests]: arm index, negative without a drafter; drafted, ..., emitted
    confidence: tuple[FloatArray, IntArray]  # see `confidence.flattened`
    nodes: NDArray[np.bool_]  # [requests, K], accepted; or empty, where drafts are chains
    shadow_arms: IntArray  # [shadows], by index
    shadow: IntArray  # [shadows, requests], tokens that would have been accepted; negative: unknown

    @property
    def submitted(self) -> tuple[IntArray, IntArray, IntArray]:
        """Arm, proposed and accepted tokens, `[requests]` each."""
        return self.counts[_ARM], self.counts[_PROPOSED], self.counts[_HITS]


def outcomes_of(
    observation: Observation, index_of: Mapping[str | None, int], depth: int
) -> Outcomes:
    """The columns of `observation`, whose arms `index_of` knows.

    Raises `ObservationError` where a column is not as long as the view.
    """
    shadow = observation.shadow
    counts = (
        [index_of[choice.drafter] for choice in observation.plan.choices],
        observation.drafted,
        observation.proposed,
        observation.accepted,
        observation.emitted,
        *[[_UNKNOWN if n is None else n for n in tokens] for tokens in shadow.values()],
    )
    num_requests = len(observation.view.requests)
    for column, name in zip(counts, (*_COUNTED, *shadow), strict=True):
        if len(column) != num_requests:
            raise ObservationError(
                f"{len(column)} entries in {name} for {num_requests} requests; give one each"
            )
    table = np.array(counts, np.int64)
    nodes, confidence = observation.accepted_nodes, observation.confidence
    return Outcomes(
        counts=table[:5],
        confidence=_NO_CONFIDENCE if confidence is None else flattened(confidence),
        nodes=_NO_NODES if nodes is None else _node_table(nodes, depth),
        shadow_arms=np.array([index_of[arm] for arm in shadow], np.int64),
        shadow=table[5:],
    )


def _node_table(paths: Sequence[Sequence[int]], depth: int) -> NDArray[np.bool_]:
    table = np.zeros((len(paths), depth), np.bool_)
    for row, path in enumerate(paths):
        table[row, [node for node in path if node < depth]] = True
    return table


def prove(
    outcomes: Outcomes,
    is_tree: NDArray[np.bool_],
    curves: FloatArray,
    *,
    column_of: IntArray,
    limits: IntArray,
    depth: int,
) -> Evidence:
    """Every outcome that is proven, at the first `depth` positions.

    `is_tree` and `curves`, of confidence, are by arm: trees count nodes instead of positions. The
    most tokens of a shadow are `limits[column_of[arm]]`, `[columns, requests]`; negative: no limit.
    Of a shadow only emitted tokens are known: one that matches all of them is censored there.
    """
    return _prove(
        (outcomes.counts, outcomes.shadow_arms, outcomes.shadow),
        (is_tree, outcomes.nodes),
        (*outcomes.confidence, curves),
        (column_of, limits),
        depth,
    )


@compiled("void(float64[:, ::1], int64, int64)")
def _mark_chain(outcome: FloatArray, known: int, accepted: int) -> None:
    """Of a chain whose first `known` tokens were judged, `accepted` were accepted; `[2, K]`."""
    accepted = min(accepted, known)
    outcome[TESTED, : max(min(accepted + 1, known), 0)] = 1.0
    outcome[ACCEPTED, : max(accepted, 0)] = 1.0


@compiled("void(float64[:, ::1], int64, float64[::1], float64[::1])")
def _mark_trimmed(outcome: FloatArray, first: int, values: FloatArray, curve: FloatArray) -> None:
    """Tokens drafted and trimmed, from position `first` on: what their confidence says of them."""
    reached = 1.0
    for j in range(first, min(len(values), outcome.shape[1])):
        if not np.isfinite(values[j]):
            return
        rate = calibrated(min(max(values[j], 0.0), 1.0), curve)
        outcome[TESTED, j] = reached
        reached *= rate
        outcome[ACCEPTED, j] = reached


@compiled(f"void(float64[:, ::1], int64[:, ::1], int64, {_TREES}, {_CONFIDENCE})")
def _mark_draft(
    outcome: FloatArray, counts: IntArray, r: int, trees: _Trees, confidence: _Known
) -> None:
    """What request `r` proves of the arm that it used, `[2, K]`."""
    is_tree, nodes = trees
    values, starts, curves = confidence
    arm, proposed, accepted = counts[_ARM, r], max(counts[_PROPOSED, r], 0), counts[_HITS, r]
    _mark_chain(outcome, proposed, accepted)
    if is_tree[arm]:  # every node that was proposed was tested
        outcome[TESTED, :proposed] = 1.0
        if len(nodes):
            outcome[ACCEPTED] = nodes[r]
    elif counts[_DRAFTED, r] > proposed and accepted >= proposed and r + 1 < len(starts):
        _mark_trimmed(outcome, proposed, values[starts[r] : starts[r + 1]], curves[arm])


@compiled(
    "Tuple((int64[:, ::1], float64[:, :, :, ::1]))("
    f"Tuple((int64[:, ::1], int64[::1], int64[:, ::1])), {_TREES}, {_CONFIDENCE},"
    " Tuple((int64[::1], int64[:, ::1])), int64)"
)
def _prove(
    observed: tuple[IntArray, IntArray, IntArray],
    trees: _Trees,
    confidence: _Known,
    hints: tuple[IntArray, IntArray],
    depth: int,
) -> Evidence:
    counts, shadow_arms, shadow = observed
    column_of, limits = hints
    arms = np.full((1 + len(shadow_arms), counts.shape[1]), NOBODY)
    outcomes = np.zeros((len(arms), counts.shape[1], 2, depth))
    for r in range(counts.shape[1]):
        if counts[_DRAFTED, r] > 0 and counts[_ARM, r] >= 0:
            arms[0, r] = counts[_ARM, r]
            _mark_draft(outcomes[0, r], counts, r, trees, confidence)
        for s in range(len(shadow_arms)):
            arm, column = shadow_arms[s], column_of[shadow_arms[s]]
            if shadow[s, r] >= 0 and arm != arms[0, r]:
                arms[1 + s, r] = arm
                known = max(counts[_EMITTED, r], shadow[s, r])
                most = limits[column, r] if column >= 0 else known
                _mark_chain(outcomes[1 + s, r], min(known, most), shadow[s, r])
    return arms, outcomes
