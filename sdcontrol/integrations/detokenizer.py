"""Text from tokens as they come.

Concatenated, the pieces are what the tokenizer decodes from the whole output. Knows nothing of
requests or engines.
"""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer"]

_CUT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CLEANED = re.compile(r" (?:n'?|'[a-z]?)?\Z")
"""An end of text that clean-up may still change: it drops spaces before full stops and "n't"."""


class Detokenizer:
    """The text of one request, piece by piece; without a tokenizer it is empty.

    What later tokens may still change is held back: a character cut in two, a run of byte tokens
    (one wrong byte spoils all of it), a space that clean-up may remove.

        all tokens  | said long ago | context | not all said |
        window                      ^ decoded again, so that spaces between tokens come out right
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._special = _special_tokens(tokenizer)
        self._tokens: list[int] = []
        self._window = 0  # where it starts
        self._settled = 0  # tokens whose text is said; they become the context
        self._said_of_window = 0  # characters
        self._said: list[str] = []

    def add(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """The new text that `tokens` bring; with the last ones, all that is left."""
        if self._tokenizer is None:
            return ""
        self._tokens.extend(tokens)
        new = self._rest() if is_last else self._settled_text()
        self._said.append(new)
        return new

    def _settled_text(self) -> str:
        if not self._tokens or self._ends_in_byte_token():
            return ""
        text = self._decode(self._tokens[self._window :])
        stable = text[: self._stable_length(text)]
        new = stable[self._said_of_window :]
        self._said_of_window = max(self._said_of_window, len(stable))
        if new and len(stable) == len(text):
            self._move_window()
        return new

    def _move_window(self) -> None:
        """Let the window start where the tokens not said before this call started.

        That was between two characters.
        """
        context = self._decode(self._tokens[self._settled :])
        if self._can_stand_first(context):
            self._window, self._said_of_window = self._settled, len(context)
        self._settled = len(self._tokens)

    def _can_stand_first(self, context: str) -> bool:
        """Whether what follows decodes as it does after the whole text.

        At the start of a text spaces are not what they are elsewhere, so there must be more than
        those; and clean-up must find the same places in the context as in the whole.
        """
        if not self._cleans_up:
            return bool(context.strip())
        return context[:1].isalnum() and self._stable_length(context) == len(context)

    def _rest(self) -> str:
        """What the whole text has beyond what was said."""
        whole, said = self._decode(self._tokens), "".join(self._said)
        if whole.startswith(said):
            return whole[len(said) :]
        return self._decode(self._tokens[self._window :])[self._said_of_window :]

    def _stable_length(self, text: str) -> int:
        length = len(text.rstrip(_CUT))
        if self._cleans_up:
            cleaned = _CLEANED.search(text, 0, length)
            return cleaned.start() if cleaned else length
        return length

    def _ends_in_byte_token(self) -> bool:
        """Special tokens are not decoded, so a run of bytes goes on behind them."""
        assert self._tokenizer is not None
        shown = (token for token in reversed(self._tokens) if token not in self._special)
        last = next(shown, None)
        return last is not None and bool(
            _BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(last)))
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _special_tokens(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Those that a text leaves out."""
    if tokenizer is None:
        return frozenset()
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {token for token, kind in added if kind.special}
