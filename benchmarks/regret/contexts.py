"""Put the contexts of prompts into an engine's cache, so that nothing is prefilled while measuring.

Each prompt's blocks are consecutive, with room behind them to grow into, as after a prefill. They
stay cached under their keys: whoever submits the prompt again shares them, as often as wanted.
"""

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.regret.pairs import Prompt
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.packing import PageTable, Segment
from sdcontrol.scheduling.blocks import BlockTable, block_keys

__all__ = ["is_in_place", "lay_out"]

_CHUNK = 512
_KV_SPREAD = 0.05  # of keys and values made up


def lay_out(engine: Engine, prompts: Sequence[Prompt], *, room: int, computed: bool) -> None:
    """Cache every prompt but its last token; `room` tokens behind each stay free.

    `computed`: by the model. Otherwise keys and values are made up, for synthetic acceptance; a
    forward reads as many.
    """
    pool, page = engine.pool, engine.config.block_size
    if not computed:
        _make_up(engine)
    tables, content = [], engine.model_content()
    for prompt in prompts:
        table, keys = BlockTable(), block_keys(prompt.tokens, page, [], root=content)
        length = len(keys) * page
        pool.extend(table, length + room, expected_tokens=length + room)
        if computed:
            _compute(engine, prompt.tokens[:length], table)
        pool.register(table, keys, length)
        tables.append((table, length))
    for table, length in tables:
        pool.shrink(table, length)
        pool.release(table)


def is_in_place(engine: Engine, prompt: Prompt) -> bool:
    """Whether only the last token of `prompt` is left to compute."""
    page = engine.config.block_size
    keys = block_keys(prompt.tokens, page, [], root=engine.model_content())
    return len(engine.pool.match_prefix(keys, len(prompt.tokens) - 1)) * page == (
        len(prompt.tokens) - 1
    )


def _compute(engine: Engine, tokens: Sequence[int], table: BlockTable) -> None:
    page = engine.config.block_size
    blocks = np.array(table.blocks, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        positions = range(start, start + len(chunk))
        slots = [int(blocks[p // page]) * page + p % page for p in positions]
        engine.runner.forward([Segment(chunk, start, PageTable(blocks), slots, num_logits=0)])


def _make_up(engine: Engine) -> None:
    """Memory that was never written is not really there, and too fast to read."""
    cache = engine.runner.cache
    assert cache is not None
    generator = torch.Generator(engine.runner.device).manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_(std=_KV_SPREAD, generator=generator)
