"""Draft what followed the latest tokens when the text last said them.

Knows nothing of models, tensors or policies. One index per request over prompt and output; the
longest suffix match wins, and among its occurrences the most recent. The match is found while the
index is updated (`commit`), so `hint` and `propose` only read it: no scan of the context.

A continuation that runs into the end of the text goes on with its own tokens, so that loops and
repeated rows give drafts as long as asked:

    text   ... a b c a b c        match "a b c", its continuation "a b c" ends with the text
    draft                   a b c a b c a ...

Occurrences that went on differently make a tree, where `max_branches` allows.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Never

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import Hint
from sdcontrol.engine.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    DraftTask,
    KeepDrafting,
)
from sdcontrol.engine.drafters.ngram_index import NgramIndex
from sdcontrol.engine.drafters.ngram_tree import confidence_of, partings, tree_shape
from sdcontrol.errors import ConfigError, DrafterFault

__all__ = ["MAX_DRAFT_TOKENS", "NgramDrafter", "matched_lengths"]

MAX_DRAFT_TOKENS = 32
"""Nodes that one draft may have."""

_OCCURRENCES = 2  # of a match are looked at, or as many as may branch
_NO_DRAFT = Draft()
_NO_HOPE = Hint(max_draft_tokens=0, match_tokens=0, confidence=0.0)


class NgramDrafter(Drafter):
    """Copies the continuation of the longest earlier match of the text's last tokens.

    `max_match` bounds the tokens compared; matches shorter than `min_match` offer no draft;
    `max_branches` bounds the children of a node, 1 makes chains only. Raises `ConfigError` for
    settings that contradict each other, `DrafterFault` for a request that was never started.
    """

    is_free = True

    def __init__(
        self, *, name: str = "ngram", max_match: int = 16, min_match: int = 1, max_branches: int = 2
    ) -> None:
        _check_settings(max_match, min_match, max_branches)
        self.name = name
        self.max_match = max_match
        self.min_match = min_match
        self.max_branches = max_branches
        self._most_occurrences = max(_OCCURRENCES, max_branches)
        self._tracked: dict[str, _Tracked] = {}

    def start(self, request: DraftRequest) -> None:
        """Index the prompt: about 1 microsecond for each token."""
        self._tracked[request.id] = _Tracked(NgramIndex(self.max_match, map(int, request.tokens)))

    def hint(self, request: DraftRequest, arm: str) -> Hint:
        """What the next `propose` of this step can offer, exactly; `confidence` of its first node."""
        tracked = self._tracked.get(request.id) or self._unknown(request)
        return tracked.hint or self._look_up(tracked)

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> Sequence[Draft]:
        """The continuation of each task's longest match, nodes in order of their survival."""
        drafts = []
        for task in tasks:
            tracked = self._tracked.get(task.request.id) or self._unknown(task.request)
            hint = tracked.hint or self._look_up(tracked)
            num_nodes = min(task.num_draft_tokens, hint.max_draft_tokens or 0)
            drafts.append(self._draft(tracked, num_nodes) if num_nodes > 0 else _NO_DRAFT)
        return drafts

    def commit(self, request: DraftRequest, num_new_tokens: int) -> None:
        """Index the new tokens, and with the last of them find the next match."""
        tracked = self._tracked.get(request.id) or self._unknown(request)
        tracked.hint = None
        index, tokens = tracked.index, request.tokens
        if num_new_tokens:
            index.extend(map(int, tokens[-num_new_tokens:]))
        if len(index) != len(tokens):
            raise DrafterFault(
                f"{self.name}: request {request.id!r} has {len(tokens)} tokens, {len(index)} were "
                "committed; commit every new token once"
            )

    def finish(self, request: DraftRequest) -> None:
        """Free the request's index."""
        self._tracked.pop(request.id, None)

    def _unknown(self, request: DraftRequest) -> Never:
        raise DrafterFault(
            f"{self.name}: request {request.id!r} is unknown; call start before drafting"
        )

    def _look_up(self, tracked: "_Tracked") -> Hint:
        index = tracked.index
        tracked.match_tokens = match_tokens = index.match_tokens
        if match_tokens < self.min_match:
            tracked.hint = _NO_HOPE
            return _NO_HOPE
        tracked.occurrences = occurrences = index.occurrences(self._most_occurrences)
        num_alike, num_others = 0, len(occurrences) - 1
        if num_others:
            tokens = index.next_tokens(occurrences)
            num_alike = tokens.count(tokens[0]) - 1
        tracked.hint = hint = _hint(match_tokens, num_alike, num_others - num_alike)
        return hint

    def _draft(self, tracked: "_Tracked", num_nodes: int) -> Draft:
        runs = tracked.index.continuations(tracked.occurrences, num_nodes)
        parted = partings(runs) if len(runs) > 1 else ()
        shape = tree_shape(tracked.match_tokens, parted, num_nodes, self.max_branches)
        return Draft(shape.take(runs), shape.parents, shape.confidence)


def matched_lengths(
    tokens: Sequence[int],
    prompt_length: int,
    max_draft: int,
    *,
    max_match: int = 16,
    min_match: int = 1,
) -> NDArray[np.int64]:
    """Draft tokens of a chain that a recorded output would have accepted, `[output positions]`.

    Entry `j` compares the chain of up to `max_draft` tokens drafted after
    `tokens[:prompt_length + j]` with the tokens that follow there: exact under greedy decoding,
    and for the recorded sample under coupled verification. It never counts past the end of
    `tokens`. Raises `ConfigError`.
    """
    _check_settings(max_match, min_match, 1)
    if not 0 <= prompt_length <= len(tokens) or max_draft < 0:
        raise ConfigError(
            f"prompt_length {prompt_length} of {len(tokens)} tokens, max_draft {max_draft}; the "
            "prompt is a part of the tokens, and no length is negative"
        )
    text, most = list(map(int, tokens)), min(max_draft, MAX_DRAFT_TOKENS)
    index = NgramIndex(max_match, text[:prompt_length])
    lengths = np.zeros(len(text) - prompt_length, dtype=np.int64)
    for position in range(prompt_length, len(text)):
        if index.match_tokens >= min_match:
            (occurrence,) = index.occurrences(1)
            lengths[position - prompt_length] = _num_accepted(text, position, occurrence, most)
        index.extend(text[position : position + 1])
    return lengths


def _check_settings(max_match: int, min_match: int, max_branches: int) -> None:
    if not 1 <= min_match <= max_match:
        raise ConfigError(
            f"min_match {min_match}, max_match {max_match}: need 1 <= min_match <= max_match"
        )
    if max_branches < 1:
        raise ConfigError(f"max_branches {max_branches}: at least 1, which makes chains")


def _num_accepted(text: list[int], position: int, occurrence: int, most: int) -> int:
    """How far the text from `position` on is what followed `occurrence`, up to `most` tokens."""
    source, period = occurrence + 1, position - 1 - occurrence
    most = min(most, len(text) - position)
    for step in range(most):
        if text[source + step % period] != text[position + step]:
            return step
    return most


class _Tracked:
    """A request's index, and this step's look-up once it was made."""

    __slots__ = ("hint", "index", "match_tokens", "occurrences")

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.hint: Hint | None = None
        self.match_tokens = 0
        self.occurrences: tuple[int, ...] = ()  # where the match ended before, latest first


@lru_cache(maxsize=4096)
def _hint(match_tokens: int, num_alike: int, num_different: int) -> Hint:
    confidence = confidence_of(match_tokens, num_alike, num_different)
    return Hint(MAX_DRAFT_TOKENS, match_tokens, confidence)
