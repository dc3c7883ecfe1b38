"""A small target and draft model with their tokenizer, and the script that trained them.

`MODEL_CARD.md` beside this file says what they learned and how well. Importing this module imports
no torch; loading a model does.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from sdcontrol.engine.bundled.corpus import Corpus, Document, load_corpus
from sdcontrol.engine.bundled.data import KINDS, document
from sdcontrol.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = [
    "KINDS",
    "Document",
    "bundled_path",
    "held_out_documents",
    "held_out_prompts",
    "load_bundled",
    "load_bundled_tokenizer",
]

_MODELS = ("target", "draft")
_CHARACTERS_PER_TOKEN = 4.5  # no long text of any kind has more
_CONTEXT = 4096  # the most that the models accept
_SIZES = (300, 1500)  # characters in a prompt of no wanted length


def bundled_path(name: str) -> Path:
    """The folder of a bundled model, "target" or "draft". Raises `UnknownName` for another name."""
    if name not in _MODELS:
        raise UnknownName(f"no bundled model {name!r}; choose from {', '.join(_MODELS)}")
    return Path(__file__).parent / name


def load_bundled(
    name: str = "target", *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> LlamaForCausalLM:
    """A bundled model, ready to run; bf16 unless `dtype` says otherwise."""
    path = bundled_path(name)
    from sdcontrol.engine.bundled import models

    return models.moved(models.load(path, dtype or models.DTYPE), device)


def load_bundled_tokenizer() -> PreTrainedTokenizerFast:
    """The one tokenizer of both models; it pads on the left, as generation needs."""
    from transformers import PreTrainedTokenizerFast

    folder = Path(__file__).parent / "tokenizer"
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
        folder, padding_side="left"
    )
    return tokenizer


def held_out_prompts(kind: str, count: int, *, seed: int = 0, min_tokens: int = 0) -> list[str]:
    """Prompts of one of `KINDS` that no bundled model was trained on.

    They are 300 to 1500 characters long, or somewhat above `min_tokens` if that is given, and the
    same for the same seed and Python version. Needs the standard library alone. Raises
    `UnknownName` for another kind, `ConfigError` for a number out of range.
    """
    documents = held_out_documents(kind, count, seed=seed, min_tokens=min_tokens)
    return [document.prompt for document in documents]


def held_out_documents(
    kind: str, count: int, *, seed: int = 0, min_tokens: int = 0
) -> list[Document]:
    """Like `held_out_prompts`, with what a perfect model would answer."""
    if kind not in KINDS:
        raise UnknownName(f"no kind of prompt {kind!r}; choose from {', '.join(KINDS)}")
    if count < 0 or not 0 <= min_tokens <= _CONTEXT:
        raise ConfigError(
            f"count is {count}, min_tokens is {min_tokens}; neither may be negative, "
            f"nor min_tokens above {_CONTEXT}"
        )
    corpus, rng = load_corpus(held_out=True), random.Random(f"{kind} {seed}")
    if not (corpus.code and corpus.functions and corpus.prose):
        raise ConfigError(
            "this Python comes without its standard library's source, which bundled prompts are made of; give "
            "prompts of your own, or use a Python that has it"
        )
    return [_sized(kind, corpus, rng, min_tokens) for _ in range(count)]


def _sized(kind: str, corpus: Corpus, rng: random.Random, min_tokens: int) -> Document:
    if min_tokens == 0:
        return document(kind, corpus, rng, rng.randint(*_SIZES))
    wanted = size = int(min_tokens * _CHARACTERS_PER_TOKEN)
    while len((found := document(kind, corpus, rng, size)).prompt) < wanted:
        size += size // 10 + 1
    return found
