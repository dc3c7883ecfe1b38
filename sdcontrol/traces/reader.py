"""Read a trace, finished or cut short, in bounded memory.

    trace = Trace("runs/monday")
    for step in trace.steps():
        ...

Opening checks every file against its digest; whatever is damaged, moved or lost is a `TraceError`.
A trace whose recording was not closed is read up to its last part, and `cut` says so.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from sdcontrol.extras import needed

with needed():
    import pyarrow as pa
    import pyarrow.parquet as pq

from sdcontrol.core import Observation
from sdcontrol.errors import TraceError
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.traces.columns import REQUESTS, STEPS
from sdcontrol.traces.header import read_header
from sdcontrol.traces.parts import Part, digest_of, find_parts, open_table, reading
from sdcontrol.traces.rows import read_requests, read_steps
from sdcontrol.traces.schema import RecordedStep, RequestRecord, TraceHeader
from sdcontrol.traces.writer import PARTS

__all__ = ["Trace"]

_BATCH_STEPS = 128
_SCHEMAS = {"steps": STEPS, "requests": REQUESTS}


class Trace:
    """A recorded run in a folder. Raises `TraceError` where it cannot be trusted."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.header: TraceHeader = read_header(self.path)
        self.cut = "" if self.header.is_complete else "the recording was not closed"
        self._files = {name: self._find(name) for name in _SCHEMAS}
        self._check_kept()

    @property
    def is_complete(self) -> bool:
        """Whether the recording was closed. Else the end of the run is not here; see `cut`."""
        return not self.cut

    @property
    def num_steps(self) -> int:
        """How many steps were recorded."""
        return sum(file.rows for file in self._files["steps"])

    @property
    def token_edges(self) -> tuple[int, ...]:
        """The numbers of tokens that forwards were padded to; empty where they were not, or nobody said."""
        controller = self.header.controller
        return () if controller is None else controller.token_edges

    @property
    def machine(self) -> KnownMachine | None:
        """Whose roofline the controller started from; None where it knew none, or nobody said."""
        controller = self.header.controller
        return None if controller is None else controller.machine

    @property
    def num_requests(self) -> int:
        """How many requests have a record."""
        return sum(file.rows for file in self._files["requests"])

    def steps(self) -> Iterator[RecordedStep]:
        """Every step, in order."""
        for table in self.step_tables():
            with reading(self.path / "steps.parquet"):
                steps = list(read_steps(table))
            yield from steps

    def observations(self) -> Iterator[Observation]:
        """Every observation, in order."""
        return (step.observation for step in self.steps())

    def requests(self) -> list[RequestRecord]:
        """Every request by arrival; in a cut trace only those that had ended by then."""
        table = self.requests_table()
        with reading(self.path / "requests.parquet"):
            return read_requests(table)

    def requests_table(self) -> pa.Table:
        """The fields of `RequestRecord` as columns, by arrival."""
        tables = [*self._tables("requests", None), REQUESTS.empty_table()]
        return pa.concat_tables(tables).sort_by("arrival_seconds")

    def step_tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The steps as tables of a few hundred rows; `columns.STEPS` says what is in them."""
        return self._tables("steps", columns)

    def _tables(self, name: str, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        chosen = None if columns is None else list(columns)
        for file in self._files[name]:
            with reading(file.path):
                batches = pq.ParquetFile(file.path, page_checksum_verification=True).iter_batches(
                    _BATCH_STEPS, columns=chosen
                )
            while True:
                with reading(file.path):
                    batch = next(batches, None)
                    if batch is None:
                        break
                    table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
                yield table

    def _find(self, name: str) -> list[Part]:
        """The checked files of a table: one where the trace is finished, else its parts."""
        trace_id = self.header.trace_id
        if not self.header.is_complete:
            with reading(self.path / PARTS):
                parts = find_parts(self.path / PARTS, name)
            for part in parts:
                place = {"trace": trace_id, "table": name, "sequence": part.sequence}
                open_table(part, _SCHEMAS[name], place=place).close()
            return parts
        path = self.path / f"{name}.parquet"
        facts = self.header.files.get(path.name)
        if facts is None:
            raise TraceError(f"{self.path}: the header knows of no {path.name}; record again")
        whole = Part(path, 0, facts.rows, facts.sha256)
        open_table(whole, _SCHEMAS[name], place={}).close()
        return [whole]

    def _check_kept(self) -> None:
        """The files beside the tables: models, acceptance tables."""
        for name, facts in self.header.files.items():
            path = self.path / name
            if not path.resolve().is_relative_to(self.path.resolve()):
                raise TraceError(f"{self.path}: the file {name!r} lies outside of the trace")
            if digest_of(path).sha256 != facts.sha256:
                raise TraceError(f"{path} is damaged: its digest is not the recorded one")
