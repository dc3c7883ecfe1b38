"""Where did the text's latest tokens stand before? An index that answers without a scan.

Knows nothing of requests, drafts or confidence: tokens in, positions and what follows them out.
How a match is found is `ngram_trie`'s.
"""

from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import is_compiling
from sdcontrol.engine.drafters import ngram_trie as trie
from sdcontrol.errors import ConfigError

__all__ = ["NgramIndex", "extend_all"]

_FEWEST_SLOTS = 64
_MOST_TOKENS = 3 << 27  # positions, and where the parts of the memory start, take 32 bits


class NgramIndex:
    """Longest suffix matches of a growing text, most recent occurrence first.

    Tokens are numbers in [0, 2**32). Positions count tokens from 0. Adding a token costs the same
    after 1,000 tokens as after 100,000, except where twice the room is needed; a token takes 65 to
    130 bytes. Up to `most` occurrences of a match are looked up, and compared by the `look_ahead`
    tokens after them. Raises `ConfigError` for other tokens, and for more than 400 million.
    """

    __slots__ = (
        "_address",
        "_capacity",
        "_memory",
        "_most",
        "_numbers",
        "_size",
        "_text",
        "found",
        "num_tokens",
        "runs",
    )

    def __init__(
        self, max_match: int, tokens: Sequence[int] = (), *, most: int = 2, look_ahead: int = 32
    ) -> None:
        self._make_room(len(tokens), min(max_match, _MOST_TOKENS), most, look_ahead)
        self.num_tokens = 0
        self.found: trie.Found = (0, 0, 0, 0)
        self.extend(tokens)

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def match_tokens(self) -> int:
        """Length of the longest suffix, up to `max_match`, that also stands earlier; 0: none."""
        return self.found[0]

    @property
    def occurrences(self) -> tuple[int, ...]:
        """Where that suffix ended before, the latest first; empty: it never did.

        The first is the most recent of all. Each further one is the most recent that shares with
        the one before it as much as any does: none is missed that stands alone, and the rest are
        a selection.
        """
        return tuple(self._numbers[trie.FOUND : trie.FOUND + 3 * self.found[1] : 3])

    def partings(self, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """For each occurrence but the first: the earlier one that it follows furthest, and how far.

        Up to `num_tokens`, at most `look_ahead`.
        """
        _, num_occurrences, _, num_shared = self.found
        if num_occurrences < 2:
            return ()
        if num_occurrences == 2:
            return ((0, num_shared if num_shared < num_tokens else num_tokens),)
        end = trie.FOUND + 3 * num_occurrences
        _, *beside = self._numbers[trie.FOUND + trie.BESIDE : end : 3].tolist()
        _, *shared = self._numbers[trie.FOUND + trie.SHARED : end : 3].tolist()
        return tuple([(run, min(far, num_tokens)) for run, far in zip(beside, shared, strict=True)])

    def continuations(self, num_tokens: int) -> list[int]:
        """The `num_tokens` tokens after each occurrence, `[num_tokens, most]`, row by row.

        At most `look_ahead`. Where the text ends, those up to there are repeated.
        """
        tokens: list[int] = self.runs[: self._most * num_tokens].tolist()
        return tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text, and look up where its suffix stood before."""
        first, end = self.num_tokens, self.num_tokens + len(tokens)
        if end > self._capacity:
            self._grow(end)
        try:
            self._text[first:end] = array("I", tokens)
        except OverflowError as error:
            raise _outside(tokens) from error
        self.num_tokens = end
        self.found = trie.add_tokens(self._memory, first, end)

    def extend_to(self, tokens: Sequence[int]) -> None:
        """Append what `tokens` has beyond its first, which are the text. Quicker for a few."""
        position = first = self.num_tokens
        end = len(tokens)
        if end > self._capacity:
            self._grow(end)
        text = self._text
        try:
            while position < end:
                text[position] = tokens[position]
                position += 1
        except ValueError as error:
            raise _outside(tokens[first:]) from error
        self.num_tokens = end
        self.found = trie.add_tokens(self._memory, first, end)

    def followed(self, first: int, most: int, min_match: int) -> NDArray[np.int64]:
        """For positions from `first` on: tokens there that are what followed the match before them.

        Up to `most` tokens that a continuation and the text have in common; 0 where the match is
        shorter than `min_match`.
        """
        counts = np.zeros(self.num_tokens - first, np.int64)
        trie.count_followed(self._memory, first, most, min_match, counts)
        return counts

    def _grow(self, num_tokens: int) -> None:
        smaller = self._memory
        settings = self._numbers[trie.MAX_MATCH : trie.FOUND].tolist()
        self._make_room(num_tokens, *settings)
        trie.move(smaller, self._memory, self.num_tokens)

    def _make_room(self, num_tokens: int, max_match: int, most: int, look_ahead: int) -> None:
        """Fresh memory for `num_tokens` or more: nodes will fill three quarters of it at most."""
        if num_tokens > _MOST_TOKENS:
            raise ConfigError(f"{num_tokens} tokens; an n-gram index holds {_MOST_TOKENS} at most")
        slots = _FEWEST_SLOTS
        while 3 * slots // 8 < num_tokens:
            slots *= 2
        self._capacity = 3 * slots // 8
        runs = trie.FOUND + 3 * most
        text = runs + look_ahead * most
        links = text + self._capacity
        table = links + 2 * self._capacity
        memory = np.zeros(table + trie.WIDTH * slots, np.uint32)
        self._numbers = numbers = memory.data.cast("B").cast("I")
        self._memory = memory if is_compiling else cast(trie.Memory, numbers)
        header = (runs, text, links, table, slots, max_match, most, look_ahead)
        numbers[: trie.FOUND] = array("I", header)
        self._address, self._size = memory.ctypes.data, memory.size
        self._text = numbers[text:links]
        self.runs = numbers[runs:text]  # the tokens after each occurrence, `[look_ahead, most]`
        self._most = most


def extend_all(indexes: Sequence[NgramIndex], texts: Sequence[Sequence[int]]) -> None:
    """`extend_to` for many at once: one compiled call. Raises `ConfigError` before any is extended.

    No index may stand twice among them. One by one where nothing is compiled.
    """
    if not is_compiling:
        for index, tokens in zip(indexes, texts, strict=True):
            index.extend_to(tokens)
        return
    new: list[int] = []
    for index, tokens in zip(indexes, texts, strict=True):
        if len(tokens) > index._capacity:
            index._grow(len(tokens))
        new += tokens[index.num_tokens :]
    try:
        numbers = np.frombuffer(array("I", new), np.uint32)
    except OverflowError as error:
        raise _outside(new) from error
    places = [
        *[index._address for index in indexes],
        *[index._size for index in indexes],
        *[index.num_tokens for index in indexes],
        *map(len, texts),
    ]
    found = np.empty((4, len(indexes)), np.int64)
    trie.add_all(np.frombuffer(array("q", places), np.int64).reshape(4, -1), numbers, found)
    looked_up = zip(*found.tolist(), strict=True)
    for index, tokens, index.found in zip(indexes, texts, looked_up, strict=True):
        index.num_tokens = len(tokens)


def _outside(tokens: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"tokens {min(tokens)} to {max(tokens)}; an n-gram index takes 0 to 2**32 - 1"
    )
