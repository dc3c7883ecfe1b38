"""Parts by length: the best of all cuts, by trying them all."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcontrol.engine.cutting import cut_by_length


def cost(parts: list[list[int]], lengths: list[int], cost_per_part: float) -> float:
    return sum(cost_per_part + max(lengths[i] for i in part) * len(part) for part in parts)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=32),
    cost_per_part=st.sampled_from([0.5, 4.0, 20.0, 1000.0]),
)
def test_no_cut_by_length_costs_less(lengths: list[int], cost_per_part: float) -> None:
    parts = cut_by_length(lengths, cost_per_part)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    lows = [min(lengths[i] for i in part) for part in parts]
    assert all(
        low > max(lengths[i] for i in part) for low, part in zip(lows[:-1], parts[1:], strict=True)
    )
    distinct = sorted(set(lengths))
    least = min(
        cost(
            [[i for i, n in enumerate(lengths) if a <= n < b] for a, b in pairwise(ends)],
            lengths,
            cost_per_part,
        )
        for count in range(len(distinct))
        for inner in combinations(distinct[1:], count)
        for ends in [(distinct[0], *inner, distinct[-1] + 1)]
    )
    assert cost(parts, lengths, cost_per_part) == pytest.approx(least)


def test_unequal_lengths_stay_together_where_parts_are_dear() -> None:
    assert cut_by_length([5] * 16, 1.0) == [list(range(16))]
    assert cut_by_length([1, 2, 3, 9], 1000.0) == [[0, 1, 2, 3]]
    assert cut_by_length([1, 9, 1, 9, 1, 1], 2.0) == [[1, 3], [0, 2, 4, 5]]
