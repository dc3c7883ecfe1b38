"""Several steps as one: what is said of all their requests, in order; and which of them is typical.

Knows observations only; nothing of what is learnt from them.
"""

from collections.abc import Sequence
from itertools import chain

from sdcontrol.core import Confidence, Observation

__all__ = ["accepted_nodes", "confidences", "typical"]

_MOST_ALIKE = 7  # steps, of which one is typical; after a change of speed most are soon new


def typical(observations: Sequence[Observation]) -> Observation:
    """Of the last few that did as much work as the very last one, that of median time."""
    last = observations[-1]
    work = sum(last.drafted), sum(last.proposed)
    alike = [one for one in observations if (sum(one.drafted), sum(one.proposed)) == work]
    recent = sorted(alike[-_MOST_ALIKE:], key=_seconds)
    return recent[(len(recent) - 1) // 2]


def _seconds(observation: Observation) -> float:
    return observation.timing.verify_seconds


def accepted_nodes(observations: Sequence[Observation]) -> list[Sequence[int]]:
    """Of the accepted paths, by request; those of chains are spelt out."""
    spelt = [
        map(range, one.accepted) if one.accepted_nodes is None else one.accepted_nodes
        for one in observations
    ]
    return list(chain.from_iterable(spelt))


def confidences(observations: Sequence[Observation]) -> Confidence | None:
    """By request; None where none was said."""
    said = [one.confidence for one in observations]
    if said.count(None) == len(said):
        return None
    rows = zip(observations, said, strict=True)
    silent = [((),) * len(one.accepted) if said is None else said for one, said in rows]
    return tuple(chain.from_iterable(silent))
