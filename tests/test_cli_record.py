"""What `sdcontrol record` and `generate` tell their planners of the engine."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from sdcontrol.controller import Controller
from sdcontrol.engine.parts import EngineParts
from sdcontrol.traces.header import read_header
from tests.cli_support import Command, command_of
from tests.engine_support import tiny_model
from tests.tokenizer_support import byte_tokenizer

EDGES = (8, 64)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """On a machine whose graphs have these sizes."""
    monkeypatch.setattr(EngineParts, "token_edges", EDGES)
    return command_of(capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model that writes bytes."""
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = byte_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_recording_keeps_the_sizes_of_the_graphs_and_replays(
    command: Command, model: Path, tmp_path: Path
) -> None:
    """Without them a replay would price forwards otherwise, and decide otherwise."""
    trace = tmp_path / "trace"
    options = ["--model", model, "--max-new-tokens", 24, "--output", trace]
    assert command("record", *options, "abcabcabc", "xyxyxyxy")[0] == 0
    controller = read_header(trace).controller
    assert controller is not None
    assert controller.token_edges == EDGES
    assert command("replay", trace, "--exact")[0] == 0


def test_generate_tells_its_planner_of_the_graphs(
    command: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Sequence[int]] = []
    monkeypatch.setattr(Controller, "pad_to", lambda self, token_edges: told.append(token_edges))
    assert command("generate", "--model", model, "--max-new-tokens", 2, "abc")[0] == 0
    assert told == [EDGES]


def test_a_folder_in_use_is_refused_before_models_are_loaded(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("")
    code, _, err = command("record", "--model", "/nowhere", "--output", tmp_path, "text")
    assert code == 2
    assert "is not empty; record into a new folder" in err
    assert (tmp_path / "mine").exists()
