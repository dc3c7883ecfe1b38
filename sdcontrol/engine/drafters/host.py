"""What drafters that run a model share: the block pool, the runners, drafting in rounds.

Knows runners, blocks and sampling; nothing of policies or verification.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sdcontrol.engine.attention import QuerySink
from sdcontrol.engine.batch import Moves, Piece
from sdcontrol.engine.config import EngineConfig, cache_blocks
from sdcontrol.engine.drafters.base import Draft, Drafter, DraftTask, KeepDrafting
from sdcontrol.engine.graphs import attach_graphs
from sdcontrol.engine.packing import Segment
from sdcontrol.engine.request import Request
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.sampling import Row, draft_sample
from sdcontrol.engine.stats import GraphStats
from sdcontrol.scheduling.blocks import BlockPool

__all__ = ["DraftHost", "ModelDrafter", "draft_in_rounds", "request_of"]

MakeSegment = Callable[[Request, Sequence[int]], Segment]
"""The forward piece of a request, given what has been drafted for it in this step."""


class Scorer(Protocol):
    """Keeps the queries of the latest tokens, to score pages with."""

    def sink(self, pieces: Sequence[Piece]) -> QuerySink:
        """Takes the queries of these pieces' tokens."""
        ...

    def move(self, moves: Moves) -> None:
        """Queries follow the tokens of a compacted tree."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or lost its cache."""
        ...


@dataclass(slots=True)
class DraftHost:
    """An engine, as far as a drafter with a model may know it.

    A block id means the same block in every model's cache, so one pool serves all.
    """

    target: ModelRunner
    config: EngineConfig
    verification: str
    runners: dict[str, ModelRunner] = field(default_factory=dict)  # the drafters' own, by name
    graph_stats: GraphStats = field(default_factory=GraphStats)
    pool: BlockPool | None = None
    scorer: "Scorer | None" = None

    @property
    def bytes_per_token(self) -> dict[str, int]:
        """KV bytes that one token takes in each cache."""
        drafters = {f"drafter {name!r}": runner for name, runner in self.runners.items()}
        runners = {"target": self.target, **drafters}
        return {name: runner.bytes_per_token for name, runner in runners.items()}

    @property
    def blocks(self) -> BlockPool:
        """The pool, which exists once everybody has attached."""
        assert self.pool is not None
        return self.pool

    def allocate(self, drafters: Sequence[Drafter]) -> BlockPool:
        """Attach drafters with a model, size the pool for all, and make every cache.

        Raises `ConfigError` for a drafter that cannot take part, and, with the numbers, where the
        caches do not fit the memory together.
        """
        for drafter in drafters:
            if isinstance(drafter, ModelDrafter):
                drafter.attach(self)
        config = self.config
        self.pool = BlockPool(
            cache_blocks(config, self.bytes_per_token, self.target.device),
            config.block_size,
            prefix_sharing=config.prefix_sharing,
        )
        for runner in (self.target, *self.runners.values()):
            runner.allocate(self.pool.num_blocks, config.block_size)
            attach_graphs(runner, config, self.graph_stats)
        return self.pool

    def query_sink(self, pieces: Sequence[Piece]) -> QuerySink | None:
        """Where the queries of a verifying forward go, if anybody scores pages."""
        return None if self.scorer is None else self.scorer.sink(pieces)

    def move(self, moves: Moves) -> None:
        """Compact accepted paths: keys, values and kept queries follow their tokens."""
        if not moves:
            return
        page = self.config.block_size
        sources = [s for request, old, _ in moves for s in request.slots_of(old, page)]
        targets = [s for request, _, new in moves for s in request.slots_of(new, page)]
        self.target.move(sources, targets)
        if self.scorer is not None:
            self.scorer.move(moves)

    def forget(self, request_id: str) -> None:
        """A request ended or lost its cache, whether it may draft or not."""
        if self.scorer is not None:
            self.scorer.forget(request_id)

    def release(self) -> None:
        """Drop every cache."""
        for runner in (self.target, *self.runners.values()):
            runner.release()


class ModelDrafter(Drafter):
    """A drafter that runs a model over the engine's blocks."""

    @abstractmethod
    def attach(self, host: DraftHost) -> None:
        """Take part in an engine, before its pool is sized. Raises `ConfigError` if it cannot."""


def request_of(task: DraftTask) -> Request:
    """The engine's own request behind a task."""
    assert isinstance(task.request, Request)
    return task.request


class _Chain:
    """One request's draft while it grows."""

    def __init__(self, task: DraftTask) -> None:
        self.request = request_of(task)
        self.limit = task.num_draft_tokens
        self.tokens: list[int] = []
        self.confidence: list[float] = []
        self.distribution: list[Tensor] = []

    @property
    def is_open(self) -> bool:
        return len(self.tokens) < self.limit

    @property
    def row(self) -> Row:
        return Row(self.request.sampler, self.request.tokens, tuple(self.tokens))

    def draft(self) -> Draft:
        distribution = torch.stack(self.distribution) if self.distribution else None
        return Draft.chain(self.tokens, self.confidence, distribution)


def draft_in_rounds(
    tasks: Sequence[DraftTask],
    keep_drafting: KeepDrafting,
    *,
    forward: Callable[[list[Segment]], Tensor],
    segment: MakeSegment,
    verification: str,
) -> list[Draft]:
    """One token per open request and round, all in one forward, until all are long enough.

    `forward` gives one row of logits per segment.
    """
    chains = [_Chain(task) for task in tasks]
    while open_chains := [chain for chain in chains if chain.is_open]:
        logits = forward([segment(chain.request, chain.tokens) for chain in open_chains])
        _extend(open_chains, logits, verification)
        if any(chain.is_open for chain in open_chains):
            limits = keep_drafting([chain.draft() for chain in chains])
            for chain, limit in zip(chains, limits, strict=True):
                chain.limit = min(chain.limit, limit)
    return [chain.draft() for chain in chains]


def _extend(chains: Sequence[_Chain], logits: Tensor, verification: str) -> None:
    sample = draft_sample(logits, [chain.row for chain in chains], verification=verification)
    for index, chain in enumerate(chains):
        chain.tokens.append(sample.tokens[index])
        chain.confidence.append(sample.confidence[index])
        if sample.distribution is not None:
            chain.distribution.append(sample.distribution[index])
