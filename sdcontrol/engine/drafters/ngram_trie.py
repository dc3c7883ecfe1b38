"""A compressed trie of every position's preceding tokens, in one array: compiled loops.

Read backwards, as deep as `max_match`:

    text      a b c a b           at the last b the walk is  root -b-> "b" -a-> "ab" -c-> nothing
    position  0 1 2 3 4           so the longest match is "ab", last seen before at position 1

Each node is a run of tokens that stood at one or several positions, and remembers the latest of
them. Adding a token walks from the root along its own suffix, so that the walk that updates the
latest positions also finds the longest match with its most recent earlier occurrence. A node
stands only where occurrences part, at most two for each token. The walk compares at most
`max_match` tokens and probes the table at each parting, whatever the length of the text.

    header    [8]               sizes and starts, written by the caller
    found     [MOST, 3]         by occurrence of the text's suffix: see `POSITION` and below
    runs      [AHEAD, MOST]     the tokens after each; where the text ends, those are repeated
    text      [capacity]        tokens, written by the caller
    links     [capacity, 2]     by position: where its longest match ended before; its length
    table     [slots, 5]        the nodes, by open addressing: see `PARENT` and below

All numbers are below 2**32. Knows nothing of how the array is made or grows.
"""

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import array_at, compiled

__all__ = ["Found", "Memory", "add_all", "add_tokens", "count_followed", "move"]

Memory = NDArray[np.uint32]
"""Where nothing is compiled, a `memoryview` of the array: it gives plain ints, and faster."""

Found = tuple[int, int, int, int]
"""Of a look-up: the length of the match, 0 for none; its occurrences; those beside the first that
go on with the same token as it; tokens that the second one's run shares with the first one's."""

# The header: where parts start; a power of two, more than there are ever nodes; tokens compared;
# occurrences looked up; tokens after each.
RUNS, TEXT, LINKS, TABLE, SLOTS, MAX_MATCH, MOST, AHEAD = 0, 1, 2, 3, 4, 5, 6, 7
FOUND = 8

# Of an occurrence: where it ended, which one found before it its run follows furthest, and how far.
POSITION, BESIDE, SHARED = 0, 1, 2

# Of a slot. Node 0 is the root, which has no slot; a node that others hang on bears its parting
# position + 1, a leaf 0. A free slot has length 0, a leaf `max_match`.
PARENT, TOKEN, NODE, LATEST, LENGTH = 0, 1, 2, 3, 4
WIDTH = 5


@compiled("int64(uint32[::1], int64, int64)")
def _slot_of(memory: Memory, parent: int, token: int) -> int:
    """Where in the array the child of `parent` stands that goes on with `token`, or is to stand."""
    last = memory[SLOTS] - 1
    table = memory[TABLE]
    mixed = (parent * 0x9E3779B1) ^ (token * 0x85EBCA6B)
    place = (mixed ^ (mixed >> 15)) & last
    slot: int = table + WIDTH * place
    while memory[slot + LENGTH] and not (
        memory[slot + TOKEN] == token and memory[slot + PARENT] == parent
    ):
        place = (place + 1) & last
        slot = table + WIDTH * place
    return slot


@compiled("void(uint32[::1], int64, int64, int64, int64)")
def _put_leaf(memory: Memory, slot: int, parent: int, token: int, latest: int) -> None:
    """A run that only stood at `latest`."""
    memory[slot + PARENT] = parent
    memory[slot + TOKEN] = token
    memory[slot + NODE] = 0
    memory[slot + LATEST] = latest
    memory[slot + LENGTH] = memory[MAX_MATCH]


@compiled("int64(uint32[::1], int64, int64, int64, int64)")
def _num_shared(memory: Memory, position: int, before: int, shared: int, most: int) -> int:
    """Tokens up to `position` that also stand up to `before`: `shared` known, `most` of interest.

    Nothing before the text equals a token.
    """
    text = memory[TEXT]
    most = most if most <= before else before + 1
    while shared < most and memory[text + position - shared] == memory[text + before - shared]:
        shared += 1
    return shared


@compiled("void(uint32[::1], int64, int64, int64)")
def _part(memory: Memory, slot: int, position: int, length: int) -> None:
    """Part the node at `slot` where the run before `position` leaves it, after `length` tokens."""
    text, parting = memory[TEXT], position + 1
    node, before, longer = memory[slot + NODE], memory[slot + LATEST], memory[slot + LENGTH]
    memory[slot + NODE] = parting
    memory[slot + LATEST] = position
    memory[slot + LENGTH] = length
    if length <= before:  # else it starts with the text, and nothing can follow it
        token = memory[text + before - length]
        moved = _slot_of(memory, parting, token)
        _put_leaf(memory, moved, parting, token, before)
        memory[moved + NODE] = node
        memory[moved + LENGTH] = longer
    token = memory[text + position - length]
    _put_leaf(memory, _slot_of(memory, parting, token), parting, token, position)


