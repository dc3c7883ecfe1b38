"""What one observation proves about acceptance: which draft tokens were tested, which accepted.

    proposed 4, accepted 2      accepted  1 1 0 .      tested  1 1 1 .     a rejection was seen
    proposed 2, accepted 2      accepted  1 1 . .      tested  1 1 . .     censored: not a word of 3
    trimmed to 2 of 4           accepted  1 1 c .      tested  1 1 1 .     c: what its confidence says

Knows nothing of estimates, except for the calibrated acceptance `c` of tokens that were drafted and
then trimmed: leaving those out would leave the confident ones only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import FloatArray, Observation
from sdcontrol.estimators.hints import NO_LIMIT, bucket_of

__all__ = ["Calibrated", "Evidence", "gather", "tested_confidence"]

IntArray = NDArray[np.intp]
Calibrated = Callable[[str, FloatArray], FloatArray]
"""From an arm and its confidences to probabilities of acceptance."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Outcomes by position; one entry per (request, arm)."""

    rows: IntArray  # [entries], of the view
    arms: tuple[str, ...]  # [entries]
    buckets: IntArray  # [entries], of what the hint said
    tested: FloatArray  # [entries, K], the weight of a known outcome, else 0
    accepted: FloatArray  # [entries, K], at most `tested`


def gather(
    observation: Observation, depth: int, trees: frozenset[str], calibrated: Calibrated
) -> Evidence:
    """Every outcome that `observation` proves, at the first `depth` positions.

    Entries of arms in `trees` count nodes instead of positions: whatever was proposed was tested.
    """
    used = _used(observation)
    rows, arms = list(used), list(used.values())
    proposed = [observation.proposed[row] for row in rows]
    accepted = [observation.accepted[row] for row in rows]
    for arm, counts in observation.shadow.items():
        for row, known, matched in _shadowed(observation, arm, counts):
            if used.get(row) != arm:
                rows.append(row)
                arms.append(arm)
                proposed.append(known)
                accepted.append(matched)
    tested, hits = _chains(np.array(proposed, np.intp), np.array(accepted, np.intp), depth)
    for entry, (row, arm) in enumerate(used.items()):
        if arm in trees:
            _mark_nodes(observation, row, tested[entry], hits[entry])
        elif observation.confidence is not None and _was_trimmed(observation, row):
            values = observation.confidence[row][observation.proposed[row] : depth]
            rates = calibrated(arm, np.clip(np.array(values, dtype=float), 0.0, 1.0))
            _mark_trimmed(observation.proposed[row], rates, tested[entry], hits[entry])
    buckets = _buckets(observation, rows, arms)
    return Evidence(np.array(rows, np.intp), tuple(arms), buckets, tested, hits)


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


def _buckets(observation: Observation, rows: list[int], arms: list[str]) -> IntArray:
    requests = observation.view.requests
    hints = (requests[row].hints.get(arm) for row, arm in zip(rows, arms, strict=True))
    return np.array([0 if hint is None else bucket_of(hint) for hint in hints], dtype=np.intp)


def _shadowed(
    observation: Observation, arm: str, counts: tuple[int | None, ...]
) -> Iterator[tuple[int, int, int]]:
    """(row, known, matched) of a drafter that was scored without being used.

    Only emitted tokens are known: a shadow that matches all of them is censored there.
    """
    requests, emitted = observation.view.requests, observation.emitted
    for row, matched in enumerate(counts):
        if matched is not None:
            hint = requests[row].hints.get(arm)
            limit = NO_LIMIT if hint is None else hint.max_draft_tokens
            known = min(max(emitted[row], matched), NO_LIMIT if limit is None else limit)
            if known > 0:
                yield row, known, min(matched, known)


def _chains(proposed: IntArray, accepted: IntArray, depth: int) -> tuple[FloatArray, FloatArray]:
    """(tested, accepted), both `[entries, depth]`, of chains."""
    columns = np.arange(depth)
    hits = columns < accepted[:, None]
    tested = columns < np.minimum(accepted + 1, proposed)[:, None]
    return tested.astype(float), hits.astype(float)


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


def _mark_trimmed(first: int, rates: FloatArray, tested: FloatArray, accepted: FloatArray) -> None:
    """Tokens drafted and trimmed, from position `first` on: what their confidence says of them."""
    known = rates[: int(np.argmin(np.append(np.isfinite(rates), False)))]
    reached = np.concatenate([[1.0], np.cumprod(known)])[: len(known)]
    tested[first : first + len(known)] = reached
    accepted[first : first + len(known)] = reached * known
