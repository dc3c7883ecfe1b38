"""What drafters that run a model share: the block pool and the runners.

Knows runners and blocks; nothing of sampling, policies or verification.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sdcontrol.engine.attention import QuerySink
from sdcontrol.engine.batch import Moves, Piece
from sdcontrol.engine.config import EngineConfig, Memory, cache_blocks
from sdcontrol.engine.drafters.base import Drafter
from sdcontrol.engine.graphs import attach_graphs, forward_bytes, graph_bytes
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.stats import GraphStats
from sdcontrol.logs import EventLog
from sdcontrol.scheduling.blocks import BlockPool
from sdcontrol.scheduling.rows import ScheduledRequest

__all__ = ["CATCH_UP_TOKENS", "DraftHost", "ModelDrafter"]

log = EventLog(__name__)

CATCH_UP_TOKENS = 2048
"""Computed in one forward while a drafter catches up, one of each request at least."""

_SCORES, _GRAPHS = "scored pages", "CUDA graphs"
_CLEARED = "cleared"


class Scorer(Protocol):
    """Keeps the queries of the latest tokens, to score pages with."""

    @property
    def bytes_per_token(self) -> int:
        """What it keeps of every token of the pool."""
        ...

    @property
    def fixed_bytes(self) -> int:
        """What it keeps however large the pool is."""
        ...

    def sink(self, pieces: Sequence[Piece]) -> QuerySink:
        """Takes the queries of these pieces' tokens."""
        ...

    def move(self, moves: Moves) -> None:
        """Queries follow the tokens of a compacted tree."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or lost its cache."""
        ...

    def forget_all(self) -> None:
        """Every request lost its cache."""
        ...

    def release(self) -> None:
        """The cache is gone."""
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
    is_tainted: bool = False  # blocks may hold what is not finite, and must be cleared for the next

    @property
    def memory(self) -> Memory:
        """What is taken beside the weights: by every cache, by page scores, by graphs."""
        drafters = {f"drafter {name!r}": runner for name, runner in self.runners.items()}
        runners = {"target": self.target, **drafters}
        per_token = {name: runner.bytes_per_token for name, runner in runners.items()}
        fixed: dict[str, int] = {}
        if self.scorer is not None:
            per_token[_SCORES] = self.scorer.bytes_per_token
            fixed[_SCORES] = self.scorer.fixed_bytes
        graphs = sum(graph_bytes(runner, self.config) for runner in runners.values())
        return Memory(per_token, fixed | ({_GRAPHS: graphs} if graphs else {}), self._step_bytes)

    @property
    def _step_bytes(self) -> int:
        """What a step of the target takes that also prefills, or a drafter that catches up, whichever is more;
        a CPU's memory can be swapped.
        """
        config, most = self.config, self.config.most_decoding_tokens
        if self.target.device.type == "cpu":
            return 0
        batch = config.max_batch_size
        catching_up = [
            forward_bytes(runner, max(CATCH_UP_TOKENS, batch), batch)
            for runner in self.runners.values()
        ]
        prefilling = forward_bytes(self.target, config.max_prefill_tokens + most, batch + most)
        return max([prefilling, *catching_up])

    @property
    def model_configs(self) -> dict[str, dict[str, object]]:
        """As in a `config.json`, in the dtype that was loaded: of the target, and of drafters by name."""
        models = {"target": self.target.model}
        models |= {name: runner.model for name, runner in self.runners.items()}
        return {
            role: {**model.config.to_dict(), "dtype": str(model.dtype)}
            for role, model in models.items()
        }

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
        config, memory = self.config, self.memory
        num_blocks = cache_blocks(config, memory, self.target.device)
        self.pool = self._new_pool(num_blocks)
        self.graph_stats.expected_bytes = memory.fixed.get(_GRAPHS, 0)
        log.info(
            "kv_pool_sized",
            tokens=self.pool.capacity_tokens,
            bytes_per_token=dict(memory.per_token),
            fixed_bytes=dict(memory.fixed),
            step_bytes=memory.step_bytes,
        )
        for runner in (self.target, *self.runners.values()):
            with torch.inference_mode(False):
                runner.allocate(self.pool.num_blocks, config.block_size)
            attach_graphs(runner, config, self.graph_stats)
        cache = self.target.cache
        assert cache is not None
        self.is_tainted = not (self.target.has_kernels or cache.watch())
        return self.pool

    def empty_pool(self) -> BlockPool:
        """One like before, and nothing is known of what stands in its blocks."""
        if self.scorer is not None:
            self.scorer.forget_all()
        self.pool = self._new_pool(self.blocks.num_blocks)
        return self.pool

    def _new_pool(self, num_blocks: int) -> BlockPool:
        config = self.config
        return BlockPool(num_blocks, config.block_size, prefix_sharing=config.prefix_sharing)

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

    def clear(self, pieces: Sequence[Piece]) -> None:
        """Before a forward: blocks that requests were given since the cache is tainted hold nothing of others."""
        if not self.is_tainted:
            return
        page, pool = self.config.block_size, self.blocks
        scheduled = [piece.request.scheduled for piece in pieces]
        open_blocks = [
            b for own in scheduled for b in own.table.blocks[own.cached_tokens // page :]
        ]
        new = [block for block in open_blocks if not pool.is_marked(block, _CLEARED)]
        for runner in (self.target, *self.runners.values()) if new else ():
            assert runner.cache is not None
            runner.cache.clear(new)
        for block in new:
            pool.mark(block, _CLEARED)

    def check_cache(self, running: Iterable[ScheduledRequest]) -> None:
        """After a forward: where it wrote what is not finite, no other request than these may meet that.

        Triton's kernels read nothing that is masked; on other devices than a CPU blocks are always cleared.
        """
        cache = self.target.cache
        assert cache is not None
        if self.is_tainted or self.target.has_kernels or cache.check():
            return
        self.is_tainted = True
        for request in running:
            for block in request.table.blocks:
                self.blocks.mark(block, _CLEARED)
        log.warning("cache_tainted", reason="keys or values that are not finite")

    def forget(self, request_id: str) -> None:
        """A request ended or lost its cache, whether it may draft or not."""
        if self.scorer is not None:
            self.scorer.forget(request_id)

    def release(self) -> None:
        """Drop every cache, and what drafters know of them."""
        for runner in (self.target, *self.runners.values()):
            runner.release()
        if self.scorer is not None:
            self.scorer.release()


class ModelDrafter(Drafter):
    """A drafter that runs a model over the engine's blocks."""

    @abstractmethod
    def attach(self, host: DraftHost) -> None:
        """Take part in an engine, before its pool is sized. Raises `ConfigError` if it cannot."""
