"""`sdcontrol record`, `inspect`, `train` and exact replays: what they print, write, and refuse."""

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sdcontrol.core import BatchView, RequestView
from sdcontrol.errors import ConfigError
from sdcontrol.experiments.training import FEATURES, SITUATION, learn
from sdcontrol.policies.learned_features import features
from sdcontrol.policies.learned_model import load
from sdcontrol.traces.bundled import bundled_trace
from sdcontrol.traces.header import read_header, write_header
from sdcontrol.traces.reader import Trace
from tests.cli_support import HERE, Command, command_of, is_one_line, read
from tests.engine_support import tiny_model
from tests.tokenizer_support import byte_tokenizer

MIXED = list(Trace(bundled_trace("mixed")).observations())


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return command_of(capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model that writes bytes."""
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = byte_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---- record


def test_what_was_recorded_can_be_inspected_and_replayed(
    command: Command, model: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    recording = ["record", "--model", model, "--max-new-tokens", 24, "--output", trace]
    code, out, err = command(
        *recording, "--acceptance-table", "abcabcabc", "xyxyxyxy", "--json", tmp_path / "r.json"
    )
    assert (code, err) == (0, "")
    assert f"recorded into {trace}" in out
    assert "2 requests (2 length)" in out
    assert read(tmp_path / "r.json")["output_tokens"] == 48
    assert all(record.prompt_ids is None for record in Trace(trace).requests())
    assert not [file for file in trace.rglob("*") if b"abcabc" in file.read_bytes()]

    assert command("inspect", trace)[1] in out
    assert command("replay", trace, "--exact")[0] == 0
    code, out, err = command("replay", trace, *HERE, "--policy", "static:ngram:2")
    assert (code, err) == (0, "")
    assert "simulated" in out
    assert "steps to fit step times to; with fewer than 100" in out

    code, _, err = command(*recording, "again")
    assert code == 2
    assert "is not empty" in err
    assert Trace(trace).num_requests == 2


def test_token_ids_are_kept_where_asked_for_and_refusals_are_told(
    command: Command, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "", "id": "empty"}\n{"prompt": "ab", "id": 1}\n')
    recording = ["record", "--model", model, "--max-new-tokens", 4, "--output", tmp_path / "trace"]
    code, _, err = command(*recording, "--keep-token-ids", "--file", tmp_path / "p.jsonl")
    assert code == 1
    assert err.startswith("sdcontrol: refused: request 'empty'")
    (record,) = Trace(tmp_path / "trace").requests()
    assert record.id == "1"
    assert record.prompt_ids is not None
    assert record.output_ids is not None
    assert len(record.output_ids) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/nowhere"], "nowhere"),
        (["--acceptance-table", "--verification", "rejection"], "coupled"),
        (["--policy", "static:eagle:3"], "eagle"),
        (["--json", "/nowhere/r.json"], "cannot be written"),
        (["--batch-size", "0"], "max_batch_size=0"),
    ],
)
def test_a_recording_that_cannot_be_leaves_nothing(
    command: Command, tmp_path: Path, arguments: Sequence[str], said: str
) -> None:
    code, _, err = command("record", "text", "--output", tmp_path / "trace", *arguments)
    assert code == 2
    assert said in err
    assert is_one_line(err)
    assert not (tmp_path / "trace").exists()


# ---- inspect


def test_inspect_says_the_same_to_people_and_machines(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code, out, err = command("inspect", "bundled:mixed", "--json", path)
    record = read(path)
    assert (code, err) == (0, "")
    assert f"{record['num_requests']} requests" in out
    assert f"{record['num_steps']} steps in {record['duration_seconds']:.2f} s" in out
    for name, arm in record["arms"].items():
        assert f"{name}: chosen {arm['times_chosen']} times" in out
    assert out.count("mostly") == len(record["regimes"])

    name = Trace(bundled_trace("mixed")).requests()[3].id
    code, out, _ = command("inspect", "bundled:mixed", "--request", name, "--json", path)
    assert code == 0
    assert read(path)["lines"] == out.splitlines()
    assert out.startswith(f"request {name} arrived")


# ---- exactly


def test_an_exact_replay_says_where_decisions_differ(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("replay", "bundled:static", "--exact", "--json", tmp_path / "a.json")
    assert code == 0
    assert "as recorded" in out
    assert read(tmp_path / "a.json")["traces"][0]["is_exact"] is True

    shutil.copytree(bundled_trace("static"), tmp_path / "other")
    header = read_header(tmp_path / "other")
    write_header(tmp_path / "other", header.model_copy(update={"policy": {"kind": "off"}}))
    arguments = ["replay", tmp_path / "other", "bundled:static", "--exact"]
    code, out, _ = command(*arguments, "--json", tmp_path / "b.json")
    other, same = read(tmp_path / "b.json")["traces"]
    assert code == 1
    assert (other["is_exact"], same["is_exact"]) == (False, True)
    assert f"{other['num_differences']} of" in out
    assert re.search(r"step \d+, plan: recorded \[.*draft_model:3.*replayed \[.*off\]", out)


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "bundled:off"], "record it with an acceptance table"),
        (["replay", "bundled:mixed", "--policy", "static:eagle:3"], "no acceptance for ['eagle']"),
        (["replay", "bundled:mixed", "--policy", "goodputt"], "did you mean 'goodput'"),
        (["replay", "bundled:mixed", "--policy", "off", "--policy", "off"], "twice"),
        (["replay", "bundled:mixed", "bundled:mixed"], "twice"),
        (["replay", "bundled:mixd"], "choose from"),
        (["replay", "/nowhere"], "does not exist"),
        (["replay", "bundled:mixed", "--load", "0"], "--load"),
        (["replay", "bundled:mixed", "--load", "nan"], "--load"),
        (["replay", "bundled:mixed", "--seeds", "0"], "--seeds"),
        (["replay", "bundled:mixed", "--noise", "2"], "--noise"),
        (["replay", "bundled:mixed", "--slo-ttft", "-1"], "--slo-ttft"),
        (["replay", "bundled:mixed", "--model", "llama-3.1-8b"], "--hardware"),
        (["replay", "bundled:mixed", "--hardware", "h100-sxm"], "--model"),
        (["replay", "bundled:mixed", "--hardware", "h1000"], "did you mean"),
        (["replay", "bundled:mixed", "--exact", "--policy", "off"], "--exact"),
        (
            ["replay", "bundled:off", "--exact", "--load", "2", "--seeds", "3", "--workers", "1"],
            "leave out --load, --seeds, --workers",
        ),
        (["replay", "bundled:off", "--exact", "--slo-tpot", "1", "--format", "trace"], "--format"),
        (["replay", "bundled:mixed", "--tensor-parallel", "1"], "without --hardware; give that"),
        (
            ["replay", "bundled:mixed", "--hardware", "h100", "--draft-model", "llama-3.2-1b"],
            "--draft-model: of no use without --model",
        ),
        (["replay", "bundled:mixed", "--json", "/nowhere/x.json"], "cannot be written"),
        (["replay", "bundled:mixed", "--json", "OUT/x", "--html", "OUT/x"], "another output"),
        (["train", "bundled:mixed", "-o", "OUT/p.skops", "--json", "OUT/p.skops"], "another"),
        (["replay", "bundled:mixed", "--arrivals", "/nowhere"], "does not exist"),
        (["replay", "bundled:mixed", "--ray", "127.0.0.1:1"], "no cluster answers"),
        (["inspect", "bundled:mixed", "--request", "nobody"], "no request 'nobody'"),
        (["inspect", "/nowhere"], "no trace"),
        (["inspect", "n" * 300], "cannot be read: File name too long"),
        (["inspect", "bundled:mixed", "--json", "n" * 300], "cannot be used: File name too long"),
        (["replay", "/dev/null", "--format", "azure"], "/dev/null is no plain file"),
        (["train", "bundled:off", "-o", "OUT/p.skops"], "train on traces that drafted"),
        (["train", "bundled:mixed", "-o", "OUT/p.pickle"], ".skops"),
        (["train", "bundled:mixed", "-o", "/nowhere/p.skops"], "cannot be written"),
        (["train", "bundled:mixed", "bundled:mixed", "-o", "OUT/p.skops"], "twice"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    command: Command, tmp_path: Path, arguments: Sequence[str], said: str
) -> None:
    if any("127.0.0.1" in word for word in arguments):
        pytest.importorskip("ray", reason="Ray is not installed")
    code, out, err = command(*(word.replace("OUT", str(tmp_path)) for word in arguments))
    assert (code, out) == (2, "")
    assert is_one_line(err)
    assert said in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["trace.json", "steps.parquet"])
def test_a_result_never_replaces_a_part_of_the_trace(
    command: Command, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "trace"
    shutil.copytree(bundled_trace("mixed"), path)
    before = (path / name).read_bytes()
    for verb in (["inspect"], ["train", "-o", tmp_path / "p.skops"], ["replay", "--exact"]):
        code, _, err = command(verb[0], path, *verb[1:], "--json", path / name)
        assert code == 2
        assert "would replace what is read" in err
    assert (path / name).read_bytes() == before
    assert command("inspect", path, "--json", path / "summary.json")[0] == 0


def test_a_copy_of_a_trace_is_not_trained_on_beside_it(command: Command, tmp_path: Path) -> None:
    """Its requests would be judged by what was learnt of themselves."""
    shutil.copytree(bundled_trace("mixed"), tmp_path / "copy")
    code, _, err = command("train", "bundled:mixed", tmp_path / "copy", "-o", tmp_path / "p.skops")
    assert (code, "twice, perhaps as a copy" in err) == (2, True)


@pytest.mark.parametrize("verb", [["inspect"], ["replay"], ["replay", "--exact"], ["train"]])
@pytest.mark.parametrize("name", ["trace.json", "steps.parquet", "acceptance.parquet"])
def test_a_damaged_trace_is_refused(
    command: Command, tmp_path: Path, verb: Sequence[str], name: str
) -> None:
    path = tmp_path / "trace"
    shutil.copytree(bundled_trace("mixed"), path)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    more = ["-o", tmp_path / "p.skops"] if verb == ["train"] else []
    code, out, err = command(verb[0], path, *verb[1:], *more)
    assert (code, out) == (2, "")
    assert is_one_line(err)


@pytest.mark.parametrize("verb", [["inspect"], ["replay"], ["replay", "--exact"], ["train"]])
def test_a_link_that_leads_to_itself_is_refused(
    command: Command, tmp_path: Path, verb: Sequence[str]
) -> None:
    path = tmp_path / "loop"
    path.symlink_to("loop")
    more = ["-o", tmp_path / "p.skops"] if verb == ["train"] else []
    code, _, err = command(verb[0], path, *verb[1:], *more, "--json", tmp_path / "out.json")
    assert code == 2
    assert is_one_line(err)


# ---- train


def test_a_trained_policy_can_be_replayed(command: Command, tmp_path: Path) -> None:
    policy, path = tmp_path / "policy.skops", tmp_path / "out.json"
    code, out, err = command("train", "bundled:mixed", "-o", policy, "--json", path)
    record = read(path)
    assert (code, err) == (0, "")
    scores = record["scores"]
    assert f"log loss {scores['learned_log_loss']:.4f}" in out
    assert f"alone {scores['online_log_loss']:.4f}" in out
    assert f"median error {scores['learned_step_error']:.1%}" in out
    assert record["is_better_than_online"] == ("beware: it foresees acceptance" not in out)
    assert record["prices_better_than_online"] == ("beware: it prices steps" not in out)
    assert f"also from {record['num_drawn_steps']} steps with drafters and lengths drawn" in out
    assert "must not be used" in out
    for name, (low, high) in record["limits"].items():
        assert low < high
        assert f"{name} above {high:.0f}" in out
    assert f"drafters other than {', '.join(record['arms'])}" in out
    assert {"draft_model", "ngram"} <= set(record["arms"])
    assert load(policy).acceptance.keys() == record["weights"].keys()
    arguments = ["replay", "bundled:mixed", *HERE, "--policy", f"learned:{policy}"]
    assert command(*arguments)[0] == 0


def test_every_weight_and_bound_has_a_name() -> None:
    view = BatchView(0, (RequestView("r", 5, 1, 9, drafters=("ngram",)),), 99)
    assert features(view, "ngram", np.full((1, 2), 0.5)).shape[2] == len(FEATURES)
    model, report = learn([MIXED])
    assert len(model.low) == len(model.high) == len(SITUATION)
    assert all(set(weights) == set(FEATURES) for weights in report.weights.values())
    assert math.isfinite(report.scores.learned_log_loss)
    with pytest.raises(ConfigError, match="at least 2"):
        learn([[]])
