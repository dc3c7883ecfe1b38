"""The block pool: reference counts, sharing, eviction, contiguity, and books that balance."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcontrol.errors import CacheExhausted, ConfigError, IntegrityError
from sdcontrol.scheduling.blocks import NULL_BLOCK, BlockPool, BlockTable, block_keys

BLOCK_SIZE = 4


def make_table(pool: BlockPool, keys: list[bytes]) -> BlockTable:
    """A table whose every block is full and registered under `keys`."""
    table = BlockTable()
    pool.extend(table, len(keys) * pool.block_size)
    pool.register(table, keys, len(keys) * pool.block_size)
    return table


def keys_of(tokens: list[int]) -> list[bytes]:
    return block_keys(tokens, BLOCK_SIZE, [])


def is_contiguous(table: BlockTable) -> bool:
    first = table.blocks[0]
    return table.blocks == list(range(first, first + len(table.blocks)))


# -- keys ----------------------------------------------------------------------------------------


@given(tokens=st.lists(st.integers(0, 200_000), max_size=40), data=st.data())
def test_keys_grown_in_steps_equal_keys_made_at_once(
    tokens: list[int], data: st.DataObject
) -> None:
    keys: list[bytes] = []
    for length in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))):
        block_keys(tokens[:length], BLOCK_SIZE, keys)
    assert block_keys(tokens, BLOCK_SIZE, keys) == keys_of(tokens)
    assert len(keys) == len(tokens) // BLOCK_SIZE


@given(
    one=st.lists(st.integers(0, 1), min_size=12, max_size=12),
    other=st.lists(st.integers(0, 1), min_size=12, max_size=12),
)
def test_keys_are_equal_exactly_where_the_whole_prefix_is(one: list[int], other: list[int]) -> None:
    for index, (key, other_key) in enumerate(zip(keys_of(one), keys_of(other), strict=True)):
        end = (index + 1) * BLOCK_SIZE
        assert (key == other_key) == (one[:end] == other[:end])


# -- taking and giving back ----------------------------------------------------------------------


def test_every_block_but_the_null_block_can_be_had() -> None:
    pool, table = BlockPool(9, BLOCK_SIZE), BlockTable()
    assert pool.capacity_tokens == 8 * BLOCK_SIZE
    pool.extend(table, pool.capacity_tokens)
    assert sorted(table.blocks) == list(range(1, 9))
    assert NULL_BLOCK not in table.blocks
    assert pool.free_blocks == 0


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        BlockPool(1, BLOCK_SIZE)


def test_a_failed_extend_changes_nothing() -> None:
    pool = BlockPool(6, BLOCK_SIZE)
    cached = make_table(pool, keys_of([0] * 8))
    pool.release(cached)
    table = BlockTable()
    pool.extend(table, 5)
    blocks = list(table.blocks)
    with pytest.raises(CacheExhausted, match=r"4 blocks needed, 3 of 5 free; lower max_batch_size"):
        pool.extend(table, 21)
    assert table.blocks == blocks
    assert pool.free_blocks == 3
    assert len(pool.match_prefix(keys_of([0] * 8), 8)) == 2
    pool.check_integrity([table])


@given(tokens=st.integers(0, 40), more=st.integers(0, 40))
def test_blocks_needed_is_what_extend_takes(tokens: int, more: int) -> None:
    pool, table = BlockPool(30, BLOCK_SIZE), BlockTable()
    pool.extend(table, tokens)
    free, needed = pool.free_blocks, pool.blocks_needed(table, more)
    pool.extend(table, more)
    assert free - pool.free_blocks == needed
    assert len(table.blocks) == -(-max(tokens, more) // BLOCK_SIZE)


def test_shrink_gives_back_what_lies_beyond_and_nothing_that_was_offered() -> None:
    pool = BlockPool(20, BLOCK_SIZE)
    table = make_table(pool, keys_of([1] * 8))
    pool.extend(table, 17)
    pool.shrink(table, 9)
    assert len(table.blocks) == 3
    pool.shrink(table, 0)
    assert len(table.blocks) == table.num_shareable == 2
    pool.check_integrity([table])


def test_unregistered_blocks_are_free_at_once_when_released() -> None:
    pool, table = BlockPool(6, BLOCK_SIZE), BlockTable()
    pool.extend(table, 20)
    pool.release(table)
    assert table.blocks == []
    assert pool.free_blocks == 5
    assert pool.match_prefix(keys_of([1] * 20), 20) == []


# -- sharing -------------------------------------------------------------------------------------


def test_a_shared_prefix_is_the_same_blocks_and_costs_none() -> None:
    pool = BlockPool(20, BLOCK_SIZE)
    keys = keys_of(list(range(16)))
    owner, guest = make_table(pool, keys), BlockTable()
    free = pool.free_blocks
    assert pool.share_prefix(guest, keys, 16) == 16
    assert guest.blocks == owner.blocks
    assert pool.free_blocks == free
    pool.check_integrity([owner, guest])
    pool.release(owner)
    assert (owner.blocks, owner.num_shareable) == ([], 0)
    assert pool.free_blocks == free
    pool.check_integrity([guest])


@given(max_tokens=st.integers(-3, 20))
def test_no_more_than_the_asked_tokens_are_shared(max_tokens: int) -> None:
    pool, table = BlockPool(20, BLOCK_SIZE), BlockTable()
    keys = keys_of(list(range(16)))
    owner = make_table(pool, keys)
    covered = pool.share_prefix(table, keys, max_tokens)
    assert covered == min(16, max(max_tokens, 0)) // BLOCK_SIZE * BLOCK_SIZE
    assert table.blocks == owner.blocks[: covered // BLOCK_SIZE]


def test_sharing_ends_at_the_first_difference() -> None:
    pool, table = BlockPool(20, BLOCK_SIZE), BlockTable()
    make_table(pool, keys_of([1] * 16))
    assert pool.share_prefix(table, keys_of([1] * 8 + [2] + [1] * 7), 16) == 8


def test_a_prefix_is_shared_only_into_an_empty_table() -> None:
    pool = BlockPool(20, BLOCK_SIZE)
    table = make_table(pool, keys_of([1] * 8))
    with pytest.raises(IntegrityError, match="release it first"):
        pool.share_prefix(table, keys_of([1] * 8), 8)


def test_only_full_blocks_of_committed_tokens_are_offered() -> None:
    pool, table = BlockPool(20, BLOCK_SIZE), BlockTable()
    keys = keys_of([1] * 12)
    pool.extend(table, 12)
    pool.register(table, keys, 7)
    assert pool.match_prefix(keys, 12) == table.blocks[:1]
    pool.register(table, keys[:2], 12)
    assert pool.match_prefix(keys, 12) == table.blocks[:2]


def test_the_first_of_two_equal_blocks_is_the_one_that_is_shared() -> None:
    pool = BlockPool(20, BLOCK_SIZE)
    keys = keys_of([1] * 8)
    first, second = make_table(pool, keys), make_table(pool, keys)
    assert pool.match_prefix(keys, 8) == first.blocks
    assert second.num_shareable == 2
    free = pool.free_blocks
    pool.release(second)
    assert pool.free_blocks == free + 2
    pool.check_integrity([first])


def test_a_pool_without_sharing_shares_nothing() -> None:
    pool, table = BlockPool(20, BLOCK_SIZE, prefix_sharing=False), BlockTable()
    keys = keys_of([1] * 8)
    owner = make_table(pool, keys)
    assert pool.share_prefix(table, keys, 8) == 0
    pool.release(owner)
    pool.check_integrity([])
    assert pool.match_prefix(keys, 8) == []


# -- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_evicted", range(5))
def test_the_tail_of_a_prefix_is_evicted_before_its_head(num_evicted: int) -> None:
    pool = BlockPool(5, BLOCK_SIZE)
    keys = keys_of(list(range(16)))
    pool.release(make_table(pool, keys))
    fresh = BlockTable()
    pool.extend(fresh, num_evicted * BLOCK_SIZE)
    assert len(pool.match_prefix(keys, 16)) == 4 - num_evicted
    pool.check_integrity([fresh])


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(5, BLOCK_SIZE)
    old, new = keys_of([1] * 8), keys_of([2] * 8)
    pool.release(make_table(pool, old))
    pool.release(make_table(pool, new))
    reader = BlockTable()
    pool.share_prefix(reader, old, 8)
    pool.release(reader)
    pool.extend(BlockTable(), 8)
    assert len(pool.match_prefix(old, 8)) == 2
    assert pool.match_prefix(new, 8) == []


def test_marks_last_as_long_as_the_content() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    keys = keys_of([1] * 8)
    table = make_table(pool, keys)
    block = table.blocks[0]
    pool.mark(block, "draft_model")
    pool.release(table)
    pool.share_prefix(table, keys, 8)
    assert pool.is_marked(block, "draft_model")
    assert not pool.is_marked(block, "small")
    pool.release(table)
    pool.extend(table, 8)
    assert block in table.blocks
    assert not pool.is_marked(block, "draft_model")


# -- contiguity ----------------------------------------------------------------------------------


def test_requests_that_grow_in_turn_stay_contiguous() -> None:
    pool = BlockPool(1 + 8 * 16, BLOCK_SIZE)
    tables = [BlockTable() for _ in range(8)]
    for num_tokens in range(1, 16 * BLOCK_SIZE + 1):
        for table in tables:
            pool.extend(table, num_tokens, expected_tokens=16 * BLOCK_SIZE)
    assert pool.free_blocks == 0
    assert all(is_contiguous(table) for table in tables)


def test_requests_that_expect_more_than_there_is_still_start_far_apart() -> None:
    pool = BlockPool(1 + 8 * 32, BLOCK_SIZE)
    tables = [BlockTable() for _ in range(8)]
    for num_tokens in range(1, 12 * BLOCK_SIZE + 1):
        for table in tables:
            pool.extend(table, num_tokens, expected_tokens=50 * BLOCK_SIZE)
    assert all(is_contiguous(table) for table in tables)


def test_a_run_of_the_expected_length_is_found_between_others() -> None:
    pool = BlockPool(41, BLOCK_SIZE)
    tables = [BlockTable() for _ in range(5)]
    for table in tables:
        pool.extend(table, 8 * BLOCK_SIZE, expected_tokens=8 * BLOCK_SIZE)
    pool.release(tables[2])
    guest = BlockTable()
    for num_tokens in range(1, 8 * BLOCK_SIZE + 1):
        pool.extend(guest, num_tokens, expected_tokens=8 * BLOCK_SIZE)
    assert is_contiguous(guest)


@given(kept=st.sets(st.integers(0, 29)), expected_tokens=st.integers(0, 500))
def test_fragmentation_is_never_a_reason_to_fail(kept: set[int], expected_tokens: int) -> None:
    pool = BlockPool(31, 1)
    singles = [BlockTable() for _ in range(30)]
    for table in singles:
        pool.extend(table, 1)
    for index, table in enumerate(singles):
        if index not in kept:
            pool.release(table)
    guest = BlockTable()
    pool.extend(guest, 30 - len(kept), expected_tokens=expected_tokens)
    assert pool.free_blocks == 0
    pool.check_integrity([guest, *(singles[index] for index in kept)])


# -- integrity -----------------------------------------------------------------------------------


def lose_a_table(pool: BlockPool, tables: list[BlockTable]) -> None:
    tables.pop()


def hold_a_block_twice(pool: BlockPool, tables: list[BlockTable]) -> None:
    tables[0].blocks.append(tables[1].blocks[-1])


def hold_a_free_block(pool: BlockPool, tables: list[BlockTable]) -> None:
    tables[0].blocks.append(next(b for b in range(1, pool.num_blocks) if pool._is_free[b]))


def hold_the_null_block(pool: BlockPool, tables: list[BlockTable]) -> None:
    tables[0].blocks[0] = NULL_BLOCK


def share_without_registering(pool: BlockPool, tables: list[BlockTable]) -> None:
    block = tables[1].blocks[-1]
    tables[0].blocks.append(block)
    pool._num_references[block] = 2


def forget_a_free_block(pool: BlockPool, tables: list[BlockTable]) -> None:
    pool._num_free -= 1


def forget_a_key(pool: BlockPool, tables: list[BlockTable]) -> None:
    pool._block_of.popitem()


@pytest.mark.parametrize(
    "tamper",
    [
        lose_a_table,
        hold_a_block_twice,
        hold_a_free_block,
        hold_the_null_block,
        share_without_registering,
        forget_a_free_block,
        forget_a_key,
    ],
)
def test_books_that_do_not_balance_are_noticed(
    tamper: Callable[[BlockPool, list[BlockTable]], None],
) -> None:
    pool = BlockPool(20, BLOCK_SIZE)
    tables = [make_table(pool, keys_of([1] * 8)), BlockTable()]
    pool.extend(tables[1], 7)
    pool.check_integrity(tables)
    tamper(pool, tables)
    with pytest.raises(IntegrityError, match="please report this"):
        pool.check_integrity(tables)
