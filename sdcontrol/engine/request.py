"""A live request: its tokens, when it ends, where its keys and values lie.

Knows nothing of models, drafters or the batch that it is in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sdcontrol.engine.blame import blame
from sdcontrol.engine.packing import IntArray, PageTable
from sdcontrol.engine.sampling import RowSampler
from sdcontrol.scheduling.blocks import block_keys
from sdcontrol.scheduling.scheduler import ScheduledRequest

__all__ = ["FinishReason", "Request", "RequestStats", "StopRules", "TokenEvent"]

FinishReason = str
"""`eos`, `length`, `stop` (a stopping criterion or stop string) or `cancelled`."""

Criterion = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a request ends. `criteria` are transformers' own, shown `[1, length]` with padding."""

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    criteria: tuple[Criterion, ...] = ()
    pad_tokens: tuple[int, ...] = ()

    def reason(self, tokens: Sequence[int], num_new_tokens: int) -> FinishReason | None:
        """Why the request ends with the last of `tokens`, if it does."""
        if tokens[-1] in self.eos_token_ids:
            return "eos"
        if self.criteria and self._criterion_holds(tokens):
            return "stop"
        return "length" if num_new_tokens >= self.max_new_tokens else None

    def _criterion_holds(self, tokens: Sequence[int]) -> bool:
        row = torch.tensor([[*self.pad_tokens, *tokens]], dtype=torch.int64)
        return any(bool(torch.as_tensor(holds(row, None)).all()) for holds in self.criteria)


class TokenEvent(NamedTuple):
    """What one step added to one request."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class RequestStats:
    """Counts of one request, by drafter arm where that makes sense."""

    steps: int = 0
    proposed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    speculative_steps: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0

    def count(self, arm: str, *, proposed: int, accepted: int) -> None:
        """Add one step in which `arm` drafted."""
        for counter, number in (
            (self.proposed, proposed),
            (self.accepted, accepted),
            (self.speculative_steps, 1),
        ):
            counter[arm] = counter.get(arm, 0) + number


class Request:
    """One request from submission to its last token."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        sampler: RowSampler,
        rules: StopRules,
        temperature: float,
        may_draft: Callable[[str], bool],
        content_root: bytes = b"",
    ) -> None:
        self.id = request_id
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.sampler = sampler
        self.rules = rules
        self.temperature = temperature
        self.may_draft = may_draft  # by family
        self._content_root = content_root  # of the keys: the model that its blocks are of
        self.finish_reason: FinishReason | None = None
        self.told: tuple[int, FinishReason | None] = (0, None)  # output tokens, and end, of events
        self.is_started = False  # drafters may know of it
        self.is_cancelled = False
        self.stats = RequestStats()
        self._blocks: IntArray = np.zeros(16, dtype=np.int64)
        self._pages = PageTable(self._blocks[:0])
        self.start_again()

    def start_again(self) -> None:
        """Go on from what was told: what else a step made of it is forgotten, and nothing is cached."""
        del self.tokens[self.prompt_tokens + self.told[0] :]
        self.finish_reason = self.told[1]
        self.cached_after = 0  # tokens whose KV stands once the current step is committed
        self.scheduled = ScheduledRequest(
            id=self.id,
            num_tokens=len(self.tokens),
            max_tokens=self.prompt_tokens + self.rules.max_new_tokens,
        )
        self._fixed_blocks = 0  # leading entries of _blocks that cannot have changed
        self._tail: list[int] = []  # the entries behind them

    @property
    def output(self) -> list[int]:
        """Tokens emitted so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def generated_tokens(self) -> int:
        """How many tokens were emitted so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """How many more may be emitted."""
        return self.rules.max_new_tokens - self.generated_tokens

    def append(self, tokens: Sequence[int]) -> int:
        """Take new tokens up to the one that ends the request; returns how many were taken."""
        rules, own = self.rules, self.tokens
        first, most = len(own) + 1, self.prompt_tokens + rules.max_new_tokens
        may_end = first + len(tokens) > most or rules.criteria
        if not may_end and rules.eos_token_ids.isdisjoint(tokens):  # the usual case
            own.extend(tokens)
            return len(tokens)
        for taken, token in enumerate(tokens, start=1):
            own.append(token)
            try:
                self.finish_reason = rules.reason(own, self.generated_tokens)
            except Exception as error:
                blame(error, self)
                raise
            if self.finish_reason is not None:
                return taken
        return len(tokens)

    def update_keys(self, block_size: int) -> None:
        """Extend the chained keys of full blocks."""
        if len(self.tokens) // block_size > len(self.scheduled.keys):
            keys, root = self.scheduled.keys, self._content_root
            self.scheduled.keys = block_keys(self.tokens, block_size, keys, root=root)

    def page_table(self, block_size: int) -> PageTable:
        """All blocks, in order of position."""
        blocks = self.scheduled.table.blocks
        fixed = min(self._fixed_blocks, len(blocks))
        tail = blocks[fixed:]
        if tail != self._tail or len(blocks) != len(self._pages.blocks):
            self._pages = self._listed(blocks, fixed, tail)
        self._fixed_blocks = min(self.scheduled.cached_tokens // block_size, len(blocks))
        self._tail = blocks[self._fixed_blocks :]
        return self._pages

    def _listed(self, blocks: Sequence[int], fixed: int, tail: Sequence[int]) -> PageTable:
        """The table, of which the `tail` has changed."""
        if len(blocks) > self._blocks.size:
            grown: IntArray = np.zeros(2 * len(blocks), dtype=np.int64)
            grown[:fixed] = self._blocks[:fixed]
            self._blocks = grown
        self._blocks[fixed : len(blocks)] = tail
        return PageTable(self._blocks[: len(blocks)])

    def slots(self, start: int, count: int, block_size: int) -> list[int]:
        """Where the tokens at positions `start` to `start + count` are kept."""
        page, offset = divmod(start, block_size)
        if offset + count <= block_size:  # of one block
            first = self.scheduled.table.blocks[page] * block_size + offset
            return [*range(first, first + count)]
        return self.slots_of(range(start, start + count), block_size)

    def slots_of(self, positions: Sequence[int], block_size: int) -> list[int]:
        """Where the tokens at `positions` are kept."""
        blocks = self.scheduled.table.blocks
        return [
            blocks[position // block_size] * block_size + position % block_size
            for position in positions
        ]

    def lose_cache(self) -> None:
        """The request was preempted: nothing of it is cached any more."""
        self._fixed_blocks, self._tail = 0, []
        self.stats.preemptions += 1
