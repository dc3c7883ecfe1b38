"""What a drafter is: it is asked for guesses, and told what was committed.

Knows nothing of policies (how many tokens: they are told), of verification, or of the paged cache.

A drafter of your own is a subclass of `Drafter` with one method:

    class RepeatLast(Drafter):
        name = "repeat_last"

        def propose(self, tasks, keep_drafting):
            return [Draft.chain([t.request.tokens[-1]] * t.num_draft_tokens) for t in tasks]
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sdcontrol.core import Hint, family_of

if TYPE_CHECKING:
    import torch

__all__ = ["Draft", "DraftInFull", "DraftRequest", "DraftTask", "Drafter", "KeepDrafting"]

ROOT = -1
"""The parent of a draft's first nodes: the last committed token."""


class Draft(NamedTuple):
    """A tree of draft tokens in one best-first order: a parent stands before its children.

        tokens   7  9  3  4        root ─ 7 ─ 9 ─ 4
        parents -1  0 -1  1             └ 3

    `confidence[i]`, in [0, 1], is the drafter's own belief that node `i` is accepted if its parent
    is. `distribution` is `[nodes, vocab]`, the law that each token was drawn from; None: the token
    was chosen without chance. With one, a node's confidence must not depend on what was drawn there.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    distribution: "torch.Tensor | None" = None

    @staticmethod
    def chain(
        tokens: Sequence[int],
        confidence: Sequence[float] = (),
        distribution: "torch.Tensor | None" = None,
    ) -> "Draft":
        """A draft in which every token follows the one before it."""
        return Draft(tuple(tokens), _chain(len(tokens)), tuple(confidence), distribution)

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return tuple(self.parents) == _chain(len(self.parents))

    @property
    def num_settled(self) -> int:
        """How many nodes must be verified once so many are drafted.

        Of drawn ones all but the last. The confidence of a node depends on the tokens above it: who
        drops one of those by it keeps some tokens more often than others, and the text no longer
        follows the target's law.
        """
        return 0 if self.distribution is None else len(self.tokens) - 1

    def truncated(self, num_nodes: int) -> "Draft":
        """The first `num_nodes` nodes."""
        if num_nodes >= len(self.tokens):
            return self
        return Draft(
            self.tokens[:num_nodes],
            self.parents[:num_nodes],
            self.confidence[:num_nodes],
            None if self.distribution is None else self.distribution[:num_nodes],
        )


class DraftRequest(Protocol):
    """What a drafter sees of a request: its id, and its committed tokens, prompt first."""

    @property
    def id(self) -> str:
        """Unique among the requests of an engine."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output so far. Read only; grows between steps."""
        ...


class DraftTask(NamedTuple):
    """Draft up to `num_draft_tokens` nodes for `request` with `arm`."""

    request: DraftRequest
    arm: str
    num_draft_tokens: int


@cache
def _chain(num_nodes: int) -> tuple[int, ...]:
    """The parents of nodes that follow each other."""
    return tuple(range(ROOT, num_nodes - 1))


KeepDrafting = Callable[[Sequence[Draft]], Sequence[int]]
"""Given the drafts so far, aligned with the tasks: how many nodes each may have in the end."""


class DraftInFull:
    """A `KeepDrafting` that stops nobody: who sees it need not ask, nor know the drafts so far."""

    def __init__(self, tasks: Sequence[DraftTask]) -> None:
        self._limits = [task.num_draft_tokens for task in tasks]

    def __call__(self, drafts: Sequence[Draft]) -> Sequence[int]:
        """As many as were asked for."""
        return self._limits


class Drafter(ABC):
    """Guesses the next tokens of requests."""

    name: str
    """The arm that a policy chooses; arms that share the part before ":" share a drafter."""

    is_free: bool = False
    """Whether drafting costs next to nothing, so that it may be asked only to see how it would
    have done: such a drafter is scored in shadow while others, or none, are used."""

    def __init_subclass__(cls, **options: object) -> None:
        """What a class says of one request holds for many too, whatever a base says of many."""
        super().__init_subclass__(**options)
        own = vars(cls)
        if "offers" not in own and ("arms_for" in own or "hint" in own):
            cls.offers = Drafter.offers  # type: ignore[method-assign]
        if "commit_all" not in own and "commit" in own:
            cls.commit_all = Drafter.commit_all  # type: ignore[method-assign]

    @property
    def arms(self) -> tuple[str, ...]:
        """The names under which a policy may choose this drafter."""
        return (self.name,)

    @property
    def family(self) -> str:
        """What is priced and quarantined as one."""
        return family_of(self.name)

    def start(self, request: DraftRequest) -> None:  # noqa: B027  (optional)
        """A request was submitted."""

    def arms_for(self, request: DraftRequest) -> tuple[str, ...]:
        """Which arms this request may use now."""
        return self.arms

    def hint(self, request: DraftRequest, arm: str) -> Hint | None:
        """What is known before drafting."""
        return None

    def offers(self, requests: Sequence[DraftRequest]) -> Sequence[Mapping[str, Hint | None]]:
        """For each request the arms that it may use now, with what is known before drafting.

        Overridden where many are quicker told of at once: it must say what `arms_for` and `hint` do.
        What is a `MappingProxyType` is looked at once, and must never change.
        """
        return [
            {arm: self.hint(request, arm) for arm in self.arms_for(request)} for request in requests
        ]

    @abstractmethod
    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> Sequence[Draft]:
        """One draft per task, in order, of at most `task.num_draft_tokens` nodes; empty is fine.

        A drafter that works in rounds calls `keep_drafting` between them and stops early where it
        is told; others need not.
        """

    def commit(self, request: DraftRequest, num_new_tokens: int) -> None:  # noqa: B027  (optional)
        """The last `num_new_tokens` of `request.tokens` are new."""

    def commit_all(self, committed: Sequence[tuple[DraftRequest, int]]) -> None:
        """`commit` of several requests, none twice, each with its number of new tokens.

        Overridden where many are quicker told of at once.
        """
        for request, num_new_tokens in committed:
            self.commit(request, num_new_tokens)

    def lose_cache(self, request: DraftRequest) -> None:  # noqa: B027  (optional)
        """The request was preempted: what a model of the drafter's had cached for it is gone."""

    def finish(self, request: DraftRequest) -> None:  # noqa: B027  (optional)
        """The request ended: forget it."""
