"""Ask a drafter with a model what it would draft at every position of known texts.

The engine's own loop does it, so that caches, pages and noise are those of a run. A text is cut into
walks of neighbouring positions, which the engine batches like requests; in each step a walk drafts,
is told what was right, and goes on by one token of the text:

    text    p p p p p t0 t1 t2 t3 t4 t5 t6 t7
    walks            |--------- 0 1 2 |-------- 3 4 5 | ...     shared beginnings are computed once

Knows texts, drafters and the engine; nothing of tables or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol.core import BatchView, Choice, Confidence, Hint, Observation, Plan
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.base import Draft, DraftRequest, DraftTask, KeepDrafting
from sdcontrol.engine.drafters.host import DraftHost, ModelDrafter
from sdcontrol.engine.generation import Decoding
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request, StopRules
from sdcontrol.engine.verify import Verdict, VerifyTask
from sdcontrol.errors import CacheExhausted, DrafterFault

__all__ = ["Rollout", "walk_positions"]

_WALK_TOKENS = 16  # positions of one walk
_BATCH_SIZE = 64  # walks at a time: rollouts of one position each make poor batches


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one arm would have drafted in one text; both are `[positions]`."""

    accepted: NDArray[np.int64]
    confidence: NDArray[np.float32]  # in the first draft token; NaN where nothing was drafted


def walk_positions(
    model: PreTrainedModel,
    drafter: ModelDrafter,
    texts: Sequence[tuple[Request, list[int]]],
    *,
    config: EngineConfig,
    depth: int,
    past_end: bool,
) -> list[dict[str, Rollout]]:
    """By arm, for each text (a finished request, and its tokens with what follows them).

    Up to `depth` tokens are drafted at every output position, with `past_end` also at those after
    the end. Raises `CacheExhausted` where the cache is too small, `DrafterFault` where the drafter
    failed.
    """
    known = [_Text(request, tokens, drafter.arms, past_end) for request, tokens in texts]
    probe = _Probe(drafter, depth)
    engine = Engine(
        model,
        drafters=[probe],
        planner=_Everyone(depth),
        verification=_Told(known),
        config=_roomy(config, known, depth),
    )
    with engine:
        for text in known:  # the last position first: it leaves the whole text in the cache
            probe.submit(engine, text, text.num_positions - 1, text.num_positions, depth)
        engine.run()
        for text in known:
            for start in range(0, text.num_positions - 1, _WALK_TOKENS):
                end = min(start + _WALK_TOKENS, text.num_positions - 1)
                probe.submit(engine, text, start, end, depth)
        engine.run()
        if engine.drafting.quarantined:
            raise DrafterFault(f"no acceptance table: {engine.drafting.quarantined}")
    return [text.rollouts() for text in known]


def _roomy(config: EngineConfig, texts: Sequence["_Text"], depth: int) -> EngineConfig:
    """Large batches, shared beginnings, and a cache that holds some texts and all walks' ends."""
    batch_size = max(config.max_batch_size, _BATCH_SIZE)
    lengths = [len(text.tokens) for text in texts]
    shared = min(sum(lengths), 4 * max(lengths, default=0))
    least = shared + batch_size * (_WALK_TOKENS + depth + 4 * config.block_size)
    changes: dict[str, object] = {
        "prefix_sharing": True,
        "max_batch_size": batch_size,
        "max_draft_tokens": max(config.max_draft_tokens, depth),
    }
    if config.kv_tokens is not None:
        changes["kv_tokens"] = max(config.kv_tokens, least)
    return config.model_copy(update=changes)


