"""Text from tokens as they come.

A character may be cut in two by a token's end; it is held back until it is whole.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer"]

_CUT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 8  # decoded again with what follows, so that spaces between tokens come out right


class Detokenizer:
    """The text of one request, piece by piece; without a tokenizer it is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # settled context, then tokens not yet shown whole
        self._shown = ""  # what of the window's text is out already

    def add(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """The new text that `tokens` bring."""
        if self._tokenizer is None:
            return ""
        self._window.extend(tokens)
        text = self._decode(self._window)
        if not is_last and text.endswith(_CUT):
            return ""
        new = text[len(self._shown) :]
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._shown = self._decode(self._window)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
