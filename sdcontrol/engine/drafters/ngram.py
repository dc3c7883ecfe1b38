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

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple, Never

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import Hint
from sdcontrol.engine.drafters.base import (
    ROOT,
    Draft,
    Drafter,
    DraftRequest,
    DraftTask,
    KeepDrafting,
)
from sdcontrol.engine.drafters.ngram_index import NgramIndex
from sdcontrol.errors import ConfigError, DrafterFault

__all__ = ["MAX_DRAFT_TOKENS", "NgramDrafter", "matched_lengths"]

MAX_DRAFT_TOKENS = 32
"""Nodes that one draft may have."""

_OCCURRENCES = 3  # of a match are looked at, or as many as may branch
_HALF_TRUST_TOKENS = 1.7  # a single occurrence is right half the time at this match length
_SECOND_GUESS = 0.2  # P(another occurrence's token is right, given that the first guess is wrong)
_NO_DRAFT = Draft()
_NO_HOPE = Hint(max_draft_tokens=0, match_tokens=0, confidence=0.0)


class NgramDrafter(Drafter):
    """Copies the continuation of the longest earlier match of the text's last tokens.

    `max_match` bounds the tokens compared; matches shorter than `min_match` offer no draft;
    `max_branches` bounds the children of a node, 1 makes chains only. Raises `ConfigError` for
    settings that contradict each other, `DrafterFault` for a request that was never started.
    """

    def __init__(
        self, *, name: str = "ngram", max_match: int = 16, min_match: int = 1, max_branches: int = 3
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
        partings = _partings(runs) if len(runs) > 1 else ()
        shape = _shape(tracked.match_tokens, partings, num_nodes, self.max_branches)
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
    confidence = _confidence(match_tokens, num_alike, num_different)
    return Hint(MAX_DRAFT_TOKENS, match_tokens, confidence)


def _confidence(match_tokens: int, num_alike: int, num_different: int) -> float:
    """P(the latest occurrence's next token is right), in (0, 1).

    A single occurrence is trusted by its length; each other occurrence is one vote. The constants
    were fitted to recorded outputs (`benchmarks/ngram.py`).
    """
    alone = match_tokens / (match_tokens + _HALF_TRUST_TOKENS)
    return (alone + num_alike) / (1 + num_alike + num_different)


def _partings(runs: Sequence[list[int]]) -> tuple[tuple[int, int], ...]:
    """For each run but the first: the earlier run that it follows furthest, and how far."""
    partings = []
    for number in range(1, len(runs)):
        run, furthest, beside = runs[number], 0, 0
        for other in range(number):
            if run[furthest] == runs[other][furthest]:  # it cannot share more where this differs
                shared = _num_shared(run, runs[other])
                if shared > furthest:
                    furthest, beside = shared, other
                    if shared == len(run):
                        break
        partings.append((beside, furthest))
    return tuple(partings)


def _num_shared(run: list[int], other: list[int]) -> int:
    if run == other:
        return len(run)
    shared = 0
    while run[shared] == other[shared]:
        shared += 1
    return shared


class _Shape(NamedTuple):
    """A tree but for its tokens."""

    parents: tuple[int, ...]
    confidence: tuple[float, ...]  # of each node, given its parent
    take: Callable[[list[list[int]]], tuple[int, ...]]  # its tokens, out of the runs


@lru_cache(maxsize=4096)
def _shape(
    match_tokens: int, partings: tuple[tuple[int, int], ...], num_nodes: int, max_branches: int
) -> _Shape:
    """The `num_nodes` likeliest nodes. Few distinct shapes exist: they are kept."""
    return _Tree(match_tokens, partings, max_branches).grown(num_nodes)


class _Node(NamedTuple):
    """A node of a growing tree. Orders by survival, then by age."""

    unlikeliness: float  # minus the survival: the product of confidence down from the root
    age: int  # how many nodes were thought of before it
    run: int  # the first run that passes through it
    depth: int  # 0: a child of the root
    parent: int
    confidence: float
    runs: tuple[int, ...]  # all that pass through it


class _Tree:
    """The tree that runs make which part from one another, grown by its likeliest node.

    Survival never grows downwards, so every prefix of the nodes is the best tree of its size.
    """

    def __init__(
        self, match_tokens: int, partings: tuple[tuple[int, int], ...], max_branches: int
    ) -> None:
        self._match_tokens = match_tokens
        self._partings = partings
        self._max_branches = max_branches
        self._num_thought_of = 0

    def grown(self, num_nodes: int) -> _Shape:
        """The first `num_nodes` nodes."""
        node = _Node(-1.0, 0, 0, -1, ROOT, 1.0, tuple(range(len(self._partings) + 1)))
        nodes: list[_Node] = []
        queue: list[_Node] = []
        while len(nodes) < num_nodes:
            for child in self._children(node, len(nodes) - 1):
                heappush(queue, child)
            node = heappop(queue)
            nodes.append(node)
        return _Shape(
            tuple(node.parent for node in nodes),
            tuple(node.confidence for node in nodes),
            _taker([(node.run, node.depth) for node in nodes]),
        )

    def _children(self, node: _Node, place: int) -> Iterator[_Node]:
        """One for each way that the node's runs go on, the latest occurrence's first."""
        depth = node.depth + 1
        ways: dict[int, list[int]] = {}
        for run in node.runs:
            ways.setdefault(self._first_through(run, depth), []).append(run)
        num_alike = len(next(iter(ways.values()))) - 1
        num_different = len(node.runs) - 1 - num_alike
        confidence = _confidence(self._match_tokens + depth, num_alike, num_different)
        missed = 1.0
        for run, runs in islice(ways.items(), self._max_branches):
            self._num_thought_of += 1
            unlikeliness, age = node.unlikeliness * confidence, self._num_thought_of
            yield _Node(unlikeliness, age, run, depth, place, confidence, tuple(runs))
            missed -= confidence
            confidence = min(confidence, missed * _SECOND_GUESS)

    def _first_through(self, run: int, depth: int) -> int:
        """The earliest run that has the same token as `run` at `depth`, and all before it."""
        while run and depth < self._partings[run - 1][1]:
            run = self._partings[run - 1][0]
        return run


def _taker(places: list[tuple[int, int]]) -> Callable[[list[list[int]]], tuple[int, ...]]:
    """What picks the tokens at `places`, (run, depth), out of runs as long as there are places."""
    if all(run == 0 for run, _ in places):
        return lambda runs: tuple(runs[0])
    pick = itemgetter(*(run * len(places) + depth for run, depth in places))
    return lambda runs: pick(list(chain.from_iterable(runs)))
