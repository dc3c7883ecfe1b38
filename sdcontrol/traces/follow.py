"""One request's way through a trace, step by step, in words.

Knows observations and requests' records; nothing of files or tokens' texts.
"""

import difflib
from collections.abc import Iterable, Iterator
from itertools import chain

from sdcontrol.core import Hint, RequestView
from sdcontrol.errors import UnknownName
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.schema import RecordedStep, RequestRecord

__all__ = ["follow"]


def follow(trace: Trace, request_id: str) -> Iterator[str]:
    """A line per step in which the request decoded.

    Raises `UnknownName` where the trace knows of no such request.
    """
    records = {record.id: record for record in trace.requests()}
    steps = _steps_of(trace, request_id)
    first = next(steps, None)
    if first is None and request_id not in records:
        close = difflib.get_close_matches(request_id, records, n=1, cutoff=0.0)
        nearest = f"did you mean {close[0]!r}?" if close else "it has no requests"
        raise UnknownName(f"{trace.path}: no request {request_id!r}; {nearest}")
    return _lines(records.get(request_id), chain([first] if first else [], steps))


_Place = tuple[int, RecordedStep, int]
"""The place of the step in the trace, the step, the row of the request in it."""


def _steps_of(trace: Trace, request_id: str) -> Iterator[_Place]:
    for place, step in enumerate(trace.steps()):
        for row, request in enumerate(step.observation.view.requests):
            if request.id == request_id:
                yield place, step, row


def _lines(record: RequestRecord | None, steps: Iterable[_Place]) -> Iterator[str]:
    if record is not None:
        yield _arrival(record)
    previous: int | None = None
    for place, step, row in steps:
        if previous is not None and place > previous + 1:
            yield f"not among those decoding for {place - previous - 1} steps"
        yield _line(step, row)
        previous = place
    if record is not None:
        yield _ending(record)


def _arrival(record: RequestRecord) -> str:
    most = "" if record.max_new_tokens is None else f", at most {record.max_new_tokens} to come"
    how = f"temperature {record.temperature:g}" if record.temperature else "greedy"
    return (
        f"request {record.id} arrived at {record.arrival_seconds:.3f} s: "
        f"{record.prompt_tokens} prompt tokens{most}, {how}"
    )


def _line(step: RecordedStep, row: int) -> str:
    observation = step.observation
    view, choice = observation.view, observation.plan.choices[row]
    request = view.requests[row]
    batch = f"{len(view.requests)} requests" + (
        f" and {view.prefill_tokens} prompt tokens" if view.prefill_tokens else ""
    )
    where = (
        f"step {view.step} at {step.start_seconds:.3f} s, {batch}, context {request.context_tokens}"
    )
    reason = f" ({observation.plan.reason})" if observation.plan.reason else ""
    if choice.drafter is None:
        return f"{where}: no draft{_known(request)}{reason}; {observation.emitted[row]} emitted"
    return (
        f"{where}: {choice.num_draft_tokens} by {choice.drafter}{_known(request)}{reason}; "
        f"{observation.drafted[row]} drafted, {observation.proposed[row]} submitted, "
        f"{observation.accepted[row]} accepted, {observation.emitted[row]} emitted"
    )


def _known(request: RequestView) -> str:
    """What drafters knew beforehand."""
    said = [words for arm, hint in request.hints.items() if (words := _hint(arm, hint))]
    return f" [{'; '.join(said)}]" if said else ""


def _hint(arm: str, hint: Hint) -> str:
    facts = [
        "" if hint.match_tokens is None else f"match of {hint.match_tokens}",
        "" if hint.confidence is None else f"confidence {hint.confidence:.2f}",
        "" if hint.max_draft_tokens is None else f"at most {hint.max_draft_tokens}",
        f"{hint.catch_up_tokens} to catch up" if hint.catch_up_tokens else "",
    ]
    said = ", ".join(filter(None, facts))
    return f"{arm}: {said}" if said else ""


def _ending(record: RequestRecord) -> str:
    if record.finish_reason is None:
        return f"had not ended, {record.output_tokens} tokens so far"
    ttft = "" if record.ttft_seconds is None else f", first token after {record.ttft_seconds:.3f} s"
    when = "" if record.end_seconds is None else f" at {record.end_seconds:.3f} s"
    return f"ended{when} ({record.finish_reason}) with {record.output_tokens} tokens{ttft}"
