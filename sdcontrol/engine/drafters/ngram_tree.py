"""The best tree of draft tokens out of several occurrences of one match.

Knows runs of tokens that followed the same words; nothing of requests or of where runs come from.

    runs       a b c d        tree   a ─ b ─ c ─ d
               a b x y               │   └ x ─ y
               a b c z               each node as likely as its votes say
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from sdcontrol.engine.drafters.base import ROOT

__all__ = ["TreeShape", "confidence_of", "num_grown", "tree_shape"]

_HALF_TRUST_TOKENS = 1.7  # a single occurrence is right half the time at this match length
_SECOND_GUESS = 0.2  # P(another occurrence's token is right, given that the first guess is wrong)


def confidence_of(match_tokens: int, num_alike: int, num_different: int) -> float:
    """P(the latest occurrence's next token is right), in (0, 1).

    A single occurrence is trusted by its length; each other occurrence is one vote. The constants
    were fitted to recorded outputs (`benchmarks/ngram.py`).
    """
    alone = match_tokens / (match_tokens + _HALF_TRUST_TOKENS)
    return (alone + num_alike) / (1 + num_alike + num_different)


Tokens = Sequence[int] | memoryview


class TreeShape(NamedTuple):
    """A tree but for its tokens."""

    parents: tuple[int, ...]
    confidence: tuple[float, ...]  # of each node, given its parent
    take: Callable[[Tokens], tuple[int, ...]]  # its tokens, out of the runs' rows


def num_grown(num_nodes: int) -> int:
    """Nodes of the tree from which one of `num_nodes` is cut: the next power of two."""
    return 1 << (num_nodes - 1).bit_length()


@lru_cache(maxsize=4096)
def tree_shape(
    match_tokens: int,
    partings: tuple[tuple[int, int], ...],
    num_nodes: int,
    max_branches: int,
    width: int,
) -> TreeShape:
    """The `num_nodes` likeliest nodes, of runs that stand side by side in rows of `width` tokens.

    `partings`: for each run but the first the earlier run that it follows furthest, and how far, up
    to `num_grown(num_nodes)`. Few distinct shapes exist: they are kept, and cut from even fewer.
    """
    nodes = _grown(match_tokens, partings, num_grown(num_nodes), max_branches)[:num_nodes]
    return TreeShape(
        tuple([node.parent for node in nodes]),
        tuple([node.confidence for node in nodes]),
        _taker([node.depth * width + node.run for node in nodes]),
    )


@lru_cache(maxsize=1024)
def _grown(
    match_tokens: int, partings: tuple[tuple[int, int], ...], num_nodes: int, max_branches: int
) -> "list[_Node]":
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

    def grown(self, num_nodes: int) -> list[_Node]:
        """The first `num_nodes` nodes."""
        node = _Node(-1.0, 0, 0, -1, ROOT, 1.0, tuple(range(len(self._partings) + 1)))
        nodes: list[_Node] = []
        queue: list[_Node] = []
        while len(nodes) < num_nodes:
            for child in self._children(node, len(nodes) - 1):
                heappush(queue, child)
            node = heappop(queue)
            nodes.append(node)
        return nodes

    def _children(self, node: _Node, place: int) -> Iterator[_Node]:
        """One for each way that the node's runs go on, the latest occurrence's first."""
        depth = node.depth + 1
        ways: dict[int, list[int]] = {}
        for run in node.runs:
            ways.setdefault(self._first_through(run, depth), []).append(run)
        num_alike = len(next(iter(ways.values()))) - 1
        num_different = len(node.runs) - 1 - num_alike
        confidence = confidence_of(self._match_tokens + depth, num_alike, num_different)
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


def _taker(places: list[int]) -> Callable[[Tokens], tuple[int, ...]]:
    """What picks the tokens at `places`."""
    if len(places) == 1:
        return lambda tokens: (tokens[places[0]],)
    return itemgetter(*places)
