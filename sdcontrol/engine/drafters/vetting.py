"""Is what a drafter answered possible at all?

Knows drafts, hints and tasks; nothing of what becomes of a drafter that fails. Looks at all answers
of a step together: that is quicker than one by one.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from types import MappingProxyType

import torch
from torch import Tensor

from sdcontrol.core import Hint, family_of
from sdcontrol.engine.drafters.base import ROOT, Draft, Drafter, DraftRequest, DraftTask
from sdcontrol.errors import DrafterFault

__all__ = ["Offer", "Offers", "check_arms", "check_drafts", "check_hint"]

Offer = tuple[tuple[str, ...], Mapping[str, Hint]]
"""The arms that a request may use now, and what is known of those of which anything is."""

_MOST_KEPT = 8192  # offers
_LAW_TOLERANCE = 1e-2  # of the sum of a row: a distribution may be in bfloat16


class Offers:
    """What the drafters of one engine offer, looked at before it counts.

    A `MappingProxyType` says that it never changes: it is looked at once, and what was joined of such
    ones is kept. Everything else is looked at each time.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[object, object, Offer]] = {}
        # ^ by what it was made of: a drafter and its answer, or two offers; held, so that no id comes again
        self._fixed: set[int] = set()  # of the offers that are kept

    def of(self, drafter: Drafter, requests: Sequence[DraftRequest]) -> list[Offer]:
        """What a drafter offers each request; raises `DrafterFault` unless all of it can be true.

        Requests whose answers are one object share an offer.
        """
        answers = drafter.offers(requests)
        if len(answers) != len(requests):
            raise DrafterFault(
                f"{len(answers)} offers, {len(requests)} requests; return one for each"
            )
        who, kept = id(drafter), self._kept.get
        found = [kept((who, id(answer))) for answer in answers]
        new: dict[int, Offer] = {}
        return [
            known[2]
            if known is not None
            else new.get(id(answer)) or self._new(drafter, answer, new)
            for known, answer in zip(found, answers, strict=True)
        ]

    def join(self, one: Offer, other: Offer) -> Offer:
        """Both together; the same object where both never change."""
        key = id(one), id(other)
        known = self._kept.get(key)
        if known is not None:
            return known[2]
        joined: Offer = one[0] + other[0], {**one[1], **other[1]}
        if self._fixed.issuperset(key):
            self._keep(key, (one, other, joined))
        return joined

    def _new(
        self, drafter: Drafter, answer: Mapping[str, Hint | None], new: dict[int, Offer]
    ) -> Offer:
        check_arms(drafter, answer)
        for hint in answer.values():
            check_hint(hint)
        known = {arm: hint for arm, hint in answer.items() if hint is not None}
        offer = new[id(answer)] = tuple(answer), known
        if type(answer) is MappingProxyType:
            self._keep((id(drafter), id(answer)), (drafter, answer, offer))
        return offer

    def _keep(self, key: tuple[int, int], entry: tuple[object, object, Offer]) -> None:
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
            self._fixed.clear()
        self._kept[key] = entry
        self._fixed.add(id(entry[2]))


def check_arms(drafter: Drafter, arms: Iterable[str]) -> None:
    """Raise `DrafterFault` unless all of `arms` are the drafter's."""
    for arm in arms:
        if arm not in drafter.arms or family_of(arm) != drafter.family:
            raise DrafterFault(f"{arm!r} is none of the arms {drafter.arms}")


def check_hint(hint: Hint | None) -> None:
    """Raise `DrafterFault` unless `hint` can be true."""
    if hint is None:
        return
    if not isinstance(hint, Hint):
        raise DrafterFault(f"a hint is a {type(hint).__name__}; return a Hint or None")
    most, matched, lag = hint.max_draft_tokens, hint.match_tokens, hint.catch_up_tokens
    if lag < 0 or (most is not None and most < 0) or (matched is not None and matched < 0):
        raise DrafterFault(f"{hint}: counts of tokens are at least 0")
    if hint.confidence is not None and not 0.0 <= hint.confidence <= 1.0:
        raise DrafterFault(f"{hint}: a confidence lies in [0, 1]")


