"""Which requests run in a step, and on which blocks.

Knows nothing of tokens' values, tensors, drafters, policies or time: counts and block keys only.
First come, first served: every running request is older than every waiting one, so a victim of
preemption returns to the head of the queue and the oldest request always progresses.

    submit -> waiting --next_batch--> running --finish, cancel--> gone
                 ^-------preempted-------'

Single-threaded by contract: the engine locks around it.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from sdcontrol.errors import ConfigError, IntegrityError, RequestRefused
from sdcontrol.scheduling.blocks import BlockPool
from sdcontrol.scheduling.rows import Row, ScheduledBatch, ScheduledRequest

__all__ = ["Row", "ScheduledBatch", "ScheduledRequest", "Scheduler"]


class Scheduler:
    """Continuous batching, chunked prefill, prefix sharing and preemption over one block pool."""

    def __init__(self, pool: BlockPool, *, max_batch_size: int, max_prefill_tokens: int) -> None:
        if max_batch_size < 1 or max_prefill_tokens < 1:
            raise ConfigError(
                f"max_batch_size {max_batch_size}, max_prefill_tokens {max_prefill_tokens}; "
                "both must be at least 1"
            )
        self._pool = pool
        self._max_batch_size = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: OrderedDict[str, ScheduledRequest] = OrderedDict()
        self._running: dict[str, ScheduledRequest] = {}  # oldest first, as it was filled
        self._decode_rows: dict[str, Row] = {}  # of the running ones: the same at every step
        self._is_settled = True  # nobody came or went since `next_batch`
        self._num_arrivals = 0
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._running or self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def running(self) -> tuple[ScheduledRequest, ...]:
        """Requests with blocks, oldest first."""
        return tuple(self._running.values())

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._num_preemptions

    def submit(self, request: ScheduledRequest) -> None:
        """Queue `request`; raises `RequestRefused` if it can never run or its id is taken."""
        if request.id in self._running or request.id in self._waiting:
            raise RequestRefused(
                f"request id {request.id!r} is taken; choose another, or wait until it finishes"
            )
        if not 1 <= request.num_tokens <= request.max_tokens:
            raise RequestRefused(
                f"request {request.id!r} has {request.num_tokens} tokens and may have "
                f"{request.max_tokens}; give at least 1 token, and max_tokens no smaller than that"
            )
        if request.max_tokens > self._pool.capacity_tokens:
            raise RequestRefused(
                f"request {request.id!r} may grow to {request.max_tokens} tokens, the KV cache "
                f"holds {self._pool.capacity_tokens}; shorten it or raise kv_tokens"
            )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._is_settled = False
        self._waiting[request.id] = request

    def cancel(self, request_id: str) -> ScheduledRequest | None:
        """Forget a request, waiting or running, and take its blocks back; None: no such id."""
        request = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
        self._decode_rows.pop(request_id, None)
        self._is_settled = False
        if request is not None:
            self._pool.release(request.table)
        return request

    def finish(self, request: ScheduledRequest) -> None:
        """Remove a request that is done and take its blocks back."""
        self._check_known(request)
        self.cancel(request.id)

    def is_running(self, request: ScheduledRequest) -> bool:
        """Whether it holds blocks now: neither waiting, finished nor cancelled."""
        return self._running.get(request.id) is request

    def next_batch(self) -> ScheduledBatch:
        """Choose the rows of a step and give each its slots.

        Every running request that decodes gets one slot; prefilling ones share
        `max_prefill_tokens`, oldest first; waiting ones are admitted in order of arrival.
        """
        preempted = self._secure_slots()
        running, rows = self._running, self._decode_rows
        decoding = [rows[r.id] for r in running.values() if r.num_tokens - r.cached_tokens == 1]
        prefilling: list[Row] = []
        budget = self._max_prefill_tokens
        if len(decoding) < len(running):
            for request in running.values():
                if request.pending_tokens > 1 and budget:
                    budget -= _append_chunk(prefilling, request, budget)
        while self._waiting and not preempted and len(running) < self._max_batch_size:
            admitted = self._admit_oldest(budget)
            if admitted is None:
                break
            if admitted.pending_tokens == 1:
                decoding.append(rows[admitted.id])
            else:
                budget -= _append_chunk(prefilling, admitted, budget)
        self._is_settled, waits = True, bool(self._waiting)
        return ScheduledBatch(tuple(decoding), tuple(prefilling), tuple(preempted), waits)

    def next_ahead(self, ending: Collection[str]) -> ScheduledBatch | None:
        """The step after the last, before anybody knows its tokens: one more for each that it decoded.

        Those in `ending`, by id, leave with the last one. None, and nothing is changed, where more
        than that is to be decided: somebody prefills or could be admitted, or blocks are short.
        """
        running, block_size = self._running, self._pool.block_size
        going = [request for request in running.values() if request.id not in ending]
        if self._waiting and (ending or not self._is_settled):
            return None
        if not going or any(request.pending_tokens != 1 for request in running.values()):
            return None
        short = [r for r in going if len(r.table.blocks) * block_size <= r.num_tokens]
        if len(short) > self._pool.free_blocks:
            return None
        for request in going:
            request.cached_tokens += 1
            request.num_tokens += 1
        for request in short:
            self.reserve(request, 0)
        rows = tuple([self._decode_rows[request.id] for request in going])
        return ScheduledBatch(rows, (), (), bool(self._waiting))

    def step_back(self, requests: Iterable[ScheduledRequest]) -> None:
        """Undo `next_ahead` for these; blocks that it took stay until they are committed."""
        for request in requests:
            request.cached_tokens -= 1
            request.num_tokens -= 1

    def free_draft_tokens(self, batch: ScheduledBatch) -> int:
        """The most draft tokens that fit however they are spread over the decoding rows.

        One more could be spread so that it takes one block more than are free. Draft tokens that
        a row needs to take its blocks, `slack` being the unused slots of its last block:

            first block  slack + 1   |   every further block  block_size
        """
        block_size = self._pool.block_size
        firsts = sorted(
            len(row.request.table.blocks) * block_size - row.request.num_tokens + 1
            for row in batch.decoding
        )
        if not firsts:
            return 0
        num_blocks = self._pool.free_blocks + 1
        cheapest = firsts[:num_blocks]
        if cheapest[-1] > block_size:  # a row with a whole unused block
            cheapest[1:] = [min(first, block_size) for first in cheapest[1:]]
        return sum(cheapest) + (num_blocks - len(cheapest)) * block_size - 1

    def reserve(self, request: ScheduledRequest, num_draft_tokens: int) -> None:
        """Give `request` slots for drafts behind its last token.

        Raises `CacheExhausted`, and changes nothing, when the pool lacks the blocks.
        """
        wanted, table = request.num_tokens + num_draft_tokens, request.table
        if wanted > len(table.blocks) * self._pool.block_size:
            self._pool.extend(table, wanted, expected_tokens=request.max_tokens)

    def commit(self, request: ScheduledRequest, cached_tokens: int, num_tokens: int) -> None:
        """Note what a step made of `request`: slots behind `num_tokens` go back to the pool.

        Blocks full of cached tokens become shareable as far as `request.keys` goes. Raises
        `IntegrityError` when `request` does not run, cancelled for instance.
        """
        if self._running.get(request.id) is not request:
            raise IntegrityError(
                f"commit of request {request.id!r}, which does not run; skip what was cancelled"
            )
        assert request.cached_tokens <= cached_tokens <= num_tokens <= request.max_tokens
        request.cached_tokens = cached_tokens
        request.num_tokens = num_tokens
        table, block_size = request.table, self._pool.block_size
        if len(table.blocks) * block_size >= num_tokens + block_size:
            self._pool.shrink(table, num_tokens)
        if request.shareable and cached_tokens // block_size > table.num_shareable:
            self._pool.register(table, request.keys, cached_tokens)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless blocks and queues are consistent.

        blocks   those of the running requests are all that are referenced
        arrival  running < waiting, each in order
        """
        self._pool.check_integrity(request.table for request in self._running.values())
        queue = [*self._running.values(), *self._waiting.values()]
        arrivals = [request.arrival for request in queue]
        if arrivals != sorted(arrivals):
            raise IntegrityError(f"requests out of order of arrival: {arrivals}")
        for request in self._waiting.values():
            if request.table.blocks or request.cached_tokens:
                raise IntegrityError(f"request {request.id!r} waits and has blocks")

    def _check_known(self, request: ScheduledRequest) -> None:
        if request.id not in self._running and request.id not in self._waiting:
            raise IntegrityError(f"request {request.id!r} is neither waiting nor running")

    def _secure_slots(self) -> list[ScheduledRequest]:
        """Make every running table hold its request's tokens; returns who was preempted for it."""
        block_size = self._pool.block_size
        short = [
            request
            for request in self._running.values()
            if len(request.table.blocks) * block_size < request.num_tokens
        ]
        preempted: list[ScheduledRequest] = []
        for request in short:
            needed = self._pool.blocks_needed(request.table, request.num_tokens)
            while request.id in self._running and needed > self._pool.free_blocks:
                preempted.append(self._preempt_youngest())
            if request.id in self._running:
                self.reserve(request, 0)
        return preempted

    def _preempt_youngest(self) -> ScheduledRequest:
        _, request = self._running.popitem()
        del self._decode_rows[request.id]
        self._pool.release(request.table)
        request.cached_tokens = 0
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)
        self._num_preemptions += 1
        return request

    def _admit_oldest(self, prefill_budget: int) -> ScheduledRequest | None:
        """Move the head of the queue to the running requests, or None if it must wait."""
        request = next(iter(self._waiting.values()))
        keys = request.keys if request.shareable else []
        max_shared = request.num_tokens - 1 - request.recompute_tail_tokens
        prefix = self._pool.match_prefix(keys, max_shared)
        pending = request.num_tokens - len(prefix) * self._pool.block_size
        if (pending > 1 and not prefill_budget) or not self._has_room(request, prefix):
            return None
        del self._waiting[request.id]
        request.cached_tokens = self._pool.share_prefix(request.table, keys, max_shared)
        self._running[request.id] = request
        self._decode_rows[request.id] = Row(request, 1, is_decode=True, completes=True)
        self.reserve(request, 0)
        return request

    def _has_room(self, request: ScheduledRequest, prefix: list[int]) -> bool:
        """Whether its tokens and one more fit, and then one block for each that may still grow.

        Without the latter it would soon be preempted, and its prefill lost.
        """
        pool = self._pool
        held_tokens = min(request.num_tokens + 1, request.max_tokens)
        needed = -(-held_tokens // pool.block_size) - len(prefix) + pool.num_unreferenced(prefix)
        if needed + len(self._running) <= pool.free_blocks:
            return True
        return needed + self._num_growing() <= pool.free_blocks

    def _num_growing(self) -> int:
        return sum(
            self._pool.blocks_needed(request.table, request.max_tokens) > 0
            for request in self._running.values()
        )


def _append_chunk(rows: list[Row], request: ScheduledRequest, budget: int) -> int:
    pending = request.pending_tokens
    chunk = min(pending, budget)
    rows.append(Row(request, chunk, is_decode=False, completes=chunk == pending))
    return chunk
