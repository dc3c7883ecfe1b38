"""Where a captured forward finds its inputs: one buffer that never moves, filled by one copy.

Knows segments and buckets; nothing of models, graphs or requests. What is left of a bucket is
padding: token 0 at position 0, written to the null block, and row 0 of the logits again.

    int64 | ids | positions | slots | query slots | rows [rows] |  int32 | tables |
            each [tokens]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdcontrol.engine.attention import AttentionBackend, QuerySink
from sdcontrol.engine.buckets import Bucket
from sdcontrol.engine.packing import IntArray, PackedBatch, Segment

__all__ = ["BucketAttention", "Captured", "StaticInputs"]


class BucketAttention(AttentionBackend, Protocol):
    """Attention of one bucket, over tables that stay where they are."""

    @property
    def num_elements(self) -> int:
        """The length of its tables, int32."""
        ...

    def bind(self, tables: Tensor) -> None:
        """Read tables from here, int32 `[num_elements]`, from now on."""
        ...

    def fill(self, segments: Sequence[Segment], into: NDArray[np.int32]) -> None:
        """Write the tables' content for these segments, in packed order, over that of others: `into`
        is the same buffer each time, which nobody else writes.
        """
        ...

    @property
    def first_keys(self) -> Sequence[Tensor]:
        """Where in the tables the key index of each request's first token stands: `[requests]`.

        May be changed there between two forwards; far below zero, a request sees nothing.
        """
        ...


class StaticInputs:
    """The inputs of one bucket, on the device."""

    def __init__(self, bucket: Bucket, attention: BucketAttention, device: torch.device) -> None:
        tokens = bucket.tokens
        self._num_wide = 4 * tokens + bucket.rows
        length = 2 * self._num_wide + attention.num_elements
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(length, dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        self._device = torch.zeros(length, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if is_cuda else None
        wide = self._device[: 2 * self._num_wide].view(torch.int64)
        attention.bind(self._device[2 * self._num_wide :])
        self._attention = attention
        self._bucket = bucket
        self.query_slots = wide[3 * tokens : 4 * tokens]
        self._places = wide[tokens : 3 * tokens].view(2, tokens)  # positions, slots
        self.batch = PackedBatch(
            input_ids=wide[:tokens].view(1, tokens),
            positions=wide[tokens : 2 * tokens].view(1, tokens),
            slots=wide[2 * tokens : 3 * tokens],
            logit_rows=wide[4 * tokens :],
            first_row=[],
            groups=[],
            order=[],
        )

    def load(self, segments: Sequence[Segment], queries: QuerySink | None = None) -> list[int]:
        """Bring these segments to the device, in their order; each one's first row of logits."""
        if self._sent is not None:
            self._sent.synchronize()  # the copy before: long done
        narrow = self._host.numpy()
        wide: IntArray = narrow[: 2 * self._num_wide].view(np.int64)
        first_rows = self._fill(wide, segments)
        if queries is not None:
            tokens = self._bucket.tokens
            wide[3 * tokens : 4 * tokens] = queries.slots(tokens)
        self._attention.fill(segments, narrow[2 * self._num_wide :])
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return first_rows

    def go_on(self, tokens: Tensor, moves: Tensor) -> None:
        """Let the first requests, of one token each, go on where the device says.

        `tokens` int64 `[n]` are the ids, `moves` int64 `[3, m]` positions, slots and key indices,
        m >= n.
        """
        width = moves.shape[1]
        self.batch.input_ids[0, : len(tokens)].copy_(tokens)
        self._places[:, :width].copy_(moves[:2])
        for keys in self._attention.first_keys:
            keys[:width].copy_(moves[2])

    def _fill(self, wide: IntArray, segments: Sequence[Segment]) -> list[int]:
        """Plain lists until the end: a handful of tokens each is too little for arrays."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        first_rows: list[int] = []
        for segment in segments:
            ids.extend(segment.tokens)
            positions.extend(segment.positions)
            slots.extend(segment.slots)
            first_rows.append(len(rows))
            rows.extend(range(len(ids) - segment.num_logits, len(ids)))
        wide[:] = 0
        tokens = self._bucket.tokens
        for first, values in zip(
            (0, tokens, 2 * tokens, 4 * tokens), (ids, positions, slots, rows), strict=True
        ):
            wide[first : first + len(values)] = values
        return first_rows


@dataclass(frozen=True, slots=True)
class Captured:
    """A bucket's graph: computes from `inputs` when `replay` is called."""

    inputs: StaticInputs
    replay: Callable[[], None]