def check_drafts(
    drafts: Sequence[Draft], tasks: Sequence[DraftTask], *, vocab_size: int, allow_trees: bool
) -> None:
    """Raise `DrafterFault` unless `drafts` are one possible answer to each of `tasks`.

    Where any has distributions, the host waits for the device once.
    """
    if len(drafts) != len(tasks):
        raise DrafterFault(f"{len(drafts)} drafts for {len(tasks)} tasks; return one per task")
    tokens: list[int] = []
    distinct: dict[int, Sequence[float]] = {}
    shapes: dict[int, Draft] = {}
    for draft, task in zip(drafts, tasks, strict=True):
        _check_sizes(draft, task.num_draft_tokens)
        tokens += draft.tokens
        distinct[id(draft.confidence)] = draft.confidence
        shapes[id(draft.parents)] = draft
    if tokens and not _are_tokens(tokens, vocab_size):
        raise DrafterFault(f"a draft token is no int in [0, {vocab_size}): {tokens}")
    confidence = [belief for row in distinct.values() for belief in row]
    if confidence and not _are_beliefs(confidence):
        raise DrafterFault(f"confidences {confidence} do not all lie in [0, 1]")
    trees = {number for number, draft in shapes.items() if not draft.is_chain}
    if trees:
        if not allow_trees:
            raise DrafterFault("this verification takes chains only, and a draft is a tree")
        for number in trees:
            _check_order(shapes[number].parents)
        _check_siblings([draft for draft in drafts if id(draft.parents) in trees])
    _check_laws(drafts, vocab_size)


def _check_sizes(draft: Draft, most: int) -> None:
    if not isinstance(draft, Draft):
        raise DrafterFault(f"a draft is a {type(draft).__name__}; return a Draft")
    tokens, parents, confidence, _ = draft
    nodes = len(tokens)
    if nodes > most:
        raise DrafterFault(f"{nodes} draft tokens where {most} were asked for")
    if len(parents) != nodes or len(confidence) not in (0, nodes):
        raise DrafterFault(
            f"{nodes} tokens, {len(parents)} parents, {len(confidence)} confidences; "
            "give one of each per node (confidence may be empty)"
        )


def _check_order(parents: Sequence[int]) -> None:
    if not all(ROOT <= parent < node for node, parent in enumerate(parents)):
        raise DrafterFault(f"parents {parents} do not stand before their children")


def _check_siblings(trees: Sequence[Draft]) -> None:
    for tokens, parents, _, _ in trees:
        nodes = len(tokens)
        if len({*tokens}) < nodes and len({*zip(parents, tokens, strict=True)}) < nodes:
            raise DrafterFault("two siblings draft the same token")


def _are_tokens(tokens: Sequence[int], vocab_size: int) -> bool:
    are_ints = set(map(type, tokens)) == {int} or all(isinstance(token, int) for token in tokens)
    return are_ints and min(tokens) >= 0 and max(tokens) < vocab_size


def _are_beliefs(confidence: Sequence[float]) -> bool:
    """Whether all lie in [0, 1]; a sum is no number where a term is none, unlike a minimum."""
    return min(confidence) >= 0.0 and max(confidence) <= 1.0 and not isnan(sum(confidence))


def _check_laws(drafts: Sequence[Draft], vocab_size: int) -> None:
    laws = [
        (draft.distribution, len(draft.tokens))
        for draft in drafts
        if draft.distribution is not None
    ]
    for law, nodes in laws:
        if law.shape != (nodes, vocab_size):
            raise DrafterFault(
                f"distribution of shape {tuple(law.shape)}, not {(nodes, vocab_size)}"
            )
    if laws and not bool(torch.stack([_are_laws(law) for law, _ in laws]).all()):
        raise DrafterFault("a row of the distribution is negative, NaN, or does not sum to 1")


def _are_laws(rows: Tensor) -> Tensor:
    off_by = (rows.sum(dim=-1, dtype=torch.float32) - 1.0).abs()
    return ((rows >= 0.0).all(dim=-1) & (off_by < _LAW_TOLERANCE)).all()