@compiled("void(uint32[::1], int64)")
def _add_token(memory: Memory, position: int) -> None:
    """Walk along the suffix that ends at `position`: update its nodes, and link its match."""
    text, max_match = memory[TEXT], memory[MAX_MATCH]
    node, length, before = 0, 0, 0
    while length < max_match:
        token = memory[text + position - length]
        slot = _slot_of(memory, node, token)
        longer = memory[slot + LENGTH]
        if longer == 0:
            _put_leaf(memory, slot, node, token, position)
            break
        before = memory[slot + LATEST]
        length += 1
        if length < longer:
            length = _num_shared(memory, position, before, length, longer)
        if length < longer:
            _part(memory, slot, position, length)
            break
        memory[slot + LATEST] = position
        node = memory[slot + NODE]
    link = memory[LINKS] + 2 * position
    memory[link] = before
    memory[link + 1] = length


@compiled("void(uint32[::1], int64, int64, int64)")
def _copy_run(memory: Memory, number: int, position: int, end: int) -> None:
    """Note what follows `position`: the tokens up to `end`, of the text, again and again."""
    text, most = memory[TEXT], memory[MOST]
    target, source = memory[RUNS] + number, position + 1
    for _ in range(memory[AHEAD]):
        memory[target] = memory[text + source]
        target += most
        source += 1
        if source == end:
            source = position + 1


@compiled("int64(uint32[::1], int64)")
def _compare(memory: Memory, number: int) -> int:
    """Note which earlier run the one with this `number` follows furthest; how far the first."""
    most, start = memory[MOST], memory[RUNS]
    end = start + most * memory[AHEAD]
    beside, furthest, with_first = 0, 0, 0
    for earlier in range(number):
        shared, row = 0, start
        while row < end and memory[row + number] == memory[row + earlier]:
            shared += 1
            row += most
        if earlier == 0:
            with_first = shared
        if shared > furthest:
            beside, furthest = earlier, shared
    memory[FOUND + 3 * number + BESIDE] = beside
    memory[FOUND + 3 * number + SHARED] = furthest
    return with_first


@compiled("UniTuple(int64, 4)(uint32[::1], int64)")
def _look_up(memory: Memory, end: int) -> Found:
    """Where the suffix of the text, of `end` tokens, ended before, the latest first.

    The first is the most recent of all. Each further one is the most recent that shares with the
    one before it as much as any does: none is missed that stands alone, and the rest are a
    selection.
    """
    links = memory[LINKS]
    link = links + 2 * (end - 1)
    length, number, num_alike, num_shared = memory[link + 1], 0, 0, 0
    while number < memory[MOST] and length > 0 and memory[link + 1] >= length:
        position = memory[link]
        memory[FOUND + 3 * number + POSITION] = position
        _copy_run(memory, number, position, end)
        shared = _compare(memory, number)
        num_alike += 1 if shared > 0 else 0
        num_shared = shared if number == 1 else num_shared
        link = links + 2 * position
        number += 1
    return length, number, num_alike, num_shared


@compiled("UniTuple(int64, 4)(uint32[::1], int64, int64)")
def add_tokens(memory: Memory, first: int, end: int) -> Found:
    """Index the tokens at positions `first` to `end`, which the text has, and look up its suffix."""
    for position in range(first, end):
        _add_token(memory, position)
    return _look_up(memory, end) if end > 0 else (0, 0, 0, 0)


@compiled("void(int64[:, ::1], uint32[::1], int64[:, ::1])")
def add_all(texts: NDArray[np.int64], tokens: NDArray[np.uint32], found: NDArray[np.int64]) -> None:
    """Append new tokens to many texts, and write to `found`, `[4, texts]`, what `add_tokens` says.

    `texts`, `[4, texts]`: address and size of each one's memory, its tokens before and after.
    `tokens`: the new ones of all, text by text. Needs numba.
    """
    taken = 0
    for number in range(texts.shape[1]):
        memory = array_at(texts[0, number], texts[1, number])
        first, end = texts[2, number], texts[3, number]
        for place in range(memory[TEXT] + first, memory[TEXT] + end):
            memory[place] = tokens[taken]
            taken += 1
        looked_up = add_tokens(memory, first, end)
        for field in range(4):
            found[field, number] = looked_up[field]


@compiled("void(uint32[::1], uint32[::1], int64)")
def move(memory: Memory, larger: Memory, end: int) -> None:
    """Copy a text of `end` tokens and its nodes to where there is room for more of them."""
    text, links = memory[TEXT], memory[LINKS]
    larger[text : text + end] = memory[text : text + end]
    larger[larger[LINKS] : larger[LINKS] + 2 * end] = memory[links : links + 2 * end]
    for place in range(memory[SLOTS]):
        slot = memory[TABLE] + WIDTH * place
        if memory[slot + LENGTH] > 0:
            moved = _slot_of(larger, memory[slot + PARENT], memory[slot + TOKEN])
            for field in range(WIDTH):
                larger[moved + field] = memory[slot + field]


@compiled("void(uint32[::1], int64, int64, int64, int64[::1])")
def count_followed(
    memory: Memory, first: int, most: int, min_match: int, counts: NDArray[np.int64]
) -> None:
    """For positions from `first` on: tokens there that are what followed the match before them.

    At most `most`, none where the match is shorter than `min_match`. The continuation of a match
    that runs into its position begins anew.
    """
    text, end = memory[TEXT], first + len(counts)
    for position in range(max(first, 1), end):
        link = memory[LINKS] + 2 * (position - 1)
        if memory[link + 1] < min_match:
            continue
        source, count = memory[link] + 1, 0
        period = position - source
        while (
            count < min(most, end - position)
            and memory[text + source + count % period] == memory[text + position + count]
        ):
            count += 1
        counts[position - first] = count
