"""Several steps as one: what learns row by row learns them all in one call.

Knows observations only; nothing of what is learnt from them.
"""

from collections.abc import Sequence
from itertools import chain

from sdcontrol.core import BatchView, Confidence, Observation, Plan

__all__ = ["merged", "typical"]

_MOST_ALIKE = 7  # steps, of which one is typical; after a change of speed most are soon new


def merged(observations: Sequence[Observation]) -> Observation:
    """One observation with the requests of all, in order: one that took part in several comes often.

    Step, timing and faults are those of the last.
    """
    last = observations[-1]
    if len(observations) == 1:
        return last
    requests = tuple([request for one in observations for request in one.view.requests])
    return Observation(
        BatchView(last.view.step, requests, last.view.free_kv_tokens, last.view.prefill_tokens),
        Plan(tuple([choice for one in observations for choice in one.plan.choices])),
        tuple([n for one in observations for n in one.drafted]),
        tuple([n for one in observations for n in one.proposed]),
        tuple([n for one in observations for n in one.accepted]),
        tuple([n for one in observations for n in one.emitted]),
        last.timing,
        _nodes(observations),
        _confidences(observations),
        _shadows(observations),
        last.faults,
    )


def typical(observations: Sequence[Observation]) -> Observation:
    """Of the last few that did as much work as the very last one, that of median time."""
    work = [(sum(one.drafted), sum(one.proposed)) for one in observations]
    alike = [one for one, done in zip(observations, work, strict=True) if done == work[-1]]
    recent = sorted(alike[-_MOST_ALIKE:], key=_seconds)
    return recent[(len(recent) - 1) // 2]


def _seconds(observation: Observation) -> float:
    return observation.timing.verify_seconds


def _nodes(observations: Sequence[Observation]) -> tuple[tuple[int, ...], ...] | None:
    """Of the accepted paths; those of chains are spelt out beside trees."""
    paths = [one.accepted_nodes for one in observations]
    if paths.count(None) == len(paths):
        return None
    rows = zip(observations, paths, strict=True)
    spelt = [
        map(tuple, map(range, one.accepted)) if nodes is None else nodes for one, nodes in rows
    ]
    return tuple(chain.from_iterable(spelt))


def _confidences(observations: Sequence[Observation]) -> Confidence | None:
    said = [one.confidence for one in observations]
    if said.count(None) == len(said):
        return None
    rows = zip(observations, said, strict=True)
    silent = [((),) * len(one.accepted) if said is None else said for one, said in rows]
    return tuple(chain.from_iterable(silent))


def _shadows(observations: Sequence[Observation]) -> dict[str, tuple[int | None, ...]]:
    """By arm; nobody knows of the steps in which it was not scored."""
    arms = dict.fromkeys([arm for one in observations for arm in one.shadow])
    return {
        arm: tuple(
            chain.from_iterable(
                [one.shadow.get(arm) or (None,) * len(one.accepted) for one in observations]
            )
        )
        for arm in arms
    }
