"""`sdcontrol replay`: what it prints, writes and refuses, whatever is replayed."""

import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcontrol.cli.replay_options import _FORMATS
from sdcontrol.estimators.hardware import HARDWARE
from sdcontrol.estimators.roofline import Forward
from sdcontrol.estimators.shapes import SHAPES
from sdcontrol.experiments import parallel
from sdcontrol.experiments.parallel import Pool
from sdcontrol.experiments.replay_cells import cells_of, columns_of
from sdcontrol.experiments.replay_runs import Machine, ReplayJob, jobs_of, run_job
from sdcontrol.experiments.replay_summary import compare
from sdcontrol.experiments.sources import FORMATS, Source, format_of, open_source
from sdcontrol.traces.bundled import bundled_trace
from sdcontrol.traces.reader import Trace
from tests.cli_support import HERE, Command, command_of, is_one_line, read
from tests.import_support import good_rows, written
from tests.tokenizer_support import byte_tokenizer

GENERATED = """\
name: drawn
num_requests: 12
arrivals: {kind: ARRIVALS}
requests:
  - prompt_tokens: {kind: fixed, tokens: 50}
    output_tokens: {kind: uniform, low: 10, high: 30}
    acceptance: {ngram: {rates: [0.5]}, draft_model: {rates: [0.8, 0.7]}}
"""
H100 = ["--hardware", "h100-sxm", "--model", "llama-3.1-8b", "--draft-model", "llama-3.2-1b"]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return command_of(capsys)


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    path = tmp_path / "drawn.yaml"
    path.write_text(GENERATED.replace("ARRIVALS", "at_once"), "utf-8")
    return path


# ---- replay


def test_a_replay_of_the_bundled_trace_ranks_policies(command: Command, tmp_path: Path) -> None:
    path, page = tmp_path / "out.json", tmp_path / "page.html"
    policies = ("off", "static:ngram:4", "goodput", "oracle")
    given_policies = [word for name in policies for word in ("--policy", name)]
    code, out, err = command(
        "replay", "bundled:mixed", *HERE, *given_policies, "--json", path, "--html", page
    )
    record = read(path)
    assert (code, err) == (0, "")
    assert record["is_simulated"] is True
    assert "simulated, step times fitted to the trace" in out
    names = [row["policy"] for row in record["rows"]]
    assert sorted(names) == sorted(policies)
    printed = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert printed == names
    relative = [row["relative"] for row in record["rows"]]
    assert relative == sorted(relative, reverse=True)
    assert relative[0] == 1.0
    for row in record["rows"]:
        found = row["tokens_per_busy_second"]
        assert 0 < found["low"] <= found["value"] <= found["high"]
        assert f"{found['value']:.0f} {found['low']:.0f} to {found['high']:.0f}" in out
    tokens = {run["policy"]: run["output_tokens"] for run in record["runs"]}
    recorded = sum(request.output_tokens for request in Trace(bundled_trace()).requests())
    assert set(tokens.values()) == {recorded}  # whatever is drafted, the text is the same
    assert_is_self_contained(page.read_text("utf-8"))
    assert str(page) in out


def assert_is_self_contained(page: str) -> None:
    assert not re.search(r"<script|https?:|src=|url\(|@import", page)
    assert "default-src 'none'" in page
    assert "simulated" in page
    assert page.count("<svg") >= 4
    assert "nan" not in "".join(re.findall(r'd="([^"]*)"', page))
    (color,) = set(re.findall(r'class="drafter-(\d)"><i></i>ngram<', page))
    assert color != "0"  # which is that of no draft: a drafter has one colour in all plots


