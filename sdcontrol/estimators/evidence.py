"""What one observation proves about acceptance: which draft tokens were tested, which accepted.

    proposed 4, accepted 2      accepted  1 1 0 .      tested  1 1 1 .     a rejection was seen
    proposed 2, accepted 2      accepted  1 1 . .      tested  1 1 . .     censored: not a word of 3
    trimmed to 2 of 4           accepted  1 1 c .      tested  1 1 1 .     c: what its confidence says
    asked for 4, drafted 0      accepted  . . . .      tested  . . . .     see `coming`

Knows nothing of estimates, except for the calibrated acceptance `c` of tokens that were drafted and
then trimmed: leaving those out would leave the confident ones only.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import ACCEPTED as HITS
from sdcontrol.columns import ARM, DRAFTED, EMITTED, NOBODY, PROPOSED, SHADOWS
from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.estimators.confidence import calibrated
from sdcontrol.estimators.levels import ACCEPTED, TESTED

__all__ = [
    "EVIDENCE",
    "KNOWN",
    "NO_NODES",
    "OBSERVED",
    "Evidence",
    "Known",
    "Observed",
    "node_table",
    "prove",
]

IntArray = NDArray[np.int64]
Evidence = tuple[IntArray, FloatArray]
"""Of the drafts and then of every shadow: arm, `[parts, requests]`, negative where there was none;
and the weight of known outcomes and of hits, `[parts, requests, 2, K]`."""
EVIDENCE = "Tuple((int64[:, ::1], float64[:, :, :, ::1]))"

Observed = tuple[IntArray, IntArray, IntArray]
"""`Outcomes.table`, its shadows, and the estimator's index of each of its arms."""
OBSERVED = "Tuple((int64[:, ::1], int64[::1], int64[::1]))"

Known = tuple[NDArray[np.bool_], NDArray[np.bool_], FloatArray, IntArray, FloatArray, FloatArray]
"""By the estimator's arm, whether it drafts trees, which count nodes in the place of positions; the
nodes that were accepted, see `node_table`; confidence as values and starts; its curves and how far
it is trusted, by arm."""
KNOWN = "Tuple((boolean[::1], boolean[:, ::1], float64[::1], int64[::1], float64[:, ::1], float64[::1]))"

NO_NODES: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)


def node_table(paths: Sequence[Sequence[int]], depth: int) -> NDArray[np.bool_]:
    """Whether a node was accepted, `[requests, depth]`."""
    table = np.zeros(len(paths) * depth, np.bool_)
    rows = zip(count(0, depth), paths, strict=False)
    table[[start + node for start, path in rows for node in path if node < depth]] = True
    return table.reshape(len(paths), depth)


@compiled("void(float64[:, ::1], int64, int64)", is_inlined=True)
def _mark_chain(outcome: FloatArray, known: int, accepted: int) -> None:
    """Of a chain whose first `known` tokens were judged, `accepted` were accepted; `[2, K]`."""
    accepted = min(accepted, known)
    outcome[TESTED, : max(min(accepted + 1, known), 0)] = 1.0
    outcome[ACCEPTED, : max(accepted, 0)] = 1.0


@compiled("void(float64[:, ::1], int64, float64[::1], float64[::1], float64)", is_inlined=True)
def _mark_trimmed(
    outcome: FloatArray, first: int, values: FloatArray, curve: FloatArray, trust: float
) -> None:
    """Tokens drafted and trimmed, from position `first` on: what their confidence says of them.

    They weigh as much as it is trusted: what nobody verified yet proves nothing.
    """
    reached = trust
    for j in range(first, min(len(values), outcome.shape[1])):
        if not np.isfinite(values[j]):
            return
        rate = calibrated(min(max(values[j], 0.0), 1.0), curve)
        outcome[TESTED, j] = reached
        reached *= rate
        outcome[ACCEPTED, j] = reached


@compiled(f"void(float64[:, ::1], int64[:, ::1], int64, int64, {KNOWN})", is_inlined=True)
def _mark_draft(outcome: FloatArray, table: IntArray, r: int, arm: int, known: Known) -> None:
    """What request `r` proves of `arm`, which it used, `[2, K]`."""
    is_tree, nodes, values, starts, curves, trusts = known
    proposed, accepted = max(table[PROPOSED, r], 0), table[HITS, r]
    _mark_chain(outcome, proposed, accepted)
    if is_tree[arm]:  # every node that was proposed was tested
        outcome[TESTED, :proposed] = 1.0
        if len(nodes):
            outcome[ACCEPTED] = nodes[r]
    elif table[DRAFTED, r] > proposed and accepted >= proposed and r + 1 < len(starts):
        own = values[starts[r] : starts[r + 1]]
        _mark_trimmed(outcome, proposed, own, curves[arm], trusts[arm])


@compiled(f"{EVIDENCE}({OBSERVED}, {KNOWN}, int64[:, ::1], int64)", is_inlined=True)
def prove(observed: Observed, known: Known, limits: IntArray, depth: int) -> Evidence:
    """Every outcome that is proven, at the first `depth` positions.

    The most tokens of a shadow are `limits[arm]`, where the view has that arm. Of a shadow only
    emitted tokens are known: one that matches all of them is censored there.
    """
    table, shadows, index = observed
    requests = table.shape[1]
    arms = np.full((1 + len(shadows), requests), NOBODY)
    outcomes = np.zeros((len(arms), requests, 2, depth))
    for r in range(requests):
        if table[DRAFTED, r] > 0 and table[ARM, r] >= 0:
            arms[0, r] = index[table[ARM, r]]
            _mark_draft(outcomes[0, r], table, r, arms[0, r], known)
        for s in range(len(shadows)):
            accepted, arm = table[SHADOWS + s, r], index[shadows[s]]
            if accepted >= 0 and arm != arms[0, r]:
                arms[1 + s, r] = arm
                seen = max(table[EMITTED, r], accepted)
                most = limits[shadows[s], r] if shadows[s] < len(limits) else seen
                _mark_chain(outcomes[1 + s, r], min(seen, most), accepted)
    return arms, outcomes
