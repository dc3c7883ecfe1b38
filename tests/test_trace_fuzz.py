"""Facts about damaged traces: a clear error or a smaller trace, never another one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdcontrol.errors import TraceError
from sdcontrol.traces import parts
from sdcontrol.traces.columns import STEPS, steps_table
from sdcontrol.traces.header import read_header, write_header
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.schema import FileFacts, RecordedStep
from tests.trace_support import plain_step, write_trace

NUM_STEPS = 23
Folder = Callable[[], Path]


@pytest.fixture(scope="module")
def steps() -> list[RecordedStep]:
    return [plain_step(number) for number in range(NUM_STEPS)]


@pytest.fixture(scope="module", params=["finished", "cut"])
def whole(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[RecordedStep],
) -> Path:
    """A trace, finished or with its parts as a killed process leaves them."""
    path: Path = tmp_path_factory.mktemp("traces") / request.param
    write_trace(path, steps)
    return path if request.param == "finished" else _unfinished(path, steps)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory, steps: list[RecordedStep]) -> Path:
    path = tmp_path_factory.mktemp("traces") / "cut"
    write_trace(path, steps)
    return _unfinished(path, steps)


def _unfinished(path: Path, steps: list[RecordedStep]) -> Path:
    """The finished trace at `path` as it was before it was closed."""
    header = read_header(path).model_copy(update={"is_complete": False, "files": {}})
    write_header(path, header)
    for table in path.glob("*.parquet"):
        table.unlink()
    (path / "parts").mkdir()
    for sequence, start in enumerate(range(0, len(steps), 4)):
        table = steps_table(steps[start : start + 4])
        parts.write_part(path / "parts", "steps", sequence, table, header.trace_id)
    return path


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def outcome(folder: Path, steps: list[RecordedStep]) -> str:
    """What reading comes to; fails unless it is one of the two that are allowed."""
    try:
        trace = Trace(folder)
        found = list(trace.steps())
        trace.requests()
    except TraceError as error:
        message = str(error)
    else:
        assert found == steps[: len(found)], "a trace that is read says what was written"
        assert len(found) == len(steps) or trace.cut, "a smaller trace says so"
        return "read"
    assert len(message.splitlines()) == 1, "an error is one line"
    assert str(folder) in message, "an error names its file"
    return "refused"


def test_whole_trace_is_read(whole: Path, steps: list[RecordedStep]) -> None:
    assert outcome(whole, steps) == "read"
    assert Trace(whole).num_steps == NUM_STEPS


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.99])
def test_truncated_file_is_refused(whole: Path, steps: list[RecordedStep], share: float) -> None:
    for path in files_of(whole):
        content = path.read_bytes()
        for length in {int(share * len(content)), len(content) - 1, len(content) - 9}:
            path.write_bytes(content[:length])
            result = outcome(whole, steps)
            newline_lost = path.name == "trace.json" and length == len(content) - 1
            assert result == ("read" if newline_lost else "refused"), (path, length)
        path.write_bytes(content)


def test_flipped_bit_is_found_wherever_it_is(whole: Path, steps: list[RecordedStep]) -> None:
    """Of the header some flips change nothing that is said: white space, an escaped letter."""
    rng = np.random.default_rng(0)
    for path in files_of(whole):
        content = path.read_bytes()
        for place in rng.integers(0, len(content), 60):
            flipped = bytearray(content)
            flipped[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(flipped)
            assert outcome(whole, steps) == "refused" or path.name == "trace.json"
        path.write_bytes(content)


def test_deleted_file_is_found(whole: Path, steps: list[RecordedStep]) -> None:
    """Except for the last part of a trace that is cut anyhow."""
    last = f"steps-{(NUM_STEPS - 1) // 4:06}"
    for path in files_of(whole):
        content = path.read_bytes()
        path.unlink()
        result = outcome(whole, steps)
        path.write_bytes(content)
        assert result == ("read" if path.name.startswith(last) else "refused"), path


def test_parts_that_changed_places_are_found(cut: Path, steps: list[RecordedStep]) -> None:
    """Under each other's sequence number, as a careless tool might leave them."""
    first, second = files_of(cut / "parts")[:2]
    moved = [
        (first, first.with_name(first.name.replace("-000000-", "-000001-"))),
        (second, second.with_name(second.name.replace("-000001-", "-000000-"))),
    ]
    for old, new in moved:
        old.rename(new)
    assert outcome(cut, steps) == "refused"
    for old, new in moved:
        new.rename(old)
    assert outcome(cut, steps) == "read"


@pytest.mark.parametrize("name", ["-0000000-", "-000003-", "-000006-"])
def test_doubled_part_is_found(cut: Path, steps: list[RecordedStep], name: str) -> None:
    """Under its own number, under another's, and at the end."""
    first = files_of(cut / "parts")[0]
    copy = first.with_name(first.name.replace("-000000-", name))
    shutil.copyfile(first, copy)
    assert outcome(cut, steps) == "refused"
    copy.unlink()
    assert outcome(cut, steps) == "read"


