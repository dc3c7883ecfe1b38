"""How far each drafter would have been right, at every position of finished outputs.

Exact for chains, and for the first nodes of trees, under greedy and coupled verification, whose
text does not depend on what was drafted. Drafters are asked as in a run, at every position:

    look-ups      walk over the text once
    draft_model   one draft token at every position; a draft is right as far as these are in a row
    others        roll out from every position until the first wrong token

The engine's own loop does the latter two, in batches over positions: `position_walks`. Knows nothing
of policies, costs or files.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.base import Draft, Drafter, DraftTask
from sdcontrol.engine.drafters.build import DrafterSpecs, build_drafters
from sdcontrol.engine.drafters.draft_model import DraftModelDrafter
from sdcontrol.engine.drafters.host import ModelDrafter
from sdcontrol.engine.generation import Decoding
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.position_walks import Rollout, walk_positions
from sdcontrol.engine.request import Request, StopRules
from sdcontrol.errors import ConfigError
from sdcontrol.outcomes import DEPTH, ArmOutcomes

__all__ = ["acceptance_outcomes"]

_CHAIN = 32  # leading nodes of a draft without branches: as many as a path has bits
_REQUESTS_AT_ONCE = 16


def acceptance_outcomes(
    model: PreTrainedModel,
    drafters: DrafterSpecs,
    requests: Sequence[Request],
    *,
    config: EngineConfig | None = None,
    depth: int = DEPTH,
    allow_trees: bool = True,
) -> Iterator[tuple[str, dict[str, ArmOutcomes]]]:
    """For each finished request, in order: its outcomes by drafter arm; a few at a time.

    `requests` are what `Engine.run` returned under coupled verification, `drafters` what that
    engine was given; without `allow_trees` drafts are chains, as under rejection, whose greedy
    requests have the same text. Raises `ConfigError` for a depth that no path holds, a drafter or an id twice.
    """
    if not 1 <= depth <= _CHAIN:
        raise ConfigError(f"an acceptance table of depth {depth}; give 1 to {_CHAIN}")
    _check_ids(requests)
    built = build_drafters(drafters, allow_trees=allow_trees)
    config = config or EngineConfig()
    for start in range(0, len(requests), _REQUESTS_AT_ONCE):
        group = list(requests[start : start + _REQUESTS_AT_ONCE])
        texts = _continued(model, [request for request in group if request.output], config, depth)
        found: dict[str, dict[str, ArmOutcomes]] = {request.id: {} for request in group}
        for drafter in built:
            allowed = [text for text in texts if text.request.may_draft(drafter.family)]
            for text, outcomes in zip(
                allowed, _outcomes(model, drafter, allowed, config, depth), strict=True
            ):
                found[text.request.id] |= outcomes
        yield from found.items()


def _check_ids(requests: Sequence[Request]) -> None:
    """Outcomes are by id: two requests of one id would be taken for each other."""
    counts = Counter(request.id for request in requests)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"{len(twice)} request ids are used more than once, {twice[0]!r} {counts[twice[0]]} "
            "times; an acceptance table needs one per request: decode with ids of their own"
        )


@dataclass(slots=True)
class _Text:
    """A finished request, and what the model would have said after it."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # prompt, output, continuation


def _continued(
    model: PreTrainedModel, requests: Sequence[Request], config: EngineConfig, depth: int
) -> list[_Text]:
    """What the model says after an output that ended early: drafts may run past the end."""
    texts = {request.id: _Text(request, list(request.tokens)) for request in requests}
    early = [request for request in requests if request.remaining_tokens > 0]
    if early:
        with Engine(model, config=config) as engine:
            for request in early:
                rules = StopRules(min(depth, request.remaining_tokens))
                decoding = Decoding(request.sampler, rules, request.temperature)
                engine.enqueue(request.tokens, decoding, request_id=request.id)
            for name, finished in engine.run().items():
                texts[name].tokens += finished.output
    return list(texts.values())


def _outcomes(
    model: PreTrainedModel,
    drafter: Drafter,
    texts: Sequence[_Text],
    config: EngineConfig,
    depth: int,
) -> list[dict[str, ArmOutcomes]]:
    """By arm, for each text."""
    if not isinstance(drafter, ModelDrafter):
        return [_looked_up(drafter, text, depth) for text in texts]
    one_token = isinstance(drafter, DraftModelDrafter)
    rollouts = walk_positions(
        model,
        drafter,
        [(text.request, text.tokens) for text in texts],
        config=config,
        depth=1 if one_token else depth,
        past_end=one_token,
    )
    finish = _of_single_tokens if one_token else _of_rollouts
    return [
        {arm: finish(rollout, len(text.request.output), depth) for arm, rollout in arms.items()}
        for text, arms in zip(texts, rollouts, strict=True)
    ]