class _Text:
    """A known text, and what was found so far."""

    def __init__(
        self, request: Request, tokens: list[int], arms: Sequence[str], past_end: bool
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.prompt_tokens = request.prompt_tokens
        self.num_positions = len(tokens if past_end else request.tokens) - request.prompt_tokens
        shape = self.num_positions
        self.accepted = {arm: np.zeros(shape, dtype=np.int64) for arm in arms}
        self.confidence = {arm: np.full(shape, np.nan, dtype=np.float32) for arm in arms}
        self.is_visited = np.zeros(shape, dtype=bool)

    def rollouts(self) -> dict[str, Rollout]:
        if not self.is_visited.all():
            raise CacheExhausted(
                f"request {self.request.id!r}: no room to draft at "
                f"{int((~self.is_visited).sum())} positions; raise kv_tokens"
            )
        return {arm: Rollout(self.accepted[arm], self.confidence[arm]) for arm in self.accepted}


@dataclass(frozen=True, slots=True)
class _Walk:
    """Positions `start` to `end` of a text, as one request of the engine."""

    text: _Text
    start: int
    end: int


class _Probe(ModelDrafter):
    """Drafts with `inner`, notes how far it was right, and submits nothing."""

    def __init__(self, inner: ModelDrafter, depth: int) -> None:
        self._inner = inner
        self._depth = depth
        self.name = inner.name
        self._walks: dict[str, _Walk] = {}
        self._engine: Engine | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        return self._inner.arms

    def submit(self, engine: Engine, text: _Text, start: int, end: int, depth: int) -> None:
        """Queue a walk: the token before its first position is its first to be told."""
        self._engine = engine
        name = f"{text.request.id}/{start}"
        self._walks[name] = _Walk(text, start, end)
        known = max(text.prompt_tokens + start - 1, 1)
        rules = StopRules(max_new_tokens=end - start + depth + 2)
        decoding = Decoding(text.request.sampler, rules, text.request.temperature)
        engine.enqueue(text.tokens[:known], decoding, request_id=name)

    def attach(self, host: DraftHost) -> None:
        self._inner.attach(host)

    def start(self, request: DraftRequest) -> None:
        self._inner.start(request)

    def arms_for(self, request: DraftRequest) -> tuple[str, ...]:
        """The name of a family stands for all of its arms, also where it offers none."""
        walk = self._walks[request.id]
        if len(request.tokens) < walk.text.prompt_tokens + walk.start:
            return ()
        return self.arms[:1]

    def hint(self, request: DraftRequest, arm: str) -> Hint | None:
        return None

    def commit(self, request: DraftRequest, num_new_tokens: int) -> None:
        self._inner.commit(request, num_new_tokens)

    def lose_cache(self, request: DraftRequest) -> None:
        self._inner.lose_cache(request)

    def finish(self, request: DraftRequest) -> None:
        self._inner.finish(request)
        self._walks.pop(request.id, None)

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> list[Draft]:
        offers = [self._inner.arms_for(task.request) for task in tasks]
        for arm in self.arms:
            self._roll_out(
                arm, [task for task, offered in zip(tasks, offers, strict=True) if arm in offered]
            )
        for task in tasks:
            walk = self._walks[task.request.id]
            position = len(task.request.tokens) - walk.text.prompt_tokens
            walk.text.is_visited[position] = True
            if position + 1 >= walk.end:
                assert self._engine is not None
                self._engine.cancel(task.request.id)
        return [Draft()] * len(tasks)

    def _roll_out(self, arm: str, tasks: Sequence[DraftTask]) -> None:
        texts = [self._walks[task.request.id].text for task in tasks]
        places = [len(task.request.tokens) for task in tasks]
        following = [
            text.tokens[place : place + self._depth]
            for text, place in zip(texts, places, strict=True)
        ]
        asked = [
            DraftTask(task.request, arm, len(tokens))
            for task, tokens in zip(tasks, following, strict=True)
        ]

        def keep(drafts: Sequence[Draft]) -> list[int]:
            """On while all is right."""
            return [
                len(tokens) if _agreement(draft, tokens) == len(draft.tokens) else len(draft.tokens)
                for draft, tokens in zip(drafts, following, strict=True)
            ]

        drafts = self._inner.propose(asked, keep) if asked else []
        for draft, text, place, tokens in zip(drafts, texts, places, following, strict=True):
            position = place - text.prompt_tokens
            text.accepted[arm][position] = _agreement(draft, tokens)
            if draft.confidence:
                text.confidence[arm][position] = draft.confidence[0]


def _agreement(draft: Draft, tokens: Sequence[int]) -> int:
    """Leading draft tokens that are right."""
    pairs = zip(draft.tokens, tokens, strict=False)
    return next((n for n, (ours, told) in enumerate(pairs) if ours != told), len(draft.tokens))


class _Told:
    """A verifier that gives every walk the next token of its text and accepts nothing."""

    supports_trees = False

    def __init__(self, texts: Sequence[_Text]) -> None:
        self._texts = {id(text.request.sampler): text.tokens for text in texts}

    def verify(self, logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verdict]:
        """See `Verifier`."""
        return [Verdict((), self._texts[id(task.sampler)][len(task.tokens)]) for task in tasks]


class _Everyone:
    """Everyone who may draft drafts `depth` tokens, as far as there is room."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def plan(self, view: BatchView) -> Plan:
        free, choices = view.free_kv_tokens, []
        for request in view.requests:
            fits = request.drafters and self._depth <= free
            choices.append(Choice.of(request.drafters[0], self._depth) if fits else Choice.off())
            free -= choices[-1].num_draft_tokens
        return Plan(tuple(choices))

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        return plan

    def observe(self, observation: Observation) -> None:
        """There is nothing to learn."""
