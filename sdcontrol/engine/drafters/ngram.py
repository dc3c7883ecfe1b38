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
from sdcontrol.engine.drafters.ngram_tree import confidence_of, tree_shape
from sdcontrol.engine.drafters.ngram_trie import Found
from sdcontrol.errors import ConfigError, DrafterFault

__all__ = ["MAX_DRAFT_TOKENS", "NgramDrafter", "matched_lengths"]

MAX_DRAFT_TOKENS = 32
"""Nodes that one draft may have."""

_OCCURRENCES = 2  # of a match are looked at, or as many as may branch
_MOST_HINTS = 4096  # that are kept
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
        self._hints: dict[Found, Hint] = {}

    def start(self, request: DraftRequest) -> None:
        """Index the prompt: about 0.1 microseconds for each token."""
        index = NgramIndex(
            self.max_match,
            request.tokens,
            most=self._most_occurrences,
            look_ahead=MAX_DRAFT_TOKENS,
        )
        self._tracked[request.id] = _Tracked(index, self._new_hint(index.found))

    def hint(self, request: DraftRequest, arm: str) -> Hint:
        """What the next `propose` of this step can offer, exactly; `confidence` of its first node."""
        tracked = self._tracked.get(request.id) or self._unknown(request)
        return tracked.hint

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> Sequence[Draft]:
        """The continuation of each task's longest match, nodes in order of their survival."""
        drafts = []
        for task in tasks:
            tracked = self._tracked.get(task.request.id) or self._unknown(task.request)
            most = tracked.hint.max_draft_tokens or 0
            num_nodes = task.num_draft_tokens if task.num_draft_tokens < most else most
            drafts.append(self._draft(tracked.index, num_nodes) if num_nodes > 0 else _NO_DRAFT)
        return drafts

    def commit(self, request: DraftRequest, num_new_tokens: int) -> None:
        """Index the new tokens, and with the last of them find the next match."""
        tracked = self._tracked.get(request.id) or self._unknown(request)
        index, tokens = tracked.index, request.tokens
        num_tokens = index.num_tokens + num_new_tokens
        if num_tokens != len(tokens):
            raise DrafterFault(
                f"{self.name}: request {request.id!r} has {len(tokens)} tokens, {num_tokens} were "
                "committed; commit every new token once"
            )
        index.extend_to(tokens)
        tracked.hint = self._hints.get(index.found) or self._new_hint(index.found)

    def finish(self, request: DraftRequest) -> None:
        """Free the request's index."""
        self._tracked.pop(request.id, None)

    def _unknown(self, request: DraftRequest) -> Never:
        raise DrafterFault(
            f"{self.name}: request {request.id!r} is unknown; call start before drafting"
        )

    def _new_hint(self, found: Found) -> Hint:
        """What a look-up comes to; the same few come again and again."""
        match_tokens, num_occurrences, num_alike, _ = found
        hint = _NO_HOPE
        if match_tokens >= self.min_match:
            confidence = confidence_of(match_tokens, num_alike, num_occurrences - 1 - num_alike)
            hint = Hint(MAX_DRAFT_TOKENS, match_tokens, confidence)
        if len(self._hints) >= _MOST_HINTS:
            self._hints.clear()
        self._hints[found] = hint
        return hint

    def _draft(self, index: NgramIndex, num_nodes: int) -> Draft:
        parted = index.partings(num_nodes)
        shape = tree_shape(
            index.found[0], parted, num_nodes, self.max_branches, self._most_occurrences
        )
        tokens = shape.take(index.continuations(num_nodes))
        return Draft(tokens, shape.parents, shape.confidence)


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
    index = NgramIndex(max_match, tokens)
    return index.followed(prompt_length, min(max_draft, MAX_DRAFT_TOKENS), min_match)


def _check_settings(max_match: int, min_match: int, max_branches: int) -> None:
    if not 1 <= min_match <= max_match:
        raise ConfigError(
            f"min_match {min_match}, max_match {max_match}: need 1 <= min_match <= max_match"
        )
    if max_branches < 1:
        raise ConfigError(f"max_branches {max_branches}: at least 1, which makes chains")


class _Tracked:
    """A request's index, and what its latest look-up came to."""

    __slots__ = ("hint", "index")

    def __init__(self, index: NgramIndex, hint: Hint) -> None:
        self.index = index
        self.hint = hint
