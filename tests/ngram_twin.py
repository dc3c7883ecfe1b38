"""The n-gram index in plain lists and a dict: what the compiled one is compared with.

Knows nothing of arrays: the same trie, whose nodes are entries of lists and whose children are
keys of a dict.
"""

from collections.abc import Iterable

__all__ = ["TwinIndex"]

_STRIDE = 4_294_967_311  # a prime above 2**32: a child's key is node * _STRIDE + token
_BEFORE_TEXT = _STRIDE - 1  # stands `max_match` times before the text and equals no token


class TwinIndex:
    """Longest suffix matches of a growing text, most recent occurrence first."""

    def __init__(self, max_match: int, tokens: Iterable[int] = ()) -> None:
        self.max_match = max_match
        # The first `max_match` entries of the lists by position stand for what is before the text.
        self._text = [_BEFORE_TEXT] * max_match
        self._earlier = [0] * max_match  # by position: where the longest match ended before
        self._matches = [0] * max_match  # by position: length of that match; 0: none
        # Node 0 is the root. Lengths are those of the run, `max_match` for a leaf.
        self._children: dict[int, int] = {}
        self._latest = [0]
        self._lengths = [0]
        self.extend(tokens)

    @property
    def match_tokens(self) -> int:
        """Length of the longest suffix, up to `max_match`, that also stands earlier; 0: none."""
        return self._matches[-1]

    def occurrences(self, most: int) -> tuple[int, ...]:
        """Where that suffix ended before, the latest first; empty: it never did.

        The first is the most recent of all. Each further one is the most recent that shares with
        the one before it as much as any does: none is missed that stands alone, and the rest are
        a selection.
        """
        matches, earlier, ahead = self._matches, self._earlier, self.max_match
        length, entry = matches[-1], -1
        found: list[int] = []
        while len(found) < most and length and matches[entry] >= length:
            entry = earlier[entry]
            found.append(entry - ahead)
        return tuple(found)

    def continuations(self, positions: Iterable[int], num_tokens: int) -> list[list[int]]:
        """The `num_tokens` tokens after each of the positions, none of which is the last.

        Where the text ends, those up to there are repeated.
        """
        text, runs = self._text, []
        for position in positions:
            start = position + self.max_match + 1
            run = text[start : start + num_tokens]
            if len(run) < num_tokens:
                run = (run * (num_tokens // len(run) + 1))[:num_tokens]
            runs.append(run)
        return runs

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens` to the text."""
        text, earlier, matches = self._text, self._earlier, self._matches
        latest, lengths, children = self._latest, self._lengths, self._children
        get, max_match = children.get, self.max_match
        position = len(text) - 1
        for token in tokens:
            text.append(token)
            position += 1
            node = length = before = 0
            while length < max_match:
                key = node * _STRIDE + text[position - length]
                child = get(key)
                if child is None:
                    children[key] = len(latest)
                    latest.append(position)
                    lengths.append(max_match)
                    break
                before, longer = latest[child], lengths[child]
                if longer - length > 1 and (
                    text[position - longer + 1 : position - length]
                    != text[before - longer + 1 : before - length]
                ):
                    length = self._split(key, child, position, length + 1)
                    break
                latest[child] = position
                node, length = child, longer
            earlier.append(before)
            matches.append(length)

    def _split(self, key: int, child: int, position: int, length: int) -> int:
        """Part `child` where the run before `position` leaves it: the length they share."""
        text, latest, lengths = self._text, self._latest, self._lengths
        before = latest[child]
        while text[position - length] == text[before - length]:
            length += 1
        parting = len(latest)
        self._children[key] = parting
        latest += (position, position)
        lengths += (length, self.max_match)
        self._children[parting * _STRIDE + text[before - length]] = child
        self._children[parting * _STRIDE + text[position - length]] = parting + 1
        return length
