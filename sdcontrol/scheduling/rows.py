"""What the scheduler deals in: requests as counts, and what each computes in a step.

Knows nothing of tokens' values, tensors or time.
"""

from dataclasses import dataclass, field

from sdcontrol.scheduling.blocks import BlockTable

__all__ = ["Row", "ScheduledBatch", "ScheduledRequest"]


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request, as the scheduler sees it.

    Positions of its tokens: KV of `[0, cached_tokens)` is in the pool, `[cached_tokens,
    num_tokens)` is to be computed, drafts are written from `num_tokens` on.
    """

    id: str
    num_tokens: int  # prompt and what has been emitted
    max_tokens: int  # prompt and the most that may be emitted
    keys: list[bytes] = field(default_factory=list)  # of its full blocks; the owner extends it
    shareable: bool = True  # False: takes no cached prefix, offers none
    recompute_tail_tokens: int = 0  # so many tokens before the last are computed, never shared
    cached_tokens: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    arrival: int = 0  # set by `Scheduler.submit`

    @property
    def pending_tokens(self) -> int:
        """Tokens still to compute: 1 while it decodes, more while it prefills."""
        return self.num_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Row:
    """What one request computes in one step, drafts aside.

    A row decodes when exactly one token was pending, however it came to that: after a token, a
    prompt of one token, a prompt whose other blocks were shared, or all but one of its chunks.
    """

    request: ScheduledRequest
    num_new_tokens: int
    is_decode: bool
    completes: bool  # it reaches the last token, whose logits give the next one


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: rows oldest first; who lost its blocks for it, youngest first; whether any wait."""

    decoding: tuple[Row, ...]
    prefilling: tuple[Row, ...]
    preempted: tuple[ScheduledRequest, ...]
    others_wait: bool = False

    @property
    def prefill_tokens(self) -> int:
        """Tokens that the prefilling rows compute."""
        return sum(row.num_new_tokens for row in self.prefilling)
