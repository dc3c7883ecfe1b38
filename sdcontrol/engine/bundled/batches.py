"""From documents to rows of token ids: the tokenizer, and the packing of a mixture into batches.

A row begins with the beginning of a document and holds documents, each followed by `<|eos|>`, until
it is full; the last one is cut. So every token of a row has its whole context, which an edit or a
copy could not be learned without.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from sdcontrol.engine.bundled.corpus import Corpus
from sdcontrol.engine.bundled.data import KINDS, document

EOS = "<|eos|>"
EOS_ID = 0
VOCABULARY = 4096
SHARES: Mapping[str, float] = {
    "code": 0.36,
    "prose": 0.10,
    "edit": 0.18,
    "copy": 0.14,
    "records": 0.11,
    "logs": 0.11,
}
# A word with its space, at most two digits, a run of signs, white space but its last character.
_WORD = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CHARACTERS_PER_TOKEN = 6  # more than any text has over a row's length; bounds the work of encoding


def train_tokenizer(corpus: Corpus, seed: int) -> Tokenizer:
    """A byte-level BPE of the corpus and of some of every generated kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(corpus, random.Random(seed)), trainer)
    return tokenizer


def _tokenizer_texts(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    yield from corpus.code
    yield from corpus.prose
    for kind in ("records", "logs"):
        for _ in range(400):
            yield document(kind, corpus, rng, 1000).text


class Mixture:
    """An endless supply of batches in which every kind has its share of the tokens."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        seed: int | str,
        shares: Mapping[str, float] = SHARES,
    ) -> None:
        self._corpus, self._tokenizer, self._shares = corpus, tokenizer, shares
        self._rng = random.Random(seed)
        self._seen: Counter[str] = Counter()

    def batch(self, rows: int, length: int) -> Tensor:
        """Token ids `[rows, length]`."""
        return torch.tensor([self._row(length) for _ in range(rows)])

    def _row(self, length: int) -> list[int]:
        row: list[int] = []
        while len(row) < length:
            kind = self._next_kind()
            ids = self._ids(kind, length - len(row), length)
            self._seen[kind] += len(ids)
            row += ids
        return row

    def _next_kind(self) -> str:
        """The kind that lacks most tokens, with some chance in it."""
        total = self._seen.total() + 1
        lack = {k: share * total - self._seen[k] for k, share in self._shares.items()}
        return max(lack, key=lambda kind: lack[kind] * self._rng.random())

    def _ids(self, kind: str, room: int, length: int) -> list[int]:
        size = math.exp(self._rng.uniform(math.log(100), math.log(1.3 * length)))
        text = document(kind, self._corpus, self._rng, int(size)).text
        ids: list[int] = self._tokenizer.encode(text[: room * _CHARACTERS_PER_TOKEN]).ids
        return [*ids, EOS_ID][:room]


def held_out_batch(
    corpus: Corpus, tokenizer: Tokenizer, *, kind: str, rows: int, length: int, seed: int
) -> Tensor:
    """Rows of one kind alone, the same for the same seed."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    return Mixture(corpus, tokenizer, seed, {kind: 1.0}).batch(rows, length)
