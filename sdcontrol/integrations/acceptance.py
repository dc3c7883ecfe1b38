"""The acceptance table of a finished recording: computed by the engine, kept with the trace.

Knows what was decoded and where its trace stands; nothing of how acceptance is computed or written.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from sdcontrol.engine.acceptance_rollouts import acceptance_outcomes
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpecs
from sdcontrol.engine.request import Request
from sdcontrol.errors import TraceError
from sdcontrol.integrations.settings import arms_of
from sdcontrol.outcomes import DEPTH, MOST_DEPTH
from sdcontrol.traces.acceptance_table import TABLE_NAME, AcceptanceTableWriter, TableHeader
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.schema import RequestRecord
from sdcontrol.traces.writer import add_file

__all__ = ["add_acceptance_table"]


def add_acceptance_table(
    folder: Path,
    model: PreTrainedModel,
    drafters: DrafterSpecs,
    requests: Sequence[Request],
    *,
    config: EngineConfig | None = None,
    on_request: Callable[[], None] = lambda: None,
) -> None:
    """Compute the table of `requests`, which the closed trace in `folder` is of, and add it.

    `requests` were decoded by an engine under coupled verification, or greedily under rejection: all of the
    trace that have output, in any order. The table has the arms of `drafters`. `on_request` is called as each is done.
    Raises `TraceError` where the trace is of other requests, has a table, is not closed, or cannot be written,
    and `ConfigError` as `acceptance_outcomes` does; nothing is computed or changed then.
    """
    trace = Trace(folder)
    _check_is_open(trace)
    _check_are_recorded(trace, requests)
    facts = TableHeader(
        arms=tuple(arms_of(drafters)),
        verification="coupled",
        trace_id=trace.header.trace_id,
        depth=_depth(trace),
    )
    num_rows = 0
    with AcceptanceTableWriter(folder / TABLE_NAME, facts) as table:
        for name, outcomes in acceptance_outcomes(
            model,
            drafters,
            requests,
            config=config,
            depth=facts.depth,
            allow_trees=trace.header.verification != "rejection",
        ):
            table.add(name, outcomes)
            num_rows += len(outcomes)
            on_request()
    add_file(folder, TABLE_NAME, rows=num_rows)


def _depth(trace: Trace) -> int:
    """As long as drafts of the recorded controller may be, as far as a table goes: replays plan as long ones."""
    controller = trace.header.controller
    return DEPTH if controller is None else min(max(DEPTH, controller.max_draft_tokens), MOST_DEPTH)


def _check_is_open(trace: Trace) -> None:
    """To a table."""
    if not trace.is_complete:
        raise TraceError(f"{trace.path}: {trace.cut}; close the recorder before a table is added")
    if TABLE_NAME in trace.header.files:
        raise TraceError(
            f"{trace.path} has an acceptance table already; use that, or record into a new folder"
        )


def _check_are_recorded(trace: Trace, requests: Sequence[Request]) -> None:
    """Whether these are the requests of the trace, all that have output."""
    records = {record.id: record for record in trace.requests()}
    if len(records) < trace.num_requests:
        raise TraceError(
            f"{trace.path} has {trace.num_requests} requests under {len(records)} ids, and a table goes "
            "by id; record with an id of its own for every request"
        )
    strangers = [r.id for r in requests if r.id not in records or not _is_of(records[r.id], r)]
    if strangers:
        raise TraceError(
            f"{len(strangers)} of {len(requests)} requests are not those recorded in {trace.path}, "
            f"{strangers[0]!r} first: there is none of that id with as many tokens, and the same ones "
            "where they are kept; give the requests of this recording"
        )
    missing = {name for name, record in records.items() if record.output_tokens}
    missing -= {request.id for request in requests}
    if missing:
        raise TraceError(
            f"{len(missing)} of {len(records)} requests recorded in {trace.path} are missing, "
            f"{min(missing)!r} for one; give every request that has output"
        )


def _is_of(record: RequestRecord, request: Request) -> bool:
    prompt, output = request.tokens[: request.prompt_tokens], request.output
    return (
        (record.prompt_tokens, record.output_tokens) == (len(prompt), len(output))
        and record.prompt_ids in (None, tuple(prompt))
        and record.output_ids in (None, tuple(output))
    )