def test_part_of_another_trace_is_found(cut: Path, steps: list[RecordedStep]) -> None:
    table = steps_table(steps[:4])
    foreign = parts.write_part(cut / "parts", "steps", 6, table, "another trace").path
    assert outcome(cut, steps) == "refused"
    foreign.unlink()


def test_foreign_files_are_told_from_unfinished_ones(cut: Path, steps: list[RecordedStep]) -> None:
    unfinished = cut / "parts" / "steps-000006-4-00.parquet.tmp"
    unfinished.write_bytes(b"half of a part")
    assert outcome(cut, steps) == "read"
    unfinished.unlink()
    foreign = cut / "parts" / "notes.txt"
    foreign.write_text("mine")
    with pytest.raises(TraceError, match="no part of a trace"):
        Trace(cut)
    foreign.unlink()


@pytest.mark.parametrize("version", [0, 2, 99])
def test_other_schema_version_is_refused_with_the_version_that_wrote_it(
    tmp_path: Path, version: int
) -> None:
    write_trace(tmp_path / "t", [])
    path = tmp_path / "t" / "trace.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "schema_version": version, "new": [1]}))
    with pytest.raises(TraceError, match=f"schema version {version}.*pyarrow"):
        Trace(tmp_path / "t")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema_version": "1"}'],
    ids=["empty", "open", "list", "null", "bytes", "deep", "text version"],
)
def test_header_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    assert outcome(tmp_path, []) == "refused"


def test_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(TraceError, match="no trace in"):
            Trace(path)


def test_header_cannot_name_files_outside_of_the_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [])
    (tmp_path / "secret").write_text("x")
    header = read_header(tmp_path / "t")
    facts = FileFacts(sha256="0" * 64, size_bytes=1)
    write_header(
        tmp_path / "t", header.model_copy(update={"files": {**header.files, "../secret": facts}})
    )
    with pytest.raises(TraceError, match="outside"):
        Trace(tmp_path / "t")


# ---- files with a right digest and wrong contents: forged, or of another program


def _forged(folder: Path, table: pa.Table, **options: object) -> None:
    """Put `table` in place of the steps of a finished trace."""
    path = folder / "steps.parquet"
    pq.write_table(table, path, **options)
    header = read_header(folder)
    facts = parts.digest_of(path).model_copy(update={"rows": table.num_rows})
    files = {**header.files, "steps.parquet": facts}
    write_header(folder, header.model_copy(update={"files": files}))


_REQUIRED = [field.name for field in STEPS if not field.nullable]


@pytest.mark.parametrize("column", _REQUIRED)
def test_columns_that_disagree_make_no_steps(
    tmp_path: Path, steps: list[RecordedStep], column: str
) -> None:
    """One column without its values beside the others."""
    write_trace(tmp_path / "t", steps)
    field, table = STEPS.field(column), steps_table(steps)
    nulls = pa.nulls(table.num_rows, field.type)
    index = STEPS.get_field_index(column)
    _forged(tmp_path / "t", table.set_column(index, field.with_nullable(True), nulls))
    assert outcome(tmp_path / "t", steps) == "refused"


_PER_REQUEST = [
    "request_id", "context_tokens", "generated_tokens", "remaining_tokens", "temperature",
    "drafters", "hint_arms", "choice_drafter", "choice_tokens", "drafted", "proposed", "accepted",
    "emitted", "hint_match_tokens",
]  # fmt: skip


@pytest.mark.parametrize("column", _PER_REQUEST)
def test_values_that_are_too_few_make_no_steps(
    tmp_path: Path, steps: list[RecordedStep], column: str
) -> None:
    """One column of steps with two requests beside the others of steps with three."""
    write_trace(tmp_path / "t", steps)
    fewer = steps_table([plain_step(number, 2) for number in range(NUM_STEPS)])
    index = STEPS.get_field_index(column)
    _forged(
        tmp_path / "t", steps_table(steps).set_column(index, STEPS.field(column), fewer[column])
    )
    with pytest.raises(TraceError, match="damaged"):
        list(Trace(tmp_path / "t").steps())


def test_other_columns_are_refused(tmp_path: Path, steps: list[RecordedStep]) -> None:
    write_trace(tmp_path / "t", steps)
    _forged(tmp_path / "t", steps_table(steps).drop_columns(["emitted"]))
    with pytest.raises(TraceError, match="other columns"):
        Trace(tmp_path / "t")


def test_row_group_too_large_for_memory_is_refused_unread(
    tmp_path: Path, steps: list[RecordedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(tmp_path / "t", steps)
    monkeypatch.setattr(parts, "_MOST_ROWS_PER_GROUP", 8)
    with pytest.raises(TraceError, match="row group 0 has 23 rows"):
        Trace(tmp_path / "t")