def _of_rollouts(rollout: Rollout, output_tokens: int, depth: int) -> ArmOutcomes:
    return ArmOutcomes(
        accepted=rollout.accepted[:output_tokens].astype(np.uint8),
        confidence=rollout.confidence[:output_tokens],
        depth=depth,
    )


def _of_single_tokens(rollout: Rollout, output_tokens: int, depth: int) -> ArmOutcomes:
    """From whether each position's one draft token was right to runs of right ones."""
    runs: NDArray[np.uint8] = np.zeros(len(rollout.accepted) + 1, dtype=np.uint8)
    for position in range(len(rollout.accepted) - 1, -1, -1):
        if rollout.accepted[position]:
            runs[position] = min(int(runs[position + 1]) + 1, depth)
    return ArmOutcomes(
        accepted=runs[:output_tokens],
        confidence=rollout.confidence[:output_tokens],
        depth=depth,
    )


@dataclass(slots=True)
class _Reader:
    """A request as a look-up sees it while it grows, token by token."""

    id: str
    tokens: list[int]


def _looked_up(drafter: Drafter, text: _Text, depth: int) -> dict[str, ArmOutcomes]:
    """Ask a drafter without a model at every position."""
    request = text.request
    reader = _Reader(request.id, text.tokens[: request.prompt_tokens])
    rows: dict[str, list[_Found]] = {arm: [] for arm in drafter.arms}
    drafter.start(reader)
    for token in request.output:
        offered = drafter.arms_for(reader)
        following = text.tokens[len(reader.tokens) : len(reader.tokens) + depth]
        for arm, found in rows.items():
            is_offered = arm in offered
            found.append(_found(drafter, reader, arm, following, depth) if is_offered else _NONE)
        reader.tokens.append(token)
        drafter.commit(reader, 1)
    drafter.finish(reader)
    return {arm: _table(found, depth) for arm, found in rows.items()}


@dataclass(frozen=True, slots=True)
class _Found:
    """One arm at one position."""

    path: int = 0  # bit j: node j is accepted
    chain_nodes: int = _CHAIN
    max_draft_tokens: int = 0
    match_tokens: int | None = None
    confidence: float = float("nan")


_NONE = _Found()


def _found(
    drafter: Drafter, reader: _Reader, arm: str, following: Sequence[int], depth: int
) -> _Found:
    hint = drafter.hint(reader, arm)
    task = DraftTask(reader, arm, depth)
    (draft,) = drafter.propose([task], lambda drafts: [depth] * len(drafts))
    most = depth if hint is None or hint.max_draft_tokens is None else hint.max_draft_tokens
    if len(draft.tokens) < min(depth, most):
        most = len(draft.tokens)
    confidence = hint.confidence if hint is not None else None
    if confidence is None and draft.confidence:
        confidence = draft.confidence[0]
    return _Found(
        path=_accepted_path(draft, following),
        chain_nodes=_leading_chain(draft),
        max_draft_tokens=min(most, 255),
        match_tokens=None if hint is None else hint.match_tokens,
        confidence=float("nan") if confidence is None else confidence,
    )


def _accepted_path(draft: Draft, following: Sequence[int]) -> int:
    """Down the draft along the tokens that did follow; see `coupled.CoupledVerifier`."""
    path, node, depth = 0, -1, 0
    for child, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == node and depth < len(following) and token == following[depth]:
            path |= 1 << child
            node, depth = child, depth + 1
    return path


def _leading_chain(draft: Draft) -> int:
    breaks = (node for node, parent in enumerate(draft.parents) if parent != node - 1)
    return next(breaks, _CHAIN)


def _table(found: Sequence[_Found], depth: int) -> ArmOutcomes:
    is_tree = any(row.chain_nodes < _CHAIN for row in found)
    matches = [row.match_tokens for row in found]
    return ArmOutcomes(
        accepted=np.array([row.path.bit_count() for row in found], dtype=np.uint8),
        match_tokens=None
        if all(match is None for match in matches)
        else np.array([min(match or 0, 255) for match in matches], dtype=np.uint8),
        max_draft_tokens=np.array([row.max_draft_tokens for row in found], dtype=np.uint8),
        confidence=np.array([row.confidence for row in found], dtype=np.float32),
        path=np.array([row.path for row in found], dtype=np.uint32) if is_tree else None,
        chain_nodes=np.array([row.chain_nodes for row in found], dtype=np.uint8)
        if is_tree
        else None,
        depth=depth,
    )
