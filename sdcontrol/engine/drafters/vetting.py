"""Is what a drafter answered possible at all?

Knows drafts, hints and tasks; nothing of what becomes of a drafter that fails.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sdcontrol.core import Hint, family_of
from sdcontrol.engine.drafters.base import ROOT, Draft, Drafter, DraftTask
from sdcontrol.errors import DrafterFault

__all__ = ["check_distributions", "check_draft", "check_offer"]

_LAW_TOLERANCE = 1e-2  # of the sum of a row: a distribution may be in bfloat16


def check_offer(drafter: Drafter, arm: str, hint: Hint | None) -> None:
    """Raise `DrafterFault` unless `arm` is one of the drafter's, and `hint` can be true."""
    if arm not in drafter.arms or family_of(arm) != drafter.family:
        raise DrafterFault(f"{arm!r} is none of the arms {drafter.arms}")
    if hint is None:
        return
    if not isinstance(hint, Hint):
        raise DrafterFault(f"a hint is a {type(hint).__name__}; return a Hint or None")
    most, matched, lag = hint.max_draft_tokens, hint.match_tokens, hint.catch_up_tokens
    if lag < 0 or (most is not None and most < 0) or (matched is not None and matched < 0):
        raise DrafterFault(f"{hint}: counts of tokens are at least 0")
    if hint.confidence is not None and not 0.0 <= hint.confidence <= 1.0:
        raise DrafterFault(f"{hint}: a confidence lies in [0, 1]")


def check_draft(draft: Draft, task: DraftTask, *, vocab_size: int, allow_trees: bool) -> None:
    """Raise `DrafterFault` unless `draft` is a possible answer to `task`.

    What its distribution says is left to `check_distributions`.
    """
    nodes = len(draft.tokens)
    if nodes > task.num_draft_tokens:
        raise DrafterFault(f"{nodes} draft tokens where {task.num_draft_tokens} were asked for")
    if len(draft.parents) != nodes or len(draft.confidence) not in (0, nodes):
        raise DrafterFault(
            f"{nodes} tokens, {len(draft.parents)} parents, {len(draft.confidence)} confidences; "
            "give one of each per node (confidence may be empty)"
        )
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in draft.tokens):
        raise DrafterFault(f"a draft token is no int in [0, {vocab_size}): {draft.tokens}")
    if not all(0.0 <= belief <= 1.0 for belief in draft.confidence):
        raise DrafterFault(f"confidences {draft.confidence} do not all lie in [0, 1]")
    if not draft.is_chain:
        _check_tree(draft, allow_trees=allow_trees)
    law = draft.distribution
    if law is not None and law.shape != (nodes, vocab_size):
        raise DrafterFault(f"distribution of shape {tuple(law.shape)}, not {(nodes, vocab_size)}")


def _check_tree(draft: Draft, *, allow_trees: bool) -> None:
    if not all(ROOT <= parent < index for index, parent in enumerate(draft.parents)):
        raise DrafterFault(f"parents {draft.parents} do not stand before their children")
    if len(set(zip(draft.parents, draft.tokens, strict=True))) != len(draft.tokens):
        raise DrafterFault("two siblings draft the same token")
    if not allow_trees:
        raise DrafterFault("this verification takes chains only, and the draft is a tree")


def check_distributions(laws: Sequence[Tensor]) -> None:
    """Raise `DrafterFault` unless every row is a law; the host waits for the device once."""
    if laws and not bool(torch.stack([_are_laws(law) for law in laws]).all()):
        raise DrafterFault("a row of the distribution is negative, NaN, or does not sum to 1")


def _are_laws(rows: Tensor) -> Tensor:
    off_by = (rows.sum(dim=-1, dtype=torch.float32) - 1.0).abs()
    return ((rows >= 0.0).all(dim=-1) & (off_by < _LAW_TOLERANCE)).all()
