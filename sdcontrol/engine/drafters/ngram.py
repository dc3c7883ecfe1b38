"""Draft what followed the latest tokens when the text last said them.

Knows nothing of models, tensors or policies. One index per request over prompt and output; the
longest suffix match wins, and among its occurrences the most recent. The match is found while the
index is updated (`commit`), so `hint` and `propose` only read it: no scan of the context. Of all
requests of a step at once, that is one compiled call.

A continuation that runs into the end of the text goes on with its own tokens, so that loops and
repeated rows give drafts as long as asked:

    text   ... a b c a b c        match "a b c", its continuation "a b c" ends with the text
    draft                   a b c a b c a ...

Occurrences that went on differently make a tree, where `max_branches` allows.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Never

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import Hint
from sdcontrol.engine.drafters.base import Draft, Drafter, DraftRequest, DraftTask, KeepDrafting
from sdcontrol.engine.drafters.ngram_index import NgramIndex, extend_all
from sdcontrol.engine.drafters.ngram_tree import TreeShape, confidence_of, num_grown, tree_shape
from sdcontrol.engine.drafters.ngram_trie import Found
from sdcontrol.errors import ConfigError, DrafterFault

__all__ = ["MAX_DRAFT_TOKENS", "NgramDrafter", "matched_lengths"]

MAX_DRAFT_TOKENS = 32
"""Nodes that one draft may have."""

_OCCURRENCES = 2  # of a match are looked at, or as many as may branch
_MOST_MATCHES = 1024  # that are kept
_FEWEST_AT_ONCE = 12  # requests for which one call is quicker than one for each
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
        self._matches: dict[Found, _Match] = {}

    def start(self, request: DraftRequest) -> None:
        """Index the prompt: about 0.1 microseconds for each token."""
        index = NgramIndex(
            self.max_match,
            request.tokens,
            most=self._most_occurrences,
            look_ahead=MAX_DRAFT_TOKENS,
        )
        self._tracked[request.id] = _Tracked(index, self._match(index.found))

    def hint(self, request: DraftRequest, arm: str) -> Hint:
        """What the next `propose` of this step can offer, exactly; `confidence` of its first node."""
        tracked = self._tracked.get(request.id) or self._unknown(request)
        return tracked.match.hint

    def offers(self, requests: Sequence[DraftRequest]) -> Sequence[Mapping[str, Hint | None]]:
        """The hint of each request; one object where it is the same."""
        tracked = self._tracked
        return [(tracked.get(r.id) or self._unknown(r)).match.offer for r in requests]

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> Sequence[Draft]:
        """The continuation of each task's longest match, nodes in order of their survival."""
        drafts, get = [], self._tracked.get
        for request, _, num_draft_tokens in tasks:
            tracked = get(request.id) or self._unknown(request)
            match, index = tracked.match, tracked.index
            most = match.hint.max_draft_tokens or 0
            num_nodes = num_draft_tokens if num_draft_tokens < most else most
            if num_nodes <= 0:
                drafts.append(_NO_DRAFT)
                continue
            shape = match.shapes.get(num_nodes) or self._new_shape(index, match, num_nodes)
            drafts.append(Draft(shape.take(index.runs), shape.parents, shape.confidence))
        return drafts

    def commit(self, request: DraftRequest, num_new_tokens: int) -> None:
        """Index the new tokens, and with the last of them find the next match."""
        tracked = self._tracked.get(request.id) or self._unknown(request)
        if tracked.index.num_tokens + num_new_tokens != len(request.tokens):
            self._miscounted(request, num_new_tokens)
        tracked.index.extend_to(request.tokens)
        tracked.match = self._match(tracked.index.found)

    def commit_all(self, committed: Sequence[tuple[DraftRequest, int]]) -> None:
        """Index the new tokens of all requests: one compiled call."""
        if len(committed) < _FEWEST_AT_ONCE:
            for request, num_new in committed:
                self.commit(request, num_new)
            return
        grown = []
        for request, num_new in committed:
            tracked = self._tracked.get(request.id) or self._unknown(request)
            if tracked.index.num_tokens + num_new != len(request.tokens):
                self._miscounted(request, num_new)
            grown.append(tracked)
        extend_all([tracked.index for tracked in grown], [r.tokens for r, _ in committed])
        for tracked in grown:
            tracked.match = self._match(tracked.index.found)

    def finish(self, request: DraftRequest) -> None:
        """Free the request's index."""
        self._tracked.pop(request.id, None)

    def _unknown(self, request: DraftRequest) -> Never:
        raise DrafterFault(
            f"{self.name}: request {request.id!r} is unknown; call start before drafting"
        )

    def _miscounted(self, request: DraftRequest, num_new_tokens: int) -> Never:
        num_tokens = self._tracked[request.id].index.num_tokens + num_new_tokens
        raise DrafterFault(
            f"{self.name}: request {request.id!r} has {len(request.tokens)} tokens, {num_tokens} "
            "were committed; commit every new token once"
        )

    def _match(self, found: Found) -> "_Match":
        """What a look-up comes to; the same few come again and again."""
        return self._matches.get(found) or self._new_match(found)

    def _new_match(self, found: Found) -> "_Match":
        match_tokens, num_occurrences, num_alike, _ = found
        hint = _NO_HOPE
        if match_tokens >= self.min_match:
            confidence = confidence_of(match_tokens, num_alike, num_occurrences - 1 - num_alike)
            hint = Hint(MAX_DRAFT_TOKENS, match_tokens, confidence)
        if len(self._matches) >= _MOST_MATCHES:
            self._matches.clear()
        self._matches[found] = match = _Match(hint, MappingProxyType({self.name: hint}), {})
        return match

    def _new_shape(self, index: NgramIndex, match: "_Match", num_nodes: int) -> TreeShape:
        """The shape of a draft; kept with the match where that says all that it hangs on."""
        match_tokens, num_occurrences, _, _ = index.found
        partings = index.partings(num_grown(num_nodes))
        shape = tree_shape(
            match_tokens, partings, num_nodes, self.max_branches, self._most_occurrences
        )
        if num_occurrences <= _OCCURRENCES:
            match.shapes[num_nodes] = shape
        return shape


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


class _Match(NamedTuple):
    """What a look-up comes to."""

    hint: Hint
    offer: Mapping[str, Hint]
    shapes: dict[int, TreeShape]  # of drafts, by their nodes


class _Tracked:
    """A request's index, and what its latest look-up came to."""

    __slots__ = ("index", "match")

    def __init__(self, index: NgramIndex, match: _Match) -> None:
        self.index = index
        self.match = match
