"""Why a value of the vocabulary cannot be used, said in full.

`core` calls it while values are made or checked. Knows their fields; nothing of who made them.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import index, le
from typing import TYPE_CHECKING, Never

from sdcontrol.errors import ConfigError, ObservationError, PlanError

if TYPE_CHECKING:
    from sdcontrol.core import BatchView, Choice, Hint, Observation, RequestView

__all__ = [
    "check_choices",
    "check_hint",
    "check_observation",
    "check_request",
    "check_view",
    "refuse_choice",
    "whole_tokens",
]

_COUNTED = ("drafted", "proposed", "accepted", "emitted")
_OF_REQUEST = ("context_tokens", "generated_tokens", "remaining_tokens")
_OF_VIEW = ("step", "free_kv_tokens", "prefill_tokens")
_OF_HINT = ("max_draft_tokens", "match_tokens", "catch_up_tokens")
_MOST = 1 << 63  # arrays count to one less
_MOST_TOKENS = 1 << 62  # of a request: read as floats, which round up to more than arrays count to
_KINDS = (
    ("id", str, "a string, as str(...) makes it"),
    ("drafters", tuple | list, 'a tuple of names, ("ngram",) for one and () for none'),
    ("hints", Mapping, "a mapping from drafters to Hints, {} where nothing is known"),
)
_UNKNOWN = (None,)  # hints that are in no dict: they are looked at closely


def whole_tokens(drafter: str | None, num_draft_tokens: object) -> int:
    """Any whole number as an int; `PlanError` for what is none, truth values included."""
    if not _is_whole(num_draft_tokens):
        raise PlanError(
            f"choice of {num_draft_tokens!r} draft tokens by {drafter!r}: they are counted; "
            "give a whole number, as int(...) makes it"
        )
    return index(num_draft_tokens)  # type: ignore[arg-type]  # just asked


def refuse_choice(request: "RequestView", choice: "Choice") -> Never:
    """Raise what is wrong with a choice that is impossible for its request."""
    if choice.drafter not in request.drafters:
        raise PlanError(
            f"request {request.id!r} may not use drafter {choice.drafter!r} now; "
            f"it may use {list(request.drafters)}"
        )
    raise PlanError(
        f"request {request.id!r}: {choice.num_draft_tokens} draft tokens, but only "
        f"{request.remaining_tokens} tokens remain; draft at most one less than that"
    )


def check_request(one: "RequestView", kind: type["Hint"]) -> None:
    """Make whole numbers ints and a list of drafters a tuple; `ConfigError` for anything else.

    There are many requests: what is right is not looked at twice.
    """
    context, generated, remaining = one.context_tokens, one.generated_tokens, one.remaining_tokens
    is_counted = type(context) is type(generated) is type(remaining) is int
    is_small = is_counted and context + generated + abs(remaining) < _MOST_TOKENS
    if is_small and type(one.drafters) is tuple and type(one.id) is str:
        for hint in one.hints.values() if type(one.hints) is dict else _UNKNOWN:
            if type(hint) is not kind:
                break
        else:
            return
    for name in _OF_REQUEST:
        _make_whole(one, name, f"{name} of request {one.id!r}", 62)
    _check_kinds(one)
    object.__setattr__(one, "drafters", tuple(one.drafters))
    if {*map(type, one.hints.values())} - {kind}:
        raise ConfigError(
            f"hints of request {one.id!r}: {dict(one.hints)}; each is a Hint: leave out the drafters "
            "of which nothing is known"
        )


def check_view(one: "BatchView", kind: type["RequestView"]) -> None:
    """Make whole numbers ints and a list of requests a tuple; `ConfigError` for anything else."""
    step, free, prefill = one.step, one.free_kv_tokens, one.prefill_tokens
    is_counted = type(step) is type(free) is type(prefill) is int
    is_known = type(one.requests) is tuple and not {*map(type, one.requests)} - {kind}
    if is_counted and is_known and abs(step) + abs(free) + prefill < _MOST:
        return
    for name in _OF_VIEW:
        _make_whole(one, name, name)
    if not isinstance(one.requests, tuple | list) or {*map(type, one.requests)} - {kind}:
        raise ConfigError(
            f"requests of step {one.step}: {one.requests!r}; give a tuple of RequestView, () where "
            "nobody decodes"
        )
    object.__setattr__(one, "requests", tuple(one.requests))


def _make_whole(one: object, name: str, what: str, most_bits: int = 63) -> None:
    count = getattr(one, name)
    if not _is_whole(count):
        raise ConfigError(f"{what} is {count!r}; give a whole number, as int(...) makes it")
    if not -(1 << most_bits) <= index(count) < 1 << most_bits:
        raise ConfigError(f"{what} is {count}; give less than 2**{most_bits}")
    object.__setattr__(one, name, index(count))


def _check_kinds(one: "RequestView") -> None:
    for name, kind, remedy in _KINDS:
        if not isinstance(getattr(one, name), kind):
            raise ConfigError(
                f"{name} of request {one.id!r}: {getattr(one, name)!r}; give {remedy}"
            )


def check_choices(choices: object, kind: type["Choice"], num_requests: int) -> None:
    """Raise `PlanError` unless these are as many choices as requests, in a tuple."""
    if not isinstance(choices, tuple) or {*map(type, choices)} - {kind}:
        raise PlanError(f"choices {choices!r}; give a tuple of Choice, as Choice.of makes them")
    if len(choices) != num_requests:
        raise PlanError(
            f"plan has {len(choices)} choices for {num_requests} requests; "
            "give one per request of the view, in its order"
        )


def check_hint(one: "Hint") -> None:
    """Make whole numbers ints; `ConfigError` for counts that are none. There are many: see `check_request`."""
    most, match, lag = one.max_draft_tokens, one.match_tokens, one.catch_up_tokens
    try:
        total = lag + (most or 0) + (match or 0)
    except TypeError:
        total = None
    if type(total) is int and total < _MOST_TOKENS:
        return
    for name in _OF_HINT:
        count = getattr(one, name)
        if count is None and name != "catch_up_tokens":
            continue
        if not (_is_whole(count) and index(count) < _MOST_TOKENS):
            nothing = "0 where a drafter is ready" if name == "catch_up_tokens" else "or None"
            raise ConfigError(f"{name} of {one}; give a whole number below 2**62, {nothing}")
        object.__setattr__(one, name, index(count))


def check_observation(one: "Observation") -> None:
    """Raise `ObservationError` where columns do not follow the view, or cannot have come about.

    There is an entry per request everywhere, `0 <= accepted <= proposed <= drafted`, confidence in all
    tokens drafted or in none, a node of the draft for each accepted token.
    """
    _check_lengths(one)
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


def _is_whole(count: object) -> bool:
    try:
        index(count)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return not isinstance(count, bool)


def _is_count(count: object) -> bool:
    return _is_whole(count) and 0 <= index(count) < _MOST  # type: ignore[arg-type]  # just asked


def _refuse_count(name: str, request: "RequestView", count: object) -> Never:
    raise ObservationError(
        f"{name} of request {request.id!r} is {count!r}; give a number of tokens in [0, 2**63)"
    )
