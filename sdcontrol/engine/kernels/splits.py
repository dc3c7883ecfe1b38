"""Into how many parts contexts are split, so that no part of the device waits for another.

    one request's keys, one KV head    |------------------|    one program, or
                                       | part | part | part    one for each part, and a combination

Knows layers' shapes, segments' lengths and how many multiprocessors there are; nothing of tables or
kernels. How long a part is is read on the device, so that parts too many end at once.
"""

import math
from collections.abc import Sequence

from sdcontrol.engine.kernels.tables import MIN_SPLIT_KEYS
from sdcontrol.engine.kv_cache import LayerShape
from sdcontrol.engine.packing import Segment

__all__ = ["balanced_split_keys", "choose_splits"]

_MOST_SPLITS = 64
_PROGRAMS_PER_SM = 8  # with 2 at a time, the last wave of 4 is a small part of the whole
_ENOUGH_PROGRAMS_PER_SM = 6  # no split beyond: combining would cost more than balance brings
_PROMPT_PROGRAMS_PER_SM = 2  # one at a time fits, and each writes many rows of a part
_FULL = 0.75  # of the places in whole waves; where as many are taken, prompts are not split
_LONGEST_PART = 8192  # keys in 128 steps of one program; an estimate, never measured
_MOST_FOR_ONE = 4  # parts on account of one long context: all requests' outputs get as many


def choose_splits(
    layer: LayerShape,
    *,
    num_tiles: int,
    tile_tokens: int,
    num_keys: int,
    num_sms: int,
    has_prompts: bool = False,
) -> int:
    """Into how many parts contexts of up to `num_keys` are split, to keep `num_sms` busy.

    A power of two: the kernel that combines parts is compiled for each number. Requests have a tile
    of `tile_tokens` each, or where `has_prompts` some have more.
    """
    programs = num_tiles * layer.num_kv_heads
    if layer.window is not None:
        num_keys = min(num_keys, layer.window + tile_tokens)
    if has_prompts:
        wanted = _parts_of_prompts(programs, num_sms)
    else:
        wanted = max(_parts_to_fill(programs, num_sms), _parts_of_the_longest(num_keys))
    parts = max(min(wanted, math.ceil(num_keys / MIN_SPLIT_KEYS)), 1)
    return min(1 << (parts - 1).bit_length(), _MOST_SPLITS)


def _parts_of_prompts(programs: int, num_sms: int) -> int:
    """One where whole waves of programs, one to an SM, are full enough."""
    if programs >= _FULL * num_sms * math.ceil(programs / num_sms):
        return 1
    return math.ceil(_PROMPT_PROGRAMS_PER_SM * num_sms / programs)


def _parts_to_fill(programs: int, num_sms: int) -> int:
    if programs >= _ENOUGH_PROGRAMS_PER_SM * num_sms:
        return 1
    return math.ceil(_PROGRAMS_PER_SM * num_sms / programs)


def _parts_of_the_longest(num_keys: int) -> int:
    """So that its few programs do not go on when those of all others have ended."""
    return min(math.ceil(num_keys / _LONGEST_PART), _MOST_FOR_ONE)


def balanced_split_keys(segments: Sequence[Segment], kv_heads: int, num_sms: int) -> int:
    """Keys per program so that contexts of any lengths are read in equal parts."""
    keys = sum(segment.start - segment.table.shift + 1 for segment in segments) * kv_heads
    return max(keys // (_PROGRAMS_PER_SM * num_sms), MIN_SPLIT_KEYS)
