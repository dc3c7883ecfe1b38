"""Write a trace while a run goes on: in parts, in the background, in bounded memory.

    with TraceWriter("runs/monday", TraceFacts(drafters=("ngram",))) as writer:
        writer.append(step)

Steps are handed over as they are and made into a part by a thread, every few hundred of them or
every few seconds. A process that dies loses what was not handed on yet, and nothing else: the parts
are readable, and the header says that the recording was not closed. Closing makes one file of the
parts. Knows nothing of planners or engines.
"""

import atexit
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Self

from sdcontrol.extras import needed

with needed():
    import pyarrow as pa
    import pyarrow.parquet as pq

from sdcontrol.errors import TraceError
from sdcontrol.traces.columns import REQUESTS, STEPS, requests_table, steps_table
from sdcontrol.traces.header import read_header, write_header
from sdcontrol.traces.parts import Part, digest_of, open_table, parquet_options, write_part
from sdcontrol.traces.schema import (
    FileFacts,
    RecordedStep,
    RequestRecord,
    TraceFacts,
    TraceHeader,
    check_rows,
)

__all__ = ["PARTS", "TraceWriter", "add_file"]

PARTS = "parts"
_TABLES = {"steps": STEPS, "requests": REQUESTS}
_ROWS_PER_GROUP = 4096  # of the finished tables: larger groups compress better
_BYTES_PER_GROUP = (
    1 << 28
)  # in memory, from which on a group is written; readers take far larger ones
_PARTS_BEHIND = 4  # that the disk may be behind before `append` waits for it


