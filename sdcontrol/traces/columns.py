"""Steps and requests as Arrow tables, and back, bit for bit.

Knows nothing of files. A step is one row; what it says of each request is a list column, of lists where there are
several values. Values are gathered for a whole batch of steps into flat lists first: Arrow takes those fastest.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import accumulate, chain

import pyarrow as pa

from sdcontrol.core import Choice, Observation, Plan
from sdcontrol.traces import schema
from sdcontrol.traces.schema import RecordedStep, Refinement, RequestRecord

__all__ = ["REQUESTS", "STEPS", "requests_table", "steps_table"]

_INT, _FLOAT, _TEXT, _BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()


def _lists(kind: pa.DataType, depth: int = 1) -> pa.DataType:
    return kind if depth == 0 else pa.list_(_lists(kind, depth - 1))


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _optional(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind)


STEPS = pa.schema(
    [
        _required("start_seconds", _FLOAT),
        _required("step", _INT),
        _required("free_kv_tokens", _INT),
        _required("prefill_tokens", _INT),
        # one entry per request
        _required("request_id", _lists(_TEXT)),
        _required("context_tokens", _lists(_INT)),
        _required("generated_tokens", _lists(_INT)),
        _required("remaining_tokens", _lists(_INT)),
        _required("temperature", _lists(_FLOAT)),
        _required("drafters", _lists(_TEXT, 2)),
        _required("hint_arms", _lists(_TEXT, 2)),
        # one entry per hint, in the order of requests and of `hint_arms`
        _required("hint_max_draft_tokens", _lists(_INT)),
        _required("hint_match_tokens", _lists(_INT)),
        _required("hint_confidence", _lists(_FLOAT)),
        _required("hint_catch_up_tokens", _lists(_INT)),
        # the plan of the observation and what came of it, one entry per request
        _required("choice_drafter", _lists(_TEXT)),
        _required("choice_tokens", _lists(_INT)),
        _required("reason", _TEXT),
        _required("drafted", _lists(_INT)),
        _required("proposed", _lists(_INT)),
        _required("accepted", _lists(_INT)),
        _required("emitted", _lists(_INT)),
        _optional("accepted_nodes", _lists(_INT, 2)),
        _optional("confidence", _lists(_FLOAT, 2)),
        _required("shadow_drafters", _lists(_TEXT)),
        _required("shadow", _lists(_INT, 2)),
        _required("draft_families", _lists(_TEXT)),
        _required("draft_seconds", _lists(_FLOAT)),
        _required("verify_seconds", _FLOAT),
        _required("controller_seconds", _FLOAT),
        _required("overhead_seconds", _FLOAT),
        _required("faults", _lists(_TEXT)),
        # what `plan` answered, where that is not the observation's plan
        _required("was_planned", _BOOL),
        _optional("planned_drafter", _lists(_TEXT)),
        _optional("planned_tokens", _lists(_INT)),
        _optional("planned_reason", _TEXT),
        _required("plan_faults", _lists(_TEXT)),
        # one entry per call of `refine`: confidences as counts of the step's own, or as values;
        # null for tokens given as in the observation's plan, and for tokens all kept
        _required("refine_is_prefix", _lists(_BOOL)),
        _required("refine_counts", _lists(_INT, 2)),
        _required("refine_confidence", _lists(_FLOAT, 2)),
        _required("refine_given_tokens", _lists(_INT, 2)),
        _required("refine_kept_tokens", _lists(_INT, 2)),
        _optional(schema.OTHERS_WAIT, _BOOL),
        _optional(schema.SEEN_STEPS, _INT),
        _optional(schema.LAUNCHED_AHEAD, _BOOL),
    ]
)

REQUESTS = pa.schema(
    [
        _required("id", _TEXT),
        _required("arrival_seconds", _FLOAT),
        _required("prompt_tokens", _INT),
        _required("output_tokens", _INT),
        _required("temperature", _FLOAT),
        _optional("max_new_tokens", _INT),
        _optional("seed", _INT),
        _optional("finish_reason", _TEXT),
        _optional("ttft_seconds", _FLOAT),
        _optional("end_seconds", _FLOAT),
        _optional("prompt_ids", _lists(_INT)),
        _optional("output_ids", _lists(_INT)),
    ]
)


def requests_table(records: Sequence[RequestRecord]) -> pa.Table:
    """One row per record, in their order."""
    columns = {f.name: [getattr(r, f.name) for r in records] for f in fields(RequestRecord)}
    return pa.table(columns, schema=REQUESTS)


def steps_table(steps: Sequence[RecordedStep]) -> pa.Table:
    """One row per step, in their order."""
    observations = [step.observation for step in steps]
    columns = {
        "start_seconds": pa.array([step.start_seconds for step in steps], _FLOAT),
        **_view_columns(observations),
        **_outcome_columns(observations),
        **_timing_columns(observations),
        **_planned_columns(steps),
        **_refinement_columns(steps),
    }
    return pa.table([columns[name] for name in STEPS.names], schema=STEPS)


def _view_columns(observations: Sequence[Observation]) -> dict[str, pa.Array]:
    views = [observation.view for observation in observations]
    requests = [request for view in views for request in view.requests]
    ends = _ends(len(view.requests) for view in views)
    hints = [hint for request in requests for hint in request.hints.values()]
    hint_ends = _ends(sum([len(r.hints) for r in view.requests]) for view in views)

    def per_request(values: Iterable[object], kind: pa.DataType) -> pa.Array:
        return _list_array(ends, pa.array(values, kind))

    return {
        "step": pa.array([view.step for view in views], _INT),
        "free_kv_tokens": pa.array([view.free_kv_tokens for view in views], _INT),
        "prefill_tokens": pa.array([view.prefill_tokens for view in views], _INT),
        schema.OTHERS_WAIT: pa.array([view.others_wait for view in views], _BOOL),
        "request_id": _list_array(ends, _interned([r.id for r in requests], _TEXT)),
        "context_tokens": per_request([r.context_tokens for r in requests], _INT),
        "generated_tokens": per_request([r.generated_tokens for r in requests], _INT),
        "remaining_tokens": per_request([r.remaining_tokens for r in requests], _INT),
        "temperature": per_request([r.temperature for r in requests], _FLOAT),
        "drafters": _list_array(ends, _interned([r.drafters for r in requests], _lists(_TEXT))),
        "hint_arms": _list_array(
            ends, _interned([tuple(r.hints) for r in requests], _lists(_TEXT))
        ),
        "hint_max_draft_tokens": _list_array(
            hint_ends, pa.array([hint.max_draft_tokens for hint in hints], _INT)
        ),
        "hint_match_tokens": _list_array(
            hint_ends, pa.array([hint.match_tokens for hint in hints], _INT)
        ),
        "hint_confidence": _list_array(
            hint_ends, pa.array([hint.confidence for hint in hints], _FLOAT)
        ),
        "hint_catch_up_tokens": _list_array(
            hint_ends, pa.array([hint.catch_up_tokens for hint in hints], _INT)
        ),
    }


def _outcome_columns(observations: Sequence[Observation]) -> dict[str, pa.Array]:
    choices = [choice for o in observations for choice in o.plan.choices]
    ends = _ends(len(o.plan.choices) for o in observations)

    def counts(read: Callable[[Observation], Iterable[int]]) -> pa.Array:
        values = list(chain.from_iterable(map(read, observations)))
        return _list_array(ends, pa.array(values, _INT))

    return {
        "choice_drafter": _list_array(ends, _interned([c.drafter for c in choices], _TEXT)),
        "choice_tokens": _list_array(ends, pa.array([c.num_draft_tokens for c in choices], _INT)),
        "reason": pa.array([o.plan.reason for o in observations], _TEXT),
        "drafted": counts(lambda o: o.drafted),
        "proposed": counts(lambda o: o.proposed),
        "accepted": counts(lambda o: o.accepted),
        "emitted": counts(lambda o: o.emitted),
        "accepted_nodes": _nested([o.accepted_nodes for o in observations], _INT),
        "confidence": _nested([o.confidence for o in observations], _FLOAT),
        "shadow_drafters": _listed([tuple(o.shadow) for o in observations], _TEXT),
        "shadow": _nested([tuple(o.shadow.values()) for o in observations], _INT),
    }


def _timing_columns(observations: Sequence[Observation]) -> dict[str, pa.Array]:
    timings = [observation.timing for observation in observations]
    return {
        "draft_families": _listed([tuple(t.draft_seconds) for t in timings], _TEXT),
        "draft_seconds": _listed([tuple(t.draft_seconds.values()) for t in timings], _FLOAT),
        "verify_seconds": pa.array([t.verify_seconds for t in timings], _FLOAT),
        "controller_seconds": pa.array([t.controller_seconds for t in timings], _FLOAT),
        "overhead_seconds": pa.array([t.overhead_seconds for t in timings], _FLOAT),
        "faults": _listed([o.faults for o in observations], _TEXT),
        schema.LAUNCHED_AHEAD: pa.array([o.launched_ahead for o in observations], _BOOL),
    }


def _planned_columns(steps: Sequence[RecordedStep]) -> dict[str, pa.Array]:
    plans = [_other_plan(step) for step in steps]
    choices = [None if plan is None else plan.choices for plan in plans]
    drafters = [row if row is None else [choice.drafter for choice in row] for row in choices]
    tokens = [row if row is None else _tokens(row) for row in choices]
    return {
        "was_planned": pa.array([step.planned is not None for step in steps], _BOOL),
        "planned_drafter": _listed(drafters, _TEXT),
        "planned_tokens": _listed(tokens, _INT),
        "planned_reason": pa.array([plan and plan.reason for plan in plans], _TEXT),
        "plan_faults": _listed([step.plan_faults for step in steps], _TEXT),
        schema.SEEN_STEPS: pa.array([step.seen_steps for step in steps], _INT),
    }


def _other_plan(step: RecordedStep) -> Plan | None:
    """What was planned, where the observation holds another plan."""
    plan = step.observation.plan
    return None if step.planned is plan or step.planned == plan else step.planned


def _tokens(choices: Sequence[Choice]) -> tuple[int, ...]:
    return tuple([choice.num_draft_tokens for choice in choices])


def _refinement_columns(steps: Sequence[RecordedStep]) -> dict[str, pa.Array]:
    """Calls of `refine`. Most are given the plan, see the beginnings of the confidences that the
    observation ends with, and drop nothing: then the lengths of those beginnings say it all.
    """
    calls = [call for step in steps for call in step.refinements]
    planned = [_tokens(step.observation.plan.choices) for step in steps for _ in step.refinements]
    known = [_is_prefix(call, step.observation) for step in steps for call in step.refinements]
    counts = [[len(row) for row in call.confidence] for call in calls]
    values = [
        () if is_prefix else tuple(chain.from_iterable(call.confidence))
        for call, is_prefix in zip(calls, known, strict=True)
    ]
    given = [
        None if call.given_tokens == tokens else call.given_tokens
        for call, tokens in zip(calls, planned, strict=True)
    ]
    kept = [None if c.kept_tokens == c.given_tokens else c.kept_tokens for c in calls]
    ends = _ends(len(step.refinements) for step in steps)
    return {
        "refine_is_prefix": _list_array(ends, pa.array(known, _BOOL)),
        "refine_counts": _list_array(ends, _listed(counts, _INT)),
        "refine_confidence": _list_array(ends, _listed(values, _FLOAT)),
        "refine_given_tokens": _list_array(ends, _listed(given, _INT)),
        "refine_kept_tokens": _list_array(ends, _listed(kept, _INT)),
    }


def _is_prefix(call: Refinement, observation: Observation) -> bool:
    final = observation.confidence
    if final is None or len(final) != len(call.confidence):
        return False
    pairs = zip(call.confidence, final, strict=True)
    return all(not row or row == known[: len(row)] for row, known in pairs)


# ---- arrays


def _ends(lengths: Iterable[int]) -> pa.Array:
    return pa.array([0, *accumulate(lengths)], pa.int32())


def _list_array(ends: pa.Array, values: pa.Array, mask: pa.Array | None = None) -> pa.Array:
    return pa.ListArray.from_arrays(ends, values, mask=mask)


def _interned(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """An array of few distinct values, each converted once."""
    index: dict[object, int] = {}
    places = [index.setdefault(value, len(index)) for value in values]
    return pa.array(list(index), kind).take(pa.array(places, pa.int32()))


def _listed(rows: Sequence[Sequence[object] | None], kind: pa.DataType) -> pa.Array:
    """One list per row; a null for None."""
    values = [value for row in rows if row for value in row]
    return _cut(rows, pa.array(values, kind))


def _nested(
    rows: Sequence[Sequence[Sequence[object] | None] | None], kind: pa.DataType
) -> pa.Array:
    """One list of lists per row; a null for None."""
    values = [value for row in rows if row for value in row]
    return _cut(rows, _listed(values, kind))


def _cut(rows: Sequence[Sequence[object] | None], values: pa.Array) -> pa.Array:
    """`values` as one list per row."""
    ends = _ends(len(row) if row else 0 for row in rows)
    if None not in rows:
        return _list_array(ends, values)
    return _list_array(ends, values, pa.array([row is None for row in rows], _BOOL))
