"""Importers: what is well-formed arrives exactly, what is malformed is counted and never repaired."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdcontrol.errors import ConfigError, SdcontrolError, TraceError
from sdcontrol.traces.importers import Imported, read_azure, read_mooncake
from sdcontrol.traces.what_if import simulate
from tests.import_support import HEADER, READERS, TIMES, good_rows, texts, written

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("SDCONTROL_DATA", ROOT.parent / "shared" / "data"))


# ---- what every importer does


@pytest.mark.parametrize("kind", READERS)
def test_well_formed_rows_all_arrive_and_can_be_simulated(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path / "file", kind, [*good_rows(kind, 30), "", "  "])
    imported = READERS[kind](path)
    assert (imported.report.num_rows, imported.report.num_malformed) == (30, 0)
    once = [(r.id, r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in imported.workload]
    again = [(r.id, r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in imported.workload]
    assert once == again
    assert once[0][1] == 0.0
    assert len({name for name, *_ in once}) == len(once) == 30
    assert simulate(imported.workload, "off", TIMES).num_requests == 30


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("bad", ["nonsense", "{}", "[1]", '"a"', "1,2", b"\xff\xfe", "{" * 5000])
def test_a_malformed_row_is_counted_shown_and_left_out(
    kind: str, bad: str | bytes, tmp_path: Path
) -> None:
    rows = good_rows(kind, 200)
    path = written(tmp_path / "file", kind, [*rows[:50], bad, *rows[50:]])
    report = READERS[kind](path).report
    line = 52 if kind == "azure" else 51
    assert (report.num_rows, report.num_malformed) == (201, 1)
    assert [row.line for row in report.malformed] == [line]
    assert f"line {line}: " in report.to_text()
    assert len(list(READERS[kind](path).workload)) == 200
    with pytest.raises(TraceError, match=rf"1 of 201 rows are malformed.*line {line}"):
        READERS[kind](path, max_malformed=0.0)


@pytest.mark.parametrize("kind", READERS)
def test_many_malformed_rows_are_refused_and_only_a_few_shown(kind: str, tmp_path: Path) -> None:
    rows = [*good_rows(kind, 50), *["?"] * 20]
    path = written(tmp_path / "file", kind, rows)
    with pytest.raises(TraceError, match=r"20 of 70 rows are malformed") as refused:
        READERS[kind](path)
    assert str(refused.value).count("line ") == 5
    report = READERS[kind](path, max_malformed=0.5).report
    assert (len(report.malformed), report.num_malformed) == (5, 20)
    assert "and 15 more" in report.to_text()


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_is_absent_or_empty_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", written(tmp_path / "empty", kind, []), tmp_path):
        with pytest.raises(TraceError, match=r"cannot be read|has no rows") as refused:
            READERS[kind](path)
        assert "\n" not in str(refused.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", READERS)
def test_what_can_be_read_only_once_is_refused(kind: str, tmp_path: Path) -> None:
    """Rows are read again at every reading of the workload; a pipe would give none, or wait."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(TraceError, match="no plain file"):
            READERS[kind](path)


def test_a_share_that_is_none_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "file", "mooncake", good_rows("mooncake", 3))
    with pytest.raises(ConfigError, match="max_malformed"):
        read_mooncake(path, max_malformed=1.0)


@pytest.mark.parametrize("kind", READERS)
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_bytes_give_a_traceback(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    """Flipped bytes in good rows, and bytes of no meaning at all."""
    content = bytearray("\n".join(good_rows(kind, 4)).encode())
    for _ in range(data.draw(st.integers(0, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content += data.draw(st.binary(max_size=40))
    path = tmp_path / "fuzzed"
    path.write_bytes((HEADER.encode() if kind == "azure" else b"") + bytes(content))
    try:
        imported = READERS[kind](path, max_malformed=0.9)
    except SdcontrolError:
        return
    kept = list(imported.workload)
    assert len(kept) == imported.report.num_rows - imported.report.num_malformed > 0


# ---- Azure


def test_azure_times_are_counted_from_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "\ufeffGeneratedTokens,extra,TIMESTAMP,ContextTokens\r\n"
        "44,x,2023-11-16 18:15:46.6805900,374\r\n"
        "109,x,2023-11-16 18:15:50.9951690+00:00,396\r\n"
    )
    first, second = read_azure(path).workload
    assert (first.prompt_tokens, first.output_tokens) == (374, 44)
    assert second.arrival_seconds == pytest.approx(4.314579, abs=1e-6)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)


def test_azure_fields_may_all_be_quoted(tmp_path: Path) -> None:
    lines = (HEADER + "\n".join(good_rows("azure", 20))).splitlines()
    path = tmp_path / "quoted.csv"
    path.write_text("\n".join(",".join(f'"{one}"' for one in line.split(",")) for line in lines))
    assert read_azure(path).report.num_malformed == 0
    path.write_text(
        '"a, b",TIMESTAMP,ContextTokens,GeneratedTokens\n"x, y",2023-11-16 18:00:00,5,3\n'
    )
    (request,) = read_azure(path).workload
    assert (request.prompt_tokens, request.output_tokens) == (5, 3)


@pytest.mark.parametrize("row", ["2023-11-16 18:00:00,0,3", "2023-11-16 18:00:00,5,-1", "now,5,5"])
def test_azure_rows_that_cannot_be_are_malformed(row: str, tmp_path: Path) -> None:
    path = written(tmp_path / "file", "azure", [*good_rows("azure", 100), row])
    assert read_azure(path).report.num_malformed == 1


def test_a_row_that_comes_before_an_earlier_one_is_malformed_not_sorted(tmp_path: Path) -> None:
    rows = good_rows("mooncake", 120)
    path = written(tmp_path / "file", "mooncake", [*rows[:60], rows[3], *rows[60:]])
    report = read_mooncake(path).report
    assert [row.line for row in report.malformed] == [61]
    assert "before a row above" in report.malformed[0].reason


def test_a_csv_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("TIMESTAMP,Tokens\n1,2\n")
    with pytest.raises(TraceError, match=r"no column.*ContextTokens.*GeneratedTokens"):
        read_azure(path)


# ---- the public files


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("arrivals/azure_2023_conv.csv", read_azure),
        ("arrivals/mooncake_conversation.jsonl", read_mooncake),
        ("text/edit_eval.jsonl", texts),
    ],
)
def test_the_public_files_have_no_malformed_row(file: str, read: Callable[..., Imported]) -> None:
    path = DATA / file
    if not path.exists():
        pytest.skip(f"{path} is absent; set SDCONTROL_DATA to the folder of public data")
    imported = read(path)
    assert imported.report.num_malformed == 0
    assert simulate(imported.workload.first(20), "off", TIMES).num_requests == 20
