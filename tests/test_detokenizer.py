"""Text that comes piece by piece is the text of the whole."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sdcontrol.integrations.detokenizer import Detokenizer
from tests.tokenizer_support import byte_tokenizer, marker_tokenizer, piece_tokenizer

BYTES, MARKERS, PIECES = byte_tokenizer(), marker_tokenizer(), piece_tokenizer()
CUT = "\N{REPLACEMENT CHARACTER}"


def whole(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def pieces(
    tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], sizes: Sequence[int]
) -> list[str]:
    """The text as it comes when so many tokens come at a time, over and over."""
    detokenizer, texts, start, turn = Detokenizer(tokenizer), [], 0, 0
    while start < len(tokens):
        end = start + sizes[turn % len(sizes)]
        texts.append(detokenizer.add(tokens[start:end], is_last=end >= len(tokens)))
        start, turn = end, turn + 1
    return texts


def token_lists(tokenizer: PreTrainedTokenizerFast) -> st.SearchStrategy[list[int]]:
    """Any tokens, and those below 13 as often as the rest, the special ones as well."""
    size = len(tokenizer)
    token = st.integers(0, size - 1) | st.integers(0, min(size, 13) - 1)
    return st.lists(token, max_size=40) | st.lists(token, min_size=30, max_size=60)


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)
check = settings(max_examples=150)


@check
@given(token_lists(BYTES), SIZES)
def test_bytes_of_any_kind_come_out_as_they_decode(tokens: list[int], sizes: list[int]) -> None:
    assert "".join(pieces(BYTES, tokens, sizes)) == whole(BYTES, tokens)


@check
@given(st.text(max_size=30), SIZES)
@example("naïve 😀😀 — 日本語", [1])
def test_a_character_comes_when_it_is_whole(text: str, sizes: list[int]) -> None:
    """The tokens of a text, one or some at a time: no piece has half a character."""
    tokens = BYTES(text)["input_ids"]
    texts = pieces(BYTES, tokens, sizes)
    assert "".join(texts) == whole(BYTES, tokens)
    assert CUT in text or not any(CUT in piece for piece in texts)


@check
@given(token_lists(MARKERS), SIZES)
@example([2, 266, 266, 266, 3, 266, 3], [1])  # special tokens between words
@example([2, 10 + 0xC3, 10 + 0xA9, 10 + 0xFF, 3], [1])  # a wrong byte spoils those before it
@example([10, 266, 138], [1])  # also with a special token between them
@example([2, *[10 + byte for byte in "日本語".encode()] * 3, 3], [2])
def test_leading_markers_and_bytes_come_out_as_they_decode(
    tokens: list[int], sizes: list[int]
) -> None:
    assert "".join(pieces(MARKERS, tokens, sizes)) == whole(MARKERS, tokens)


@check
@given(token_lists(PIECES), SIZES)
@example([9, 7, 7, 9, 6, 6], [1])  # n't ' ' n't , ,
def test_text_that_is_cleaned_up_comes_out_as_it_decodes(
    tokens: list[int], sizes: list[int]
) -> None:
    assert "".join(pieces(PIECES, tokens, sizes)) == whole(PIECES, tokens)


@pytest.mark.parametrize("tokenizer", [BYTES, MARKERS], ids=["bytes", "markers"])
def test_what_is_whole_is_not_held_back(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = BYTES("plain words")["input_ids"] if tokenizer is BYTES else [2, 3, 4, 5, 6]
    detokenizer = Detokenizer(tokenizer)
    said = ""
    for end, token in enumerate(tokens, start=1):
        said += detokenizer.add([token])
        assert said == whole(tokenizer, tokens[:end])


def test_the_text_before_a_cut_character_is_not_held_back() -> None:
    tokens = BYTES("ab😀")["input_ids"]
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.add(tokens[:3]), detokenizer.add(tokens[3:])] == ["ab", "😀"]


def test_a_step_decodes_a_few_tokens_however_long_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[int] = []
    decode: Callable[..., str] = BYTES.decode

    def counting(tokens: list[int], **options: object) -> str:
        decoded.append(len(tokens))
        return decode(tokens, **options)

    monkeypatch.setattr(BYTES, "decode", counting)
    detokenizer = Detokenizer(BYTES)
    for token in BYTES("word " * 100)["input_ids"]:
        detokenizer.add([token])
    assert len(decoded) >= 500
    assert max(decoded) <= 8


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert Detokenizer(None).add([1, 2, 3], is_last=True) == ""
