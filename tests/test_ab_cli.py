"""`sdcontrol ab` as a whole: on the bundled models, and with what can go wrong."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from sdcontrol.cli import ab, ab_devices, main
from sdcontrol.cli.ab_table import tables
from sdcontrol.experiments.live import LiveRunner
from sdcontrol.experiments.loading import load_experiments
from sdcontrol.experiments.results import Results
from tests.report_support import make_results

CONFIG = """\
name: small
dtype: float32
arms:
  - {name: off, policy: off}
  - {name: fixed, policy: "static:ngram:4"}
  - {name: adaptive, policy: goodput, drafters: [ngram, draft_model]}
workload:
  kinds: {copy: 2}
  num_tokens: 6
  arrivals: {kind: ARRIVALS}
blocks: 2
warmup: {min_blocks: 1, max_blocks: 1}
repeat_every: 1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG.replace("ARRIVALS", "closed, concurrency: 2"), encoding="utf-8")
    return path


def test_a_comparison_runs_live_and_says_the_same_everywhere(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "runs")]
    assert main(["ab", str(config), *output, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "runs" / "small"
    results = Results.load(folder / "results.json")
    assert json.loads((tmp_path / "out.json").read_text("utf-8")) == json.loads(
        (folder / "results.json").read_text("utf-8")
    )
    assert results.is_complete
    assert not results.is_simulated
    assert results.verdict in printed
    assert "All arms wrote the same text" in results.verdict
    assert str(folder / "report.html") in printed
    assert (folder / "report.html").stat().st_size > 1000
    for comparison in results.comparisons:
        assert f"{comparison.ratio.value:.3f}x" in printed
    assert results.texts.num_compared == 3 * 2 * 2  # blocks, requests, arms beside the baseline

    assert main(["ab", str(config), *output]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["ab", str(config), *output, "--resume"]) == 0
    assert "all 2 planned blocks were run" in capsys.readouterr().out


def test_a_title_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    title = "[bold]goodput [/dim] vs [off]"
    console = Console(width=200)
    for table in tables(make_results(title=title)):
        console.print(table)
    assert title in capsys.readouterr().out


def test_large_numbers_keep_their_digits(capsys: pytest.CaptureFixture[str]) -> None:
    facts = make_results(num_steps=50).model_dump(mode="json")
    metrics = facts["arms"][0]["metrics"]
    metrics["tokens_per_second"] |= {"value": 12345.6, "low": 999.7, "high": 54321.0}
    metrics["peak_memory_bytes"] |= {"value": 3.0 * 2**30, "low": 2.0**20, "high": 4.0 * 2**30}
    Console(width=200).print(next(tables(Results.model_validate(facts))))
    printed = capsys.readouterr().out
    assert "12346 1000 to 54321" in printed
    assert "3072 MiB 1 to 4096" in printed


def test_results_are_written_before_they_are_shown(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(results: Results, folder: Path) -> None:
        raise RuntimeError("no terminal is like that")

    monkeypatch.setattr(ab, "_show", broken)
    monkeypatch.setattr(ab, "_run_one", lambda options, experiment: make_results())
    arguments = ["--output", str(tmp_path / "runs"), "--json", str(tmp_path / "out.json")]
    assert main(["ab", str(config), *arguments]) == 1
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["name"] == "demo"


def test_live_runs_of_a_matrix_go_to_a_device_each(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices that are there everywhere stand for GPUs; three runs on two of them."""
    monkeypatch.setattr(ab_devices, "gpus", lambda: ["cpu", "cpu:0"])
    plan = tmp_path / "sweep.yaml"
    plan.write_text(
        config.read_text("utf-8") + "matrix: {workload.num_tokens: [4, 5, 6]}\n", "utf-8"
    )
    arguments = ["--output", str(tmp_path / "runs"), "--workers", "2"]
    for short in ("blocks=1", "warmup.min_blocks=0", "warmup.max_blocks=0", "repeat_every=0"):
        arguments += ["--set", short]
    arguments.append("--json")
    assert main(["ab", str(plan), *arguments, str(tmp_path / "out.json")]) == 0
    found = [Results.load(path) for path in sorted((tmp_path / "runs").glob("*/results.json"))]
    assert [results.config["device"] for results in found] == ["cpu", "cpu:0", "cpu"]
    assert all(results.is_complete and not results.is_simulated for results in found)


def test_an_open_loop_counts_waiting(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "workload.arrivals={kind: open, requests_per_second: 1000000}"]
    settings += ["--set", "blocks=1", "--set", "warmup.min_blocks=0", "--set", "repeat_every=0"]
    settings += ["--set", "engine.max_batch_size=1", "--set", "warmup.max_blocks=0"]
    assert main(["ab", str(config), "--output", str(tmp_path), *settings]) == 0
    results = Results.load(tmp_path / "small" / "results.json")
    off = results.arms[0].latencies  # of two requests that came together, one at a time
    assert (
        off["ttft_seconds"][100] > 0.99 * off["e2e_seconds"][0]
    )  # one waited for all of the other


def test_ctrl_c_leaves_a_report_of_what_was_finished(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, calls = LiveRunner.run_block, []

    def interrupted(self: LiveRunner, arm: str, block: int, **more: float) -> object:
        calls.append(arm)
        if len(calls) == 7:  # in the second of three blocks of four runs
            raise KeyboardInterrupt
        return whole(self, arm, block, **more)

    monkeypatch.setattr(LiveRunner, "run_block", interrupted)
    assert main(["ab", str(config), "--output", str(tmp_path)]) == 130
    captured = capsys.readouterr()
    assert "interrupted" in captured.err
    assert str(tmp_path / "small" / "report.html") in captured.out
    results = Results.load(tmp_path / "small" / "results.json")
    assert not results.is_complete
    assert results.stopping.num_warmup_blocks == 1


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "--schema"]) == 0
    assert "arms" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no CONFIG.yaml"),
        (["nowhere.yaml"], "nowhere.yaml:1:1: cannot be read"),
        (["CONFIG", "--set", "blocks=0"], "--set blocks=0: blocks: 0"),
        (["CONFIG", "--resume", "--overwrite"], "one of them"),
        (["CONFIG", "--workers", "0"], "at least 1"),
        (["CONFIG", "--json", "/no/such/folder/x.json"], "cannot be written"),
        (["CONFIG", "--json", "/"], "it is a folder"),
        (["CONFIG", "--workers", "2"], "backend: trace"),
        (["CONFIG", "--set", "draft_model=none"], "set draft_model"),
        (["CONFIG", "--set", "model=/no/such/folder"], "no model folder"),
    ],
)
def test_what_cannot_be_done_ends_with_2_and_one_line(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    given = [str(config) if word == "CONFIG" else word for word in arguments]
    assert main(["ab", *given, "--output", str(tmp_path / "runs")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("num_arms", [1, 5, 6, 20, 64])
def test_however_many_arms_there_are_all_names_and_numbers_are_legible(
    capsys: pytest.CaptureFixture[str], num_arms: int
) -> None:
    """As into a file, 120 columns wide."""
    facts = make_results(num_steps=50).model_dump(mode="json")
    arm = facts["arms"][0]
    speed = arm["metrics"]["tokens_per_second"]
    facts["arms"] = [
        arm
        | {
            "name": f"static-ngram-{number:02}",
            "metrics": {"tokens_per_second": speed | {"value": 1000.0 + number}},
        }
        for number in range(num_arms)
    ]
    console = Console(width=120)
    for table in tables(Results.model_validate(facts)):
        console.print(table)
    printed = capsys.readouterr().out
    for number in range(num_arms):
        assert f"static-ngram-{number:02}" in printed
        assert f"{1000 + number} " in printed


def test_an_interrupted_run_is_the_last_of_its_device(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = load_experiments(config, ["matrix={workload.num_tokens: [4, 5]}"])

    def interrupted(self: LiveRunner, arm: str, block: int, **more: float) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveRunner, "run_block", interrupted)
    settings: list[dict[str, object]] = [dict(plan.resolved()) for plan in plans]
    ab_devices.run_group((settings, str(tmp_path / "runs"), False, False))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [plans[0].name]
