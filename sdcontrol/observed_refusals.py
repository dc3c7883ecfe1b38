"""Why an observation cannot be learnt from, said in full.

`core` calls it while observations are checked. Knows their fields; nothing of who made them.
"""

from collections.abc import Sequence
from contextlib import suppress
from operator import index, le
from typing import TYPE_CHECKING, Never

from sdcontrol.errors import ObservationError
from sdcontrol.refusals import is_whole

if TYPE_CHECKING:
    from sdcontrol.core import Observation, RequestView

__all__ = ["check_observation"]

_COUNTED = ("drafted", "proposed", "accepted", "emitted")
_MOST = 1 << 63  # arrays count to one less


def check_observation(one: "Observation") -> None:
    """Raise `ObservationError` where columns do not follow the view, or cannot have come about.

    There is an entry per request everywhere, `0 <= accepted <= proposed <= drafted`, confidence in all
    tokens drafted or in none, a node of the draft for each accepted token.
    """
    _check_lengths(one)
    _check_texts(one)
    if not _are_counts(one.drafted, one.proposed, one.accepted, one.emitted):
        _check_counts(one)
    for arm, row in one.shadow.items():
        _check_shadow(one, arm, row)
    if one.confidence is not None:
        _check_confidence(one, one.confidence)
    if one.accepted_nodes is not None:
        _check_nodes(one, one.accepted_nodes)
    try:
        _ = one.timing.total_seconds
    except (TypeError, AttributeError) as error:
        raise ObservationError(
            f"{one.timing}: not all of it are seconds; give floats, 0.0 where nothing was "
            "measured, and draft_seconds as a mapping from families"
        ) from error


def _check_lengths(one: "Observation") -> None:
    try:
        num_requests = len(one.view.requests)
        columns = one.plan.choices, one.drafted, one.proposed, one.accepted, one.emitted
        if {*map(len, columns), *map(len, one.shadow.values())} == {num_requests}:
            return
        names = "plan", *_COUNTED, *one.shadow
        for column, name in zip((*columns, *one.shadow.values()), names, strict=True):
            if len(column) != num_requests:
                raise ObservationError(
                    f"{len(column)} entries in {name} for {num_requests} requests; give one each"
                )
    except (TypeError, AttributeError) as error:
        raise ObservationError(
            f"{error}: drafted, proposed, accepted, emitted and each arm's shadow are tuples; "
            "give one entry per request"
        ) from error


def _check_texts(one: "Observation") -> None:
    if not isinstance(one.plan.reason, str):
        raise ObservationError(
            f'reason of the plan is {one.plan.reason!r}; give a string, "" for none'
        )
    if one.faults and not (
        isinstance(one.faults, tuple | list) and all(isinstance(fault, str) for fault in one.faults)
    ):
        raise ObservationError(
            f"faults are {one.faults!r}; give a tuple of strings, as take_faults() returns them"
        )


def _are_counts(
    drafted: Sequence[int], proposed: Sequence[int], accepted: Sequence[int], emitted: Sequence[int]
) -> bool:
    """Whether all are ints that can have come about; False too where it takes a closer look."""
    try:
        total = sum(drafted) + sum(proposed) + sum(accepted) + sum(emitted)
    except TypeError:
        return False
    if type(total) is not int or total >= _MOST:
        return False
    return not accepted or (
        min(accepted) >= 0
        and min(emitted) >= 0
        and all(map(le, accepted, proposed))
        and (proposed == drafted or all(map(le, proposed, drafted)))
    )


def _check_counts(one: "Observation") -> None:
    for name in _COUNTED:
        column = getattr(one, name)
        if not isinstance(column, tuple | list):
            raise ObservationError(
                f"{name} is of type {type(column).__name__}; give a tuple of ints, as "
                "tuple(array.tolist()) makes it"
            )
        for request, count in zip(one.view.requests, column, strict=True):
            if not _is_count(count):
                _refuse_count(name, request, count)
    rows = zip(one.view.requests, one.accepted, one.proposed, one.drafted, strict=True)
    for request, accepted, proposed, drafted in rows:
        if not accepted <= proposed <= drafted:
            raise ObservationError(
                f"request {request.id!r}: {accepted} tokens accepted of {proposed} proposed and "
                f"{drafted} drafted; accepted are at most the proposed ones, and those at most "
                "the drafted ones"
            )


def _check_shadow(one: "Observation", arm: str, row: Sequence[int | None]) -> None:
    with suppress(TypeError):
        if all(type(count) is int and 0 <= count < _MOST for count in {*row} - {None}):
            return
    for request, count in zip(one.view.requests, row, strict=True):
        if count is not None and not _is_count(count):
            _refuse_count(f"shadow of {arm!r}", request, count)


def _check_confidence(one: "Observation", rows: Sequence[Sequence[float]]) -> None:
    lengths = _lengths("confidence", rows, one)
    try:
        float(sum(map(sum, rows)))
    except (TypeError, ValueError) as error:
        raise ObservationError(f"confidence {rows!r}: {error}; give floats") from error
    if lengths == [*one.drafted]:
        return
    for request, length, drafted in zip(one.view.requests, lengths, one.drafted, strict=True):
        if length not in (0, drafted):
            raise ObservationError(
                f"request {request.id!r}: confidence in {length} tokens of {drafted} drafted; "
                "give one for each of them, or none"
            )


def _check_nodes(one: "Observation", rows: Sequence[Sequence[int]]) -> None:
    lengths = _lengths("accepted_nodes", rows, one)
    told = zip(one.view.requests, rows, lengths, one.accepted, one.proposed, strict=True)
    for request, nodes, length, accepted, proposed in told:
        if length != accepted or (nodes and not 0 <= min(nodes) <= max(nodes) < proposed):
            raise ObservationError(
                f"request {request.id!r}: accepted_nodes {nodes} for {accepted} tokens accepted "
                f"of {proposed} proposed; give the index of each, less than {proposed}"
            )


def _lengths(name: str, rows: Sequence[Sequence[object]], one: "Observation") -> list[int]:
    """Of each request's row."""
    try:
        lengths = [*map(len, rows)]
    except TypeError as error:
        raise ObservationError(
            f"{name} {rows!r}: {error}; give a tuple per request, () where there is nothing"
        ) from error
    if len(lengths) != len(one.view.requests):
        raise ObservationError(
            f"{len(lengths)} entries in {name} for {len(one.view.requests)} requests; give one each"
        )
    return lengths


def _is_count(count: object) -> bool:
    return is_whole(count) and 0 <= index(count) < _MOST  # type: ignore[arg-type]  # just asked


def _refuse_count(name: str, request: "RequestView", count: object) -> Never:
    raise ObservationError(
        f"{name} of request {request.id!r} is {count!r}; give a number of tokens in [0, 2**63)"
    )
