"""What a request keeps of itself: its tokens up to the end, and its page table."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcontrol.engine.drafters.base import Draft
from sdcontrol.engine.request import Request, StopRules
from sdcontrol.engine.sampling import RowSampler

BLOCK = 4
EOS = 9


def request_of(rules: StopRules, prompt_tokens: int = 6) -> Request:
    return Request(
        "r",
        [1] * prompt_tokens,
        sampler=RowSampler(),
        rules=rules,
        temperature=0.0,
        may_draft=lambda family: True,
    )


@given(
    st.lists(st.lists(st.integers(5, 9), min_size=1, max_size=5), max_size=6),
    st.integers(1, 14),
    st.booleans(),
)
def test_tokens_are_taken_up_to_the_one_that_ends_the_request(
    steps: list[list[int]], most: int, has_criterion: bool
) -> None:
    """However many come at once."""
    criteria = (lambda ids, _: ids[:, -1] == 8,) if has_criterion else ()
    request = request_of(StopRules(most, frozenset({EOS}), criteria))
    expected: list[int] = []
    reason = None
    for tokens in steps:
        if reason is not None:
            break
        taken = 0
        for token in tokens:
            expected.append(token)
            taken += 1
            if token == EOS:
                reason = "eos"
            elif has_criterion and token == 8:
                reason = "stop"
            elif len(expected) == most:
                reason = "length"
            if reason is not None:
                break
        assert request.append(tokens) == taken
        assert (request.output, request.finish_reason) == (expected, reason)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=12))
def test_a_page_table_lists_the_blocks_and_is_the_same_one_while_they_are(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Blocks come, go and are replaced behind those that are full; a request may lose all."""
    request, blocks, next_block = request_of(StopRules(1000)), list[int](), 1
    request.scheduled.table.blocks = blocks
    table = request.page_table(BLOCK)
    for added, dropped, is_lost in steps:
        before = list(blocks)
        if is_lost:
            blocks.clear()
            request.scheduled.cached_tokens = 0
            request.lose_cache()
        full = request.scheduled.cached_tokens // BLOCK
        del blocks[max(full, len(blocks) - dropped) :]
        blocks.extend(range(next_block, next_block + added))
        next_block += added
        later = request.page_table(BLOCK)
        assert later.blocks.tolist() == blocks
        assert is_lost or (later is table) == (blocks == before)
        table = later
        request.scheduled.cached_tokens = max(full, len(blocks) - 1) * BLOCK


@pytest.mark.parametrize("start", [0, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_slots_are_those_of_the_blocks(start: int, count: int) -> None:
    request = request_of(StopRules(9))
    request.scheduled.table.blocks = [7, 3, 5]
    expected = [int(np.array([7, 3, 5])[p // BLOCK]) * BLOCK + p % BLOCK for p in range(12)]
    assert request.slots(start, count, BLOCK) == expected[start : start + count]


def test_a_chain_is_one_whatever_its_parents_are_kept_in() -> None:
    assert Draft((5, 6), [-1, 0]).is_chain  # type: ignore[arg-type]  # a list, as some will give
    assert Draft.chain([5, 6, 7]).is_chain
    assert Draft().is_chain
    assert not Draft((5, 6), (-1, -1)).is_chain
