"""Cut requests of unequal lengths into rectangles, at the least cost.

Numbers in, indices out; knows nothing of what the lengths are of.
"""

from collections.abc import Sequence

__all__ = ["cut_by_length"]


def cut_by_length(lengths: Sequence[int], cost_per_part: float) -> list[list[int]]:
    """Indices of `lengths` in parts, each padded to its longest; those of the longest come first.

    No other cut by length makes padded lengths and `cost_per_part` for each part sum to less: the best
    one of the longest few is a last part and the best one of those before it.
    """
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    if len(by_length) == 1:
        return [list(range(len(lengths)))]
    falling = sorted(by_length, reverse=True)
    best = [(0.0, 0)]  # of the first few lengths: what they cost, and where their last part begins
    for end in range(1, len(falling) + 1):
        count, cuts = 0, []
        for first in range(end - 1, -1, -1):
            count += len(by_length[falling[first]])
            cuts.append((best[first][0] + cost_per_part + falling[first] * count, first))
        best.append(min(cuts))
    parts: list[list[int]] = []
    end = len(falling)
    while end:
        first = best[end][1]
        parts.insert(0, sorted(i for length in falling[first:end] for i in by_length[length]))
        end = first
    return parts