def test_names_are_escaped_in_the_page(command: Command, generated: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "<script>x<"
    hostile.mkdir()
    path = shutil.copy(generated, hostile / "[bold]&amp;.yaml")
    code, _, err = command("replay", path, *H100, *HERE, "--html", tmp_path / "page.html")
    assert (code, err) == (0, "")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;x&lt;/[bold]&amp;amp;.yaml" in page


def test_requests_that_never_run_are_no_success(command: Command, generated: Path) -> None:
    replay = ["replay", generated, *H100, *HERE, "--policy", "off", "--kv-tokens"]
    code, out, err = command(*replay, 64)
    assert (code, err) == (1, "")
    assert "requests could never run" in out
    code, out, err = command(*replay, 10)
    assert (code, out) == (2, "")
    assert is_one_line(err)
    assert "none of the requests could ever run" in err
    assert "kv_tokens" in err


def test_limits_decide_what_is_best(command: Command, generated: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    limits = ["--slo-tpot", "0.005", "--slo-ttft", "1", "--requests", "8"]
    code, out, _ = command("replay", generated, *H100, *HERE, *limits, "--json", path)
    record = read(path)
    assert code == 0
    assert record["ranked_by"] == "goodput"
    assert "within limits/s" in out
    assert all(run["num_requests"] == 8 for run in record["runs"])
    assert all(run["slo"] == {"ttft_seconds": 1.0, "tpot_seconds": 0.005} for run in record["runs"])


def test_where_arrivals_leave_the_machine_idle_the_pace_decides(
    command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text(GENERATED.replace("ARRIVALS", "poisson, rate_per_second: 1"), "utf-8")
    out = tmp_path / "out.json"
    measures = {}
    for factor in ("1", "1000"):
        assert command("replay", path, *H100, *HERE, "--load", factor, "--json", out)[0] == 0
        measures[factor] = read(out)["ranked_by"]
    assert measures == {"1": "tpot", "1000": "throughput"}


def test_seeds_draw_anew_and_repeat(command: Command, generated: Path, tmp_path: Path) -> None:
    records = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.json"
        options = ["--policy", "off", "--seeds", "2", "--noise", "0.1", "--json", path]
        assert command("replay", generated, *H100, *HERE, *options)[0] == 0
        records.append(read(path))
    assert records[0] == records[1]
    first, second = (run["busy_seconds"] for run in records[0]["runs"])
    assert first != second
    (row,) = records[0]["rows"]
    assert row["num_seeds"] == 2


def test_several_workloads_are_ranked_apart(
    command: Command, generated: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    arguments = ["bundled:mixed", generated, *H100, *HERE, "--arrivals", "bundled:off"]
    code, out, _ = command("replay", *arguments, "--json", path)
    assert code == 0
    rows = read(path)["rows"]
    assert [row["source"] for row in rows] == ["bundled:mixed"] * 2 + [str(generated)] * 2
    assert [row["relative"] for row in rows[::2]] == [1.0, 1.0]
    assert "workload" in out


def test_processes_find_what_one_finds(generated: Path) -> None:
    base = [ReplayJob(Source(bundled_trace("mixed"), "trace"), "")]
    jobs = jobs_of(base, ["off", "static:ngram:2"], 1)
    found = dict(Pool(workers=2).run(run_job, jobs))
    for place, job in enumerate(jobs):
        assert found[place].to_json() == run_job(job).to_json()


def test_an_interrupt_ends_processes_that_it_did_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(places: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "as_completed", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(Pool(2).run(time.sleep, [100.0, 100.0]))
    assert time.monotonic() - began < 50.0
    assert not active_children()


def test_without_ray_the_way_to_get_it_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = command("replay", "bundled:mixed", "--ray")
    assert code == 2
    assert "pip install 'sdcontrol[ray]'" in err


@pytest.fixture(scope="module")
def compared() -> tuple[list[ReplayJob], list]:
    base = [ReplayJob(Source(bundled_trace("mixed"), "trace"), "", num_requests=6)]
    jobs = jobs_of(base, ["off", "static:ngram:2", "static:draft_model:2", "static:ngram:8"], 1)
    return jobs, [run_job(job) for job in jobs]


@given(order=st.permutations(range(4)))
def test_the_order_of_policies_does_not_change_the_table(
    order: Sequence[int], compared: tuple[list[ReplayJob], list]
) -> None:
    jobs, results = compared
    names = {str(jobs[0].source.path): "mixed"}
    table = compare(jobs, results, names)
    again = compare([jobs[i] for i in order], [results[i] for i in order], names)
    assert table == again
    for row in table.rows:
        assert 0.0 < row.relative <= 1.0
        assert len(cells_of(row, table)) == len(columns_of(table))


# ---- foreign recordings


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("azure", "csv"), ("mooncake", "jsonl"), ("vllm", "jsonl"), ("texts", "jsonl")],
)
def test_a_recording_is_known_by_suffix_and_keys(
    command: Command, tmp_path: Path, kind: str, suffix: str
) -> None:
    path = written(tmp_path / f"file.{suffix}", kind, good_rows(kind, 20))
    found = format_of(path)
    assert found == kind.removesuffix("s")
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().backend_tokenizer.to_str(), "utf-8")
    arguments = ["replay", path, *H100, *HERE, "--policy", "off"]
    code, out, err = command(*arguments, "--tokenizer", tmp_path / "tokenizer.json")
    assert (code, err) == (0, "")
    assert "simulated, step times of llama-3.1-8b on H100-SXM" in out
    if kind == "texts":
        code, _, err = command(*arguments)
        assert code == 2
        assert "--tokenizer" in err


def test_malformed_rows_are_told_and_an_unknown_format_is_asked_for(
    command: Command, tmp_path: Path
) -> None:
    rows = good_rows("azure", 200)
    path = written(tmp_path / "file.csv", "azure", [*rows, "nonsense"])
    code, _, err = command("replay", path, *H100, *HERE, "--policy", "off")
    assert code == 0
    assert "201 rows, 1 malformed" in err
    plain = written(tmp_path / "file.txt", "azure", rows)
    code, _, err = command("replay", plain, *H100, *HERE)
    assert code == 2
    assert "--format" in err
    options = ["--format", "azure", "--policy", "off"]
    assert command("replay", plain, *H100, *HERE, *options)[0] == 0


@pytest.mark.parametrize("as_arrivals", [False, True])
def test_a_part_of_a_recording_is_replayed_from_its_first_request_on(
    tmp_path: Path, as_arrivals: bool
) -> None:
    """What was before it is no time in which nothing came."""
    rows = [json.loads(row) for row in good_rows("mooncake", 10)]
    found = []
    for name, later in (("whole", 0), ("cut", 3_600_000)):
        moved = [json.dumps({**row, "timestamp": row["timestamp"] + later}) for row in rows]
        source = Source(written(tmp_path / name, "mooncake", moved), "mooncake")
        machine = Machine("linear", target=Forward(SHAPES["llama-3.1-8b"], HARDWARE["H100-SXM"]))
        job = ReplayJob(source, "off", machine=machine, load=2.0)
        if as_arrivals:
            generated = tmp_path / "drawn.yaml"
            generated.write_text(GENERATED.replace("ARRIVALS", "at_once"), "utf-8")
            job = replace(job, source=Source(generated, "generated"), arrivals=source)
        found.append(run_job(job))
    whole, cut = found
    assert cut.seconds == pytest.approx(whole.seconds)
    assert cut.tokens_per_second == pytest.approx(whole.tokens_per_second)


@pytest.mark.parametrize("begin", ["\ufeff", "\n \n"])
def test_a_recording_is_known_whatever_wrote_it(tmp_path: Path, begin: str) -> None:
    rows = good_rows("mooncake", 3)
    path = tmp_path / "FILE.JSONL"
    path.write_text(begin + "\r\n".join(rows), "utf-8")
    assert format_of(path) == "mooncake"
    report = open_source(Source(path, "mooncake")).report
    assert report is not None
    assert (report.num_rows, report.num_malformed) == (3, 0)


def test_the_options_name_every_format() -> None:
    assert _FORMATS == FORMATS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "w.yaml:1:5: no YAML"),
        ("name: !!timestamp 2026-13-45\n" + GENERATED, "w.yaml:1:7: no such value: month must be"),
        ("num_requests: !!bool maybe\n", "w.yaml:1:15: no such value"),
        ("seed: 1\nseed: 2\n", "w.yaml:2:1: 'seed' was given in line 1 already"),
        (GENERATED.replace("ARRIVALS", "at_once, colour: red"), "w.yaml:3:1: arrivals.at_once"),
        ("[1]", "no mapping"),
        ("num_requests: 3", "arrivals"),
        (GENERATED, "arrivals"),
        (GENERATED.replace("ARRIVALS", "at_once") + "colour: red\n", "colour"),
    ],
)
def test_a_workload_that_cannot_be_is_named(
    command: Command, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text, "utf-8")
    code, _, err = command("replay", path, *H100, *HERE)
    assert code == 2
    assert is_one_line(err)
    assert said in err
