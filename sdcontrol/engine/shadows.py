"""Free drafters that are not used, scored against what was emitted anyway.

Knows drafts and tokens; nothing of drafters, requests or policies.
"""

from collections.abc import Mapping, Sequence

from sdcontrol.engine.drafters.base import Draft

__all__ = ["ShadowDrafts", "agreements"]

ShadowDrafts = Mapping[str, Sequence[Draft | None]]
"""By free arm, the draft that it would have made for each request."""


def agreements(
    shadows: ShadowDrafts, outputs: Sequence[Sequence[int]]
) -> dict[str, tuple[int | None, ...]]:
    """By free arm, how far its chain agrees with each request's `outputs` of a step.

    None where it drafted nothing, or has no chain of that length to offer.
    """
    return {
        arm: tuple([_agreement(*pair) for pair in zip(drafts, outputs, strict=True)])
        for arm, drafts in shadows.items()
    }


def _agreement(draft: Draft | None, output: Sequence[int]) -> int | None:
    if draft is None or len(draft.tokens) < len(output):
        return None
    if not draft.truncated(len(output)).is_chain:
        return None
    pairs = zip(draft.tokens, output, strict=False)
    return next((n for n, (drafted, token) in enumerate(pairs) if drafted != token), len(output))
