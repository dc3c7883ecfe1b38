"""Into how many parts contexts are split, so that no part of the device waits for another.

    one request's keys, one KV head    |------------------|    one program, or
                                       | part | part | part    one for each part, and a combination

Contexts that are alike are split so that all programs run at once: a second wave would take as long
as the first, however few are left for it. Others are split into parts of equal length, of two waves.
How long a part is is read on the device, so that a grid which was captured serves any contexts.

Knows lengths, and how many programs a device runs; nothing of tables or kernels.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIN_SPLIT_KEYS", "MOST_PART_ROWS", "SplitPlan"]

MIN_SPLIT_KEYS = 256  # below, writing and combining a part costs more than it brings
MOST_PART_ROWS = 8192  # parts times tokens: each part is written, and has memory, for all tokens
_MOST_PARTS = 64
_ALIKE = 2.0  # times the mean that the longest context is, at most
_RAGGED_WAVES = 2  # of parts of equal length; with more, each would be mostly its beginning and end
_GRID_WAVES = 3  # in a captured grid: a long context among short ones has most of the parts
_ENOUGH_WAVES = 2  # no split beyond: combining would cost more than balance brings
_FULL = 0.75  # of the places in whole waves, where no other program uses what one leaves
_LONGEST_PART = 8192  # keys in 128 steps of one program; an estimate, never measured
_MOST_FOR_ONE = 4  # parts on account of one long context: all requests' outputs get as many
_UNBOUNDED = (1 << 31) - 1

Lengths = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How contexts are split for layers with the same tiles, KV heads and window."""

    kv_heads: int
    tile_tokens: int  # of one request
    programs_per_sm: int  # at a time
    num_sms: int
    window: int | None = None

    @property
    def places(self) -> int:
        """Programs that run at once."""
        return self.programs_per_sm * self.num_sms

    def part_keys(self, contexts: Lengths, tokens: Lengths) -> int:
        """Keys that one program should read. Both by request: keys before its first token, and tokens."""
        tiles = -(-tokens // self.tile_tokens)
        spans = np.minimum(contexts + tokens, self._most_keys).astype(np.int64)
        programs, longest = int(tiles.sum()) * self.kv_heads, int(spans.max())
        total = int(spans @ tiles) * self.kv_heads  # as if a prompt's first tiles saw all of it
        if longest * programs <= _ALIKE * total:
            wanted = math.ceil(longest / self._parts_at_once(programs))
        else:
            wanted = math.ceil(total / (_RAGGED_WAVES * self.places))
        return max(wanted, MIN_SPLIT_KEYS)

    def parts(self, contexts: Lengths, tokens: Lengths) -> int:
        """Of the longest context: what a grid for these requests alone needs, rounded as a grid's is."""
        longest = min(int((contexts + tokens).max()), self._most_keys)
        wanted = math.ceil(longest / self.part_keys(contexts, tokens))
        return _rounded(wanted, int(tokens.sum()))

    def parts_of_grid(self, *, num_tiles: int, num_keys: int) -> int:
        """For any requests of `num_tiles` tiles in all, a tile each, and up to `num_keys` keys."""
        programs, longest = num_tiles * self.kv_heads, min(num_keys, self._most_keys)
        wanted = min(math.ceil(longest / _LONGEST_PART), _MOST_FOR_ONE)
        if programs < _ENOUGH_WAVES * self.places:
            wanted = max(wanted, math.ceil(_GRID_WAVES * self.places / programs))
        wanted = min(wanted, math.ceil(longest / MIN_SPLIT_KEYS))
        return _rounded(wanted, num_tiles * self.tile_tokens)

    @property
    def _most_keys(self) -> int:
        """That a tile reads, however long the context is."""
        return _UNBOUNDED if self.window is None else self.window + self.tile_tokens

    def _parts_at_once(self, programs: int) -> int:
        """Of each context. A lone program of a multiprocessor leaves it idle when it ends, others go on."""
        if programs <= self.places or self.programs_per_sm > 1:
            return max(self.places // programs, 1)
        for parts in range(1, _MOST_FOR_ONE):
            waves = parts * programs / self.places
            if waves >= _FULL * math.ceil(waves):
                return parts
        return _MOST_FOR_ONE


def _rounded(parts: int, tokens: int) -> int:
    """A power of two, for the kernel that combines parts is compiled for each number; bounded."""
    most = max(min(MOST_PART_ROWS // tokens, _MOST_PARTS), 1)
    rounded = 1 << (max(parts, 1) - 1).bit_length()
    return min(rounded, 1 << (most.bit_length() - 1))
