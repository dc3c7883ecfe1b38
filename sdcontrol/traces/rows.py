"""Recorded steps and requests from the columns that `columns` made of them.

Whatever does not fit together (a list that is too short, a choice that cannot be) raises: a table
that was damaged or forged makes no steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pyarrow as pa

from sdcontrol.core import (
    BatchView,
    Choice,
    Confidence,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
)
from sdcontrol.errors import TraceError
from sdcontrol.traces.schema import (
    LAUNCHED_AHEAD,
    OTHERS_WAIT,
    SEEN_STEPS,
    RecordedStep,
    Refinement,
    RequestRecord,
    check_rows,
)

__all__ = ["read_requests", "read_steps"]

_Row = dict[str, Any]  # a value per column


def read_requests(table: pa.Table) -> list[RequestRecord]:
    """One record per row."""
    columns = {field.name: _values(_whole(table[field.name])) for field in fields(RequestRecord)}
    return [
        RequestRecord(**dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]


def read_steps(table: pa.Table) -> Iterator[RecordedStep]:
    """One step per row. Raises `ValueError` or `SdcontrolError` where the columns disagree."""
    columns = [_values(_whole(column)) for column in table.columns]
    names = table.column_names
    for values in zip(*columns, strict=True):
        yield _step(dict(zip(names, values, strict=True)))


def _step(row: _Row) -> RecordedStep:
    observation = _observation(row)
    step = RecordedStep(
        observation=observation,
        start_seconds=row["start_seconds"],
        planned=_planned(row, observation.plan),
        plan_faults=row["plan_faults"],
        refinements=tuple(_refinements(row, observation.confidence or ())),
        seen_steps=row.get(SEEN_STEPS),
    )
    try:
        check_rows(step)
    except TraceError as error:
        raise ValueError(str(error)) from error  # the caller knows of which file
    return step


def _observation(row: _Row) -> Observation:
    return Observation(
        view=BatchView(
            step=row["step"],
            requests=tuple(_requests(row)),
            free_kv_tokens=row["free_kv_tokens"],
            prefill_tokens=row["prefill_tokens"],
            others_wait=bool(row.get(OTHERS_WAIT)),
        ),
        plan=Plan(_choices(row["choice_drafter"], row["choice_tokens"]), row["reason"]),
        drafted=row["drafted"],
        proposed=row["proposed"],
        accepted=row["accepted"],
        emitted=row["emitted"],
        timing=Timing(
            dict(zip(row["draft_families"], row["draft_seconds"], strict=True)),
            row["verify_seconds"],
            row["controller_seconds"],
            row["overhead_seconds"],
        ),
        accepted_nodes=row["accepted_nodes"],
        confidence=row["confidence"],
        shadow=dict(zip(row["shadow_drafters"], row["shadow"], strict=True)),
        faults=row["faults"],
        launched_ahead=bool(row.get(LAUNCHED_AHEAD)),
    )


def _requests(row: _Row) -> Iterator[RequestView]:
    hints = zip(
        row["hint_max_draft_tokens"],
        row["hint_match_tokens"],
        row["hint_confidence"],
        row["hint_catch_up_tokens"],
        strict=True,
    )
    facts = zip(
        row["request_id"],
        row["context_tokens"],
        row["generated_tokens"],
        row["remaining_tokens"],
        row["temperature"],
        row["drafters"],
        row["hint_arms"],
        strict=True,
    )
    for name, context, generated, remaining, temperature, drafters, arms in facts:
        own = {arm: Hint(*values) for arm, values in zip(arms, hints, strict=False)}
        if len(own) < len(arms):
            raise ValueError("fewer hints than arms that have one")
        yield RequestView(name, context, generated, remaining, temperature, drafters, own)
    if next(hints, None) is not None:
        raise ValueError("more hints than arms that have one")


def _choices(drafters: Sequence[str | None], tokens: Sequence[int]) -> tuple[Choice, ...]:
    return tuple(
        Choice(None, count) if drafter is None else Choice.of(drafter, count)
        for drafter, count in zip(drafters, tokens, strict=True)
    )


def _planned(row: _Row, plan: Plan) -> Plan | None:
    if not row["was_planned"]:
        return None
    if row["planned_tokens"] is None:
        return plan
    return Plan(_choices(row["planned_drafter"], row["planned_tokens"]), row["planned_reason"])


def _refinements(row: _Row, final: Confidence) -> Iterator[Refinement]:
    calls = zip(
        row["refine_is_prefix"],
        row["refine_counts"],
        row["refine_confidence"],
        row["refine_given_tokens"],
        row["refine_kept_tokens"],
        strict=True,
    )
    for is_prefix, counts, values, given, kept in calls:
        confidence = _beginnings(final, counts) if is_prefix else _split(values, counts)
        given_tokens = row["choice_tokens"] if given is None else given
        yield Refinement(confidence, given_tokens, given_tokens if kept is None else kept)


def _beginnings(final: Confidence, counts: Sequence[int]) -> Confidence:
    rows = tuple(row[:count] for row, count in zip(final, counts, strict=True))
    if [len(row) for row in rows] != list(counts):
        raise ValueError("a refinement saw more confidences than the step has")
    return rows


def _split(values: Sequence[float], counts: Sequence[int]) -> Confidence:
    if sum(counts) != len(values) or min(counts, default=0) < 0:
        raise ValueError("a refinement's confidences are not as many as it counts")
    remaining = iter(values)
    return tuple(tuple(next(remaining) for _ in range(count)) for count in counts)


# ---- arrays


def _whole(column: pa.ChunkedArray) -> pa.Array:
    chunks = column.combine_chunks()
    return chunks.combine_chunks() if isinstance(chunks, pa.ChunkedArray) else chunks


def _values(array: pa.Array) -> list[Any]:
    """The entries of an array: numbers, texts, None for nulls; tuples of these for lists."""
    if not pa.types.is_list(array.type):
        is_plain = array.null_count == 0 and pa.types.is_primitive(array.type)
        values: list[Any] = (
            array.to_numpy(zero_copy_only=False).tolist() if is_plain else array.to_pylist()
        )
        return values
    values = _values(array.values)
    rows: list[Any] = [
        tuple(values[start:end]) for start, end in pairwise(array.offsets.to_numpy().tolist())
    ]
    if array.null_count:
        present = array.is_valid().to_numpy(zero_copy_only=False).tolist()
        rows = [row if is_there else None for row, is_there in zip(rows, present, strict=True)]
    return rows