class TraceWriter:
    """Writes one trace into a new folder. `append` and `add_request` may be called by any thread.

    `keep` are files to be kept with the trace, by path within it. Raises `TraceError` where the
    folder has something in it, or when writing failed; what was written by then stays readable.
    """

    def __init__(
        self,
        path: Path | str,
        facts: TraceFacts | None = None,
        *,
        keep: Mapping[str, Path] | None = None,
        steps_per_part: int = 256,
        seconds_per_part: float = 10.0,
    ) -> None:
        self.path = Path(path)
        self._steps_per_part = steps_per_part
        self._seconds_per_part = seconds_per_part
        _make_folder(self.path)
        files = {name: _copied(source, self.path / name) for name, source in (keep or {}).items()}
        self.header = _header(facts or TraceFacts(), files)
        write_header(self.path, self.header)
        self._steps: list[RecordedStep] = []
        self._requests: list[RequestRecord] = []
        self._parts: dict[str, list[Part]] = {name: [] for name in _TABLES}
        self._failure: Exception | None = None
        self._is_closing = False
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="trace-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # for those who forget to

    def append(self, step: RecordedStep) -> None:
        """Add one step; waits where the disk is far behind."""
        check_rows(step)
        self._check_process()  # the thread that may have the lock is not in a forked one
        with self._condition:
            self._check_open()
            self._steps.append(step)
            if len(self._steps) >= self._steps_per_part:
                self._condition.notify_all()
            while len(self._steps) > _PARTS_BEHIND * self._steps_per_part:
                self._condition.wait()
                self._check_open()

    def add_request(self, record: RequestRecord) -> None:
        """Add what became of one request."""
        self._check_process()
        with self._condition:
            self._check_open()
            self._requests.append(record)

    def describe(self, facts: TraceFacts) -> None:
        """Say what is run, where that was not known when the trace began; of a closed one, too."""
        self._check_process()
        if self._is_closing:  # files may have been added since
            self.header = read_header(self.path)
        update = {name: getattr(facts, name) for name in TraceFacts.model_fields}
        self.header = self.header.model_copy(update=update)
        try:
            write_header(self.path, self.header)
        except TraceError as error:
            self._failure = error  # what comes after it is not written either
            raise

    def close(self) -> None:
        """Write what is left and finish the trace. Raises `TraceError` where writing failed."""
        if not self._stop():
            return
        self._check_written()
        try:
            self._finish()
        except (OSError, pa.ArrowException) as error:
            self._failure = error
            self._check_written()

    def discard(self) -> None:
        """Delete the trace."""
        if self._stop():
            shutil.rmtree(self.path.resolve())  # a link is no folder to it

    def _stop(self) -> bool:
        """Let the thread write what is left; whether it was not stopped before.

        A process that was forked has the folder and no thread: it leaves the trace alone.
        """
        if os.getpid() != self._process:
            return False
        with self._condition:
            if self._is_closing:
                return False
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self._check_written()
        if self._is_closing:
            raise TraceError(f"the trace in {self.path} is closed; record into another folder")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise TraceError(
                f"the trace in {self.path} is the process's that this one was forked of; record into "
                "another folder"
            )

    def _check_written(self) -> None:
        if self._failure is not None:
            raise TraceError(
                f"the trace in {self.path} could not be written: {self._failure}; what was written "
                "before is readable"
            ) from self._failure

    def _finish(self) -> None:
        files = {f"{name}.parquet": self._merged(name) for name in _TABLES}
        update = {"is_complete": True, "files": {**self.header.files, **files}}
        self.header = self.header.model_copy(update=update)
        write_header(self.path, self.header)
        shutil.rmtree(self.path / PARTS)

    # the thread

    def _write(self) -> None:
        """Make parts until the trace is closed or something fails."""
        try:
            while not self._is_closing:
                self._write_parts(*self._take())
            self._write_parts(*self._take())
        except Exception as error:  # whatever it is: told to who appends or closes next
            self._failure = error
        with self._condition:
            self._condition.notify_all()

    def _take(self) -> tuple[list[RecordedStep], list[RequestRecord]]:
        """What has gathered, once it is enough or old enough."""
        deadline = time.monotonic() + self._seconds_per_part
        with self._condition:
            while not self._is_closing and len(self._steps) < self._steps_per_part:
                if not self._condition.wait(deadline - time.monotonic()):
                    break
            taken = self._steps, self._requests
            self._steps, self._requests = [], []
            self._condition.notify_all()
        return taken

    def _write_parts(self, steps: list[RecordedStep], requests: list[RequestRecord]) -> None:
        if steps:
            self._write_part("steps", steps_table(steps))
        if requests:
            self._write_part("requests", requests_table(requests))

    def _write_part(self, name: str, table: pa.Table) -> None:
        parts = self._parts[name]
        folder = self.path / PARTS
        parts.append(write_part(folder, name, len(parts), table, self.header.trace_id))

    def _merged(self, name: str) -> FileFacts:
        """One file of all parts; they stay until the header speaks of it."""
        path, schema, trace_id = self.path / f"{name}.parquet", _TABLES[name], self.header.trace_id
        with pq.ParquetWriter(path, schema, **parquet_options) as writer:
            waiting: list[pa.Table] = []
            for part in self._parts[name]:
                place = {"trace": trace_id, "table": name, "sequence": part.sequence}
                file = open_table(part, schema, place=place)
                waiting.append(file.read().replace_schema_metadata(None))
                if _make_a_group(waiting):
                    writer.write_table(pa.concat_tables(waiting))
                    waiting = []
            writer.write_table(pa.concat_tables([*waiting, schema.empty_table()]))
        rows = sum(part.rows for part in self._parts[name])
        return digest_of(path).model_copy(update={"rows": rows})


def add_file(folder: Path, name: str, *, rows: int = 0) -> None:
    """Make the file `name`, written into a finished trace, a part of it: checked on opening."""
    header = read_header(folder)
    facts = digest_of(folder / name).model_copy(update={"rows": rows})
    write_header(folder, header.model_copy(update={"files": {**header.files, name: facts}}))


def _make_a_group(tables: Sequence[pa.Table]) -> bool:
    rows: int = sum(table.num_rows for table in tables)
    size: int = sum(table.nbytes for table in tables)
    return rows >= _ROWS_PER_GROUP or size >= _BYTES_PER_GROUP


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise TraceError(f"{path} is not empty; record into a new folder")
        (path / PARTS).mkdir()
    except OSError as error:
        raise TraceError(f"no trace can be written to {path}: {error.strerror}") from error


def _copied(source: Path, target: Path) -> FileFacts:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise TraceError(f"{source} cannot be kept as {target}: {error.strerror}") from error
    return digest_of(target)


def _header(facts: TraceFacts, files: Mapping[str, FileFacts]) -> TraceHeader:
    return TraceHeader(
        **{name: getattr(facts, name) for name in TraceFacts.model_fields},
        trace_id=uuid.uuid4().hex,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **_versions()},
        is_complete=False,
        files=files,
    )


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("sdcontrol", "numpy", "numba", "pyarrow", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not here, or a bare checkout
    return found
