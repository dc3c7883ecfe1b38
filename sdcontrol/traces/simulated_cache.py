"""What draft models have cached of each request, as the engine's draft model drafter keeps it.

Knows blocks and counts; nothing of plans, acceptance or time.

    committed tokens   0 ............ cached ....... L-1
                       in its cache   to catch up    last: gives the first draft token
"""

from collections.abc import Mapping, Sequence

from sdcontrol.core import Hint
from sdcontrol.scheduling.blocks import BlockPool
from sdcontrol.traces.simulated_drafts import LiveRequest, lag_hint

__all__ = ["DraftCaches"]


class DraftCaches:
    """The caches of all draft models, and with them what can be said before drafting."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._used: dict[str, str] = {}  # in this step: the model that drafted, by request

    def hints(self, live: LiveRequest) -> Mapping[str, Hint]:
        """By arm, what its drafter knows beforehand; `sparse_kv` knows nothing."""
        hints: dict[str, Hint] = {}
        for name, arm in live.hinting:
            if arm.is_free:
                hints[name] = arm.hint(live.generated)
            else:
                cached = live.draft_cached.get(name)
                if cached is None:
                    cached = self._find_cached(live, name)
                lag = live.scheduled.num_tokens - 1 - cached
                hints[name] = lag_hint(lag if lag > 0 else 0)
        return hints

    def use(self, live: LiveRequest, arm: str) -> None:
        """The draft model `arm` drafts for this request in this step."""
        self._used[live.id] = arm

    def commit(
        self, live: Sequence[LiveRequest], emitted: Sequence[int], drafted: Sequence[int]
    ) -> None:
        """A cache stands as far as what was fed to its model was accepted.

        To be called before the scheduler commits; of the tokens drafted the last was not fed.
        """
        if not self._used:
            return
        for request, tokens, drafts in zip(live, emitted, drafted, strict=True):
            arm = self._used.get(request.id)
            if arm is not None and drafts:
                stands = request.scheduled.num_tokens + min(drafts - 1, tokens - 1)
                self._set_cached(request, arm, stands)
        self._used.clear()

    def lose(self, live: LiveRequest) -> None:
        """The request was preempted."""
        live.draft_cached.clear()

    def _find_cached(self, live: LiveRequest, arm: str) -> int:
        """Tokens cached: those of the leading blocks that were filled for anybody."""
        pool, table = self._pool, live.scheduled.table
        full = live.scheduled.cached_tokens // pool.block_size
        count = 0
        while count < full and pool.is_marked(table.blocks[count], arm):
            count += 1
        live.draft_cached[arm] = count * pool.block_size
        return live.draft_cached[arm]

    def _set_cached(self, live: LiveRequest, arm: str, num_tokens: int) -> None:
        pool = self._pool
        first = live.draft_cached.get(arm, 0) // pool.block_size
        for block in live.scheduled.table.blocks[first : num_tokens // pool.block_size]:
            pool.mark(block, arm)
        live.draft_cached[arm] = num_tokens
