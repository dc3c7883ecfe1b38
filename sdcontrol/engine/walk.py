"""One request's part of a verification step, and its way down the draft.

Knows nothing of the rule by which draft tokens are accepted: verifiers have that.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from sdcontrol.engine.copies import upload
from sdcontrol.engine.drafters.base import ROOT, Draft
from sdcontrol.engine.sampling import Row, RowSampler

__all__ = ["Asked", "Verdict", "VerifyTask", "Walk", "depths_of", "take_rows"]

_NO_DRAFT = Draft()


class VerifyTask(NamedTuple):
    """One request's part of a verification step.

    Its rows of the step's logits: `first_row` follows the last committed token, and
    `first_row + 1 + i` follows node `i` of the draft.
    """

    sampler: RowSampler
    tokens: Sequence[int]  # committed ones, prompt first
    draft: Draft | None
    first_row: int
    drafter: str = ""


class Verdict(NamedTuple):
    """What became of one draft."""

    accepted_nodes: tuple[int, ...]  # the accepted path, from the root
    next_token: int  # the target's, after that path: correction or bonus; -1: see `check_sample`


class Asked(NamedTuple):
    """Verdicts that were asked for, one per task."""

    read: Callable[[], list[Verdict]]  # waits for the device where that decides
    tokens: Tensor | None = (
        None  # int64 `[tasks]`, there already: each one's next; None: on the host alone
    )


class Walk:
    """A task's way down its draft, from the last committed token to the first rejection."""

    __slots__ = ("draft", "next_token", "path", "task")

    def __init__(self, task: VerifyTask) -> None:
        self.task = task
        self.draft = task.draft or _NO_DRAFT
        self.path: list[int] = []
        self.next_token = 0  # meaningful once the walk has ended

    @property
    def node(self) -> int:
        """The last accepted node, or `ROOT`."""
        return self.path[-1] if self.path else ROOT

    @property
    def logits_row(self) -> int:
        """The row of the step's logits that follows the last accepted node."""
        return self.task.first_row + 1 + self.node

    @property
    def position(self) -> int:
        """The number of tokens up to the last accepted node: where the next one goes."""
        return len(self.task.tokens) + len(self.path)

    @property
    def all_rows(self) -> range:
        """The rows of the step's logits that belong to this task."""
        first = self.task.first_row
        return range(first, first + 1 + len(self.draft.tokens))

    def open_rows(self) -> dict[int, Row]:
        """The rows that can be computed now, by their index in the step's logits.

        All of them, unless processors look at the prefix: then one at a time, along the path.
        """
        task, draft = self.task, self.draft
        if task.sampler.needs_prefix:
            prefix = tuple(draft.tokens[node] for node in self.path)
            return {self.logits_row: Row(task.sampler, task.tokens, prefix)}
        prefixes: list[tuple[int, ...]] = [()]  # prefixes[i + 1] leads to node i; root first
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            prefixes.append((*prefixes[parent + 1], token))
        rows = (Row(task.sampler, task.tokens, prefix) for prefix in prefixes)
        return dict(enumerate(rows, task.first_row))

    def verdict(self) -> Verdict:
        """What came of it."""
        return Verdict(tuple(self.path), self.next_token)


def depths_of(draft: Draft) -> list[int]:
    """How many nodes stand above each."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths


def take_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows of `logits`; no copy where they are all of them, in order."""
    if rows == list(range(len(logits))):
        return logits
    return logits[upload(np.array(rows, dtype=np.int64), logits.device)]
