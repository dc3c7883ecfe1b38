"""What drafters that run a model share: the block pool and the runners.

Knows runners and blocks; nothing of sampling, policies or verification.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sdcontrol.engine.attention import QuerySink
from sdcontrol.engine.batch import Moves, Piece
from sdcontrol.engine.config import EngineConfig, cache_blocks
from sdcontrol.engine.drafters.base import Drafter
from sdcontrol.engine.graphs import attach_graphs
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.stats import GraphStats
from sdcontrol.scheduling.blocks import BlockPool

__all__ = ["DraftHost", "ModelDrafter"]


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
