"""The bundled models are small, whole, and as good as their card says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcontrol.engine.bundled import (
    KINDS,
    bundled_path,
    corpus,
    held_out_documents,
    held_out_prompts,
    load_bundled,
    load_bundled_tokenizer,
)
from sdcontrol.engine.bundled.corpus import load_corpus
from sdcontrol.errors import ConfigError, UnknownName

FOLDER = bundled_path("target").parent
TOKENIZER = load_bundled_tokenizer()


def test_target_has_four_to_seven_million_parameters_and_draft_under_one() -> None:
    assert 4e6 <= load_bundled("target").num_parameters() <= 7e6
    assert load_bundled("draft").num_parameters() < 1e6


def test_shipped_files_take_at_most_sixteen_megabytes() -> None:
    folders = ("target", "draft", "tokenizer")
    files = [path for name in folders for path in (FOLDER / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000


def test_weights_are_bf16_safetensors() -> None:
    import torch

    for name in ("target", "draft"):
        assert [path.name for path in bundled_path(name).glob("*.safetensors")]
        assert {p.dtype for p in load_bundled(name).parameters()} == {torch.bfloat16}


def test_models_share_the_vocabulary_and_accept_2048_tokens() -> None:
    for name in ("target", "draft"):
        config = load_bundled(name).config
        assert config.vocab_size == len(TOKENIZER)
        assert config.eos_token_id == TOKENIZER.eos_token_id == 0
        assert config.max_position_embeddings >= 2048


@given(st.text())
@settings(deadline=None)
def test_tokenizer_returns_the_text_it_was_given(text: str) -> None:
    """Apart from the text of the end token itself, which stands for the token."""
    if "<|eos|>" not in text:
        assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_the_same_for_a_seed_and_differ_between_seeds(kind: str) -> None:
    assert held_out_prompts(kind, 4) == held_out_prompts(kind, 4)
    assert held_out_prompts(kind, 4) != held_out_prompts(kind, 4, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_end_where_the_tokens_of_the_answer_begin(kind: str) -> None:
    """The tokens of a prompt are the first tokens of the whole document, as in the training."""
    for document in held_out_documents(kind, 60):
        prompt, whole = TOKENIZER(document.prompt).input_ids, TOKENIZER(document.text).input_ids
        assert whole[: len(prompt)] == prompt


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_can_be_asked_to_be_long(kind: str) -> None:
    for prompt in held_out_prompts(kind, 4, min_tokens=700):
        assert len(TOKENIZER(prompt).input_ids) >= 700


def test_unknown_names_and_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UnknownName, match="choose from"):
        bundled_path("other")
    with pytest.raises(UnknownName, match="choose from"):
        held_out_prompts("poems", 1)
    with pytest.raises(ConfigError, match="negative"):
        held_out_prompts("code", -1)
    with pytest.raises(ConfigError, match="above 4096"):
        held_out_prompts("code", 1, min_tokens=5000)


def test_asking_for_prompts_needs_no_torch() -> None:
    program = (
        "import sys, sdcontrol.engine.bundled as b; b.held_out_prompts('code', 1); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_python_without_its_librarys_source_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    load_corpus.cache_clear()
    try:
        with pytest.raises(ConfigError, match="without its standard library's source"):
            held_out_prompts("code", 1)
    finally:
        load_corpus.cache_clear()


@pytest.mark.parametrize(("name", "bound"), [("target", 2.2), ("draft", 3.2)])
def test_loss_on_held_out_text_is_what_the_card_says(name: str, bound: float) -> None:
    import torch

    model = load_bundled(name)
    losses = []
    with torch.no_grad():
        for kind in KINDS:
            for document in held_out_documents(kind, 3):
                ids = torch.tensor([TOKENIZER(document.text).input_ids[:512]])
                losses.append(model(ids, labels=ids).loss.item())
    assert sum(losses) / len(losses) < bound


def test_target_repeats_a_passage() -> None:
    """Given the passage and its copy so far, the next token is nearly always the right one."""
    import torch

    model, right, total = load_bundled("target"), 0, 0
    for document in held_out_documents("copy", 8):
        prompt, ids = (TOKENIZER(text).input_ids for text in (document.prompt, document.text))
        with torch.no_grad():
            choices = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        wanted = ids[len(prompt) :]
        right += sum(a == b for a, b in zip(choices[len(prompt) - 1 :], wanted, strict=False))
        total += len(wanted)
    assert right / total > 0.8


def test_a_smoke_run_trains_and_writes_a_pair(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sdcontrol.engine.bundled.train", "--smoke", "--device", "cpu"]
    subprocess.run([*command, "--output", str(tmp_path)], check=True, timeout=600)
    for name in ("target", "draft"):
        assert (tmp_path / name / "model.safetensors").exists()
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"target", "draft", "tokenizer", "progress.json"}  # nothing half done
    assert json.loads((tmp_path / "progress.json").read_text())["steps"] > 0
