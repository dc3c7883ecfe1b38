"""What one observation proves about acceptance: which draft tokens were tested, which accepted.

    proposed 4, accepted 2      accepted  1 1 0 .      tested  1 1 1 .     a rejection was seen
    proposed 2, accepted 2      accepted  1 1 . .      tested  1 1 . .     censored: not a word of 3
    trimmed to 2 of 4           accepted  1 1 c .      tested  1 1 1 .     c: what its confidence says

Knows nothing of estimates, except for the calibrated acceptance `c` of tokens that were drafted and
then trimmed: leaving those out would leave the confident ones only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import BatchView, FloatArray, Observation
from sdcontrol.estimators.hints import read_hints

__all__ = ["Calibrated", "Evidence", "HintReader", "gather", "tested_confidence"]

IntArray = NDArray[np.intp]
Calibrated = Callable[[str, FloatArray], FloatArray]
"""From an arm and its confidences to probabilities of acceptance."""
HintReader = Callable[[BatchView, Sequence[str]], tuple[IntArray, IntArray]]
"""Bucket and most draft tokens of every hint, both `[arms, requests]`."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Outcomes by position; one entry per (request, arm)."""

    names: tuple[str, ...]  # the arms there is evidence of
    rows: IntArray  # [entries], of the view
    arms: IntArray  # [entries], of `names`
    buckets: IntArray  # [entries], of what the hint said
    tested: FloatArray  # [entries, K], the weight of a known outcome, else 0
    accepted: FloatArray  # [entries, K], at most `tested`


def gather(
    observation: Observation,
    depth: int,
    trees: frozenset[str],
    calibrated: Calibrated,
    read: HintReader = read_hints,
) -> Evidence:
    """Every outcome that `observation` proves, at the first `depth` positions.

    Entries of arms in `trees` count nodes instead of positions: whatever was proposed was tested.
    """
    used = _used(observation)
    names = tuple(dict.fromkeys([*used.values(), *observation.shadow]))
    index_of = {name: index for index, name in enumerate(names)}
    rows, arms = [list(used)], [[index_of[arm] for arm in used.values()]]
    accepted = [[observation.accepted[row] for row in used]]
    for arm, counts in observation.shadow.items():
        shadowed = [row for row, n in enumerate(counts) if n is not None and used.get(row) != arm]
        rows.append(shadowed)
        arms.append([index_of[arm]] * len(shadowed))
        accepted.append([counts[row] or 0 for row in shadowed])
    hints = read(observation.view, names)
    drafted = [observation.proposed[row] for row in used]
    entries = _flat(rows), _flat(arms), _flat(accepted)
    evidence = _proven(observation, (names, *hints), drafted, entries, depth)
    if trees or observation.confidence is not None:
        for entry, (row, arm) in enumerate(used.items()):
            if arm in trees:
                _mark_nodes(observation, row, evidence.tested[entry], evidence.accepted[entry])
            elif _was_trimmed(observation, row):
                values = _trimmed_confidence(observation, row, depth)
                outcome = evidence.tested[entry], evidence.accepted[entry]
                _mark_trimmed(observation.proposed[row], calibrated(arm, values), *outcome)
    return evidence


def _proven(
    observation: Observation,
    hinted: tuple[tuple[str, ...], IntArray, IntArray],
    drafted: list[int],
    entries: tuple[IntArray, IntArray, IntArray],
    depth: int,
) -> Evidence:
    """What (rows, arms, accepted) prove of chains; first those that drafted, then the shadows.

    Of a shadow only emitted tokens are known: one that matches all of them is censored there.
    """
    names, buckets, limits = hinted
    rows, arms, accepted = entries
    emitted = np.array(observation.emitted, dtype=np.intp)[rows]
    known = np.minimum(np.maximum(emitted, accepted), limits[arms, rows])
    known[: len(drafted)] = drafted
    accepted = np.minimum(accepted, known)
    columns = np.arange(depth)
    hits = (columns < accepted[:, None]).astype(float)
    tested = (columns < np.minimum(accepted + 1, known)[:, None]).astype(float)
    return Evidence(names, rows, arms, buckets[arms, rows], tested, hits)


def _flat(parts: list[list[int]]) -> IntArray:
    return np.array([value for part in parts for value in part], dtype=np.intp)


def tested_confidence(observation: Observation, arm: str) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Confidence and outcome, `[tokens]`, of the tokens of `arm` that verification reached."""
    values: list[float] = []
    outcomes: list[bool] = []
    for row, name in _used(observation).items():
        if name == arm and observation.confidence is not None:
            accepted = observation.accepted[row]
            reached = min(accepted + 1, observation.proposed[row])
            known = observation.confidence[row][:reached]
            values.extend(known)
            outcomes.extend(position < accepted for position in range(len(known)))
    confidence = np.array(values, dtype=float)
    usable = (confidence >= 0.0) & (confidence <= 1.0)  # False for NaN
    return confidence[usable], np.array(outcomes, dtype=bool)[usable]


def _used(observation: Observation) -> dict[int, str]:
    """Arm by row, of the requests that drafted."""
    choices, drafted = observation.plan.choices, observation.drafted
    return {
        row: choice.drafter
        for row, (choice, count) in enumerate(zip(choices, drafted, strict=True))
        if choice.drafter is not None and count > 0
    }


def _mark_nodes(
    observation: Observation, row: int, tested: FloatArray, accepted: FloatArray
) -> None:
    """A tree: every node that was proposed was tested."""
    if observation.accepted_nodes is not None:
        nodes = observation.accepted_nodes[row]
        accepted[:] = 0.0
        accepted[[node for node in nodes if node < len(accepted)]] = 1.0
    tested[: observation.proposed[row]] = 1.0


def _was_trimmed(observation: Observation, row: int) -> bool:
    """Whether verification accepted all that it was shown of a longer draft."""
    proposed = observation.proposed[row]
    return observation.drafted[row] > proposed and observation.accepted[row] >= proposed


def _trimmed_confidence(observation: Observation, row: int, depth: int) -> FloatArray:
    """Of the tokens that were drafted but not submitted."""
    confidence = () if observation.confidence is None else observation.confidence[row]
    values: FloatArray = np.array(confidence[observation.proposed[row] : depth], dtype=float)
    return values.clip(0.0, 1.0)


def _mark_trimmed(first: int, rates: FloatArray, tested: FloatArray, accepted: FloatArray) -> None:
    """Tokens drafted and trimmed, from position `first` on: what their confidence says of them."""
    known = rates[: int(np.argmin(np.append(np.isfinite(rates), False)))]
    reached = np.concatenate([[1.0], np.cumprod(known)])[: len(known)]
    tested[first : first + len(known)] = reached
    accepted[first : first + len(known)] = reached * known
