"""Why a value of the vocabulary cannot be used, said in full.

`core` calls it while values are made or plans checked. Knows their fields; nothing of who made them.
`observed_refusals` says it of observations.
"""

from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Never

from sdcontrol.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from sdcontrol.core import BatchView, Choice, Hint, Plan, RequestView

__all__ = [
    "check_answer",
    "check_hint",
    "check_request",
    "check_view",
    "is_whole",
    "refuse_choice",
    "whole_tokens",
]

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
    if not is_whole(num_draft_tokens):
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
    """Make numbers ints and a float, a list of drafters a tuple; `ConfigError` for anything else.

    There are many requests: what is right is not looked at twice.
    """
    context, generated, remaining = one.context_tokens, one.generated_tokens, one.remaining_tokens
    is_counted = type(context) is type(generated) is type(remaining) is int
    is_small = is_counted and context + generated + abs(remaining) < _MOST_TOKENS
    is_plain = type(one.temperature) is float and type(one.drafters) is tuple
    if is_small and is_plain and type(one.id) is str:
        for hint in one.hints.values() if type(one.hints) is dict else _UNKNOWN:
            if type(hint) is not kind:
                break
        else:
            return
    for name in _OF_REQUEST:
        _make_whole(one, name, f"{name} of request {one.id!r}", 62)
    _make_float(one, "temperature", f"temperature of request {one.id!r}", "0.0 where it is greedy")
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
    if not is_whole(count):
        raise ConfigError(f"{what} is {count!r}; give a whole number, as int(...) makes it")
    if not -(1 << most_bits) <= index(count) < 1 << most_bits:
        raise ConfigError(f"{what} is {count}; give less than 2**{most_bits}")
    object.__setattr__(one, name, index(count))


def _make_float(one: object, name: str, what: str, nothing: str) -> None:
    number = getattr(one, name)
    try:
        object.__setattr__(one, name, float(number + 0.0))  # a text is not added to
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is {number!r}; give a number, {nothing}") from error


def _check_kinds(one: "RequestView") -> None:
    for name, kind, remedy in _KINDS:
        if not isinstance(getattr(one, name), kind):
            raise ConfigError(
                f"{name} of request {one.id!r}: {getattr(one, name)!r}; give {remedy}"
            )


def check_answer(plan: "Plan", kind: type["Choice"], num_requests: int) -> None:
    """Raise `PlanError` unless it is as many choices as requests, in a tuple, and a text why."""
    choices = plan.choices
    if not isinstance(choices, tuple) or {*map(type, choices)} - {kind}:
        raise PlanError(f"choices {choices!r}; give a tuple of Choice, as Choice.of makes them")
    if len(choices) != num_requests:
        raise PlanError(
            f"plan has {len(choices)} choices for {num_requests} requests; "
            "give one per request of the view, in its order"
        )
    if not isinstance(plan.reason, str):
        raise PlanError(f'reason of the plan is {plan.reason!r}; give a string, "" for none')


def check_hint(one: "Hint") -> None:
    """Make numbers ints and a float; `ConfigError` for what is none. There are many: see `check_request`."""
    most, match, lag = one.max_draft_tokens, one.match_tokens, one.catch_up_tokens
    if one.confidence is not None and type(one.confidence) is not float:
        _make_float(one, "confidence", f"confidence of {one}", "or None where nothing is known")
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
        if not (is_whole(count) and index(count) < _MOST_TOKENS):
            nothing = "0 where a drafter is ready" if name == "catch_up_tokens" else "or None"
            raise ConfigError(f"{name} of {one}; give a whole number below 2**62, {nothing}")
        object.__setattr__(one, name, index(count))


def is_whole(count: object) -> bool:
    """Whether it is a whole number of any type, but no truth value."""
    try:
        index(count)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return not isinstance(count, bool)
