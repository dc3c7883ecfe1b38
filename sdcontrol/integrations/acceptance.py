"""The acceptance table of a finished recording: computed by the engine, kept with the trace.

Knows what was decoded and where its trace stands; nothing of how acceptance is computed or written.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from sdcontrol.engine.acceptance_rollouts import acceptance_outcomes
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.request import Request
from sdcontrol.traces.acceptance_table import TABLE_NAME, AcceptanceTableWriter, TableHeader
from sdcontrol.traces.header import read_header
from sdcontrol.traces.writer import add_file

__all__ = ["add_acceptance_table"]


def add_acceptance_table(
    folder: Path,
    model: PreTrainedModel,
    drafters: Sequence[DrafterSpec],
    requests: Sequence[Request],
    *,
    config: EngineConfig | None = None,
    on_request: Callable[[], None] = lambda: None,
) -> None:
    """Compute the table of `requests`, which the closed trace in `folder` is of, and add it.

    `requests` were decoded by an engine with these `drafters` under coupled verification.
    `on_request` is called as each is done. Raises `TraceError` where it cannot be written.
    """
    header = read_header(folder)
    facts = TableHeader(arms=header.drafters, verification="coupled", trace_id=header.trace_id)
    num_rows = 0
    with AcceptanceTableWriter(folder / TABLE_NAME, facts) as table:
        for name, outcomes in acceptance_outcomes(model, drafters, requests, config=config):
            table.add(name, outcomes)
            num_rows += len(outcomes)
            on_request()
    add_file(folder, TABLE_NAME, rows=num_rows)
