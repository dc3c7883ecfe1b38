"""Attention over the paged cache by Triton: which tiles, and the launch.

Nothing here waits for the device, and with `out` and a `workspace` passed nothing is allocated, so
all of it can be captured in a graph. Knows layers' shapes and tables; nothing of requests, drafts
or models. The kernels are in `paged_attention`; into how many parts contexts go is in `splits`.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from sdcontrol.engine.kernels.launching import OPTIONS
from sdcontrol.engine.kernels.paged_attention import attention_kernel, combine_kernel
from sdcontrol.engine.kernels.splits import SplitPlan
from sdcontrol.engine.kernels.tables import AttentionTables, segment_tables
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.packing import PackedBatch
from sdcontrol.errors import UnsupportedModel

__all__ = [
    "Tile",
    "TritonAttention",
    "choose_tile",
    "combine_warps",
    "combined_rows",
    "gpu_of",
    "paged_attention",
    "programs_per_sm",
    "workspace_elements",
]

IS_INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)

_FEWEST_ROWS = 16  # of a matrix product on tensor cores
_MOST_ROWS = 128
_MOST_COMBINED = 4096  # numbers in the registers of 4 warps
_MOST_ROWS_AT_ONCE = 8
_MANY_ROWS = 1024  # a program for each takes 7 us on an H200 from 2048 on, 1.6 us for 32
_CONSUMER = (86, 89, 120, 121)  # capabilities with 99 KB of shared memory for a program
_SM_REGISTERS = 65536
_SM_KB = {80: 164, 87: 164, **dict.fromkeys(_CONSUMER, 100)}  # of shared memory; others have 228


@dataclass(frozen=True, slots=True)
class Tile:
    """How the kernel is compiled for one kind of step."""

    rows: int  # query tokens times the heads that share a KV head
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int = 255  # a thread's; said aloud, or ptxas spills a few for more programs


def choose_tile(layer: LayerShape, query_tokens: int, *, capability: int = 90) -> Tile:
    """The tile for steps whose requests have up to `query_tokens` tokens each, mostly.

    Longer ones take several tiles, which read the same keys one beside the other. `capability` is
    the device's, times ten. Raises `UnsupportedModel` for a head beyond 256 dimensions, or more
    query heads to a KV head than a tile has rows.

    Stages: the page number is loaded before the page, so of `n` stages half hold keys and values.
    Of 5 one tile of them is on its way while another is computed, of 3 none is. Three narrow
    programs, of 72 KB each, fit an SM.
    """
    group = layer.num_heads // layer.num_kv_heads
    width = _width(layer)
    if group > _MOST_ROWS // 2 or width > 256:
        raise UnsupportedModel(
            f"{group} query heads share a KV head of {layer.key_dim} and {layer.value_dim} "
            f"dimensions; the Triton attention takes up to {_MOST_ROWS // 2} heads and 256 "
            "dimensions: use the torch backend"
        )
    most = _most_rows(width, layer.dtype, capability)
    rows = triton.next_power_of_2(max(min(query_tokens * group, most), group, _FEWEST_ROWS))
    if layer.dtype == torch.float32:  # multiplied without tensor cores, out of registers
        return Tile(rows, keys=16, num_warps=8, num_stages=2)
    keys = 64 if width <= 128 else 32
    if rows > 32:
        stages = 3 if width > 128 and capability in _CONSUMER else 5  # 5 would take 103 KB
        return Tile(rows, keys, _wide_warps(rows, layer, capability), stages)
    if rows > _FEWEST_ROWS:
        return Tile(rows, keys, num_warps=4, num_stages=5)
    return Tile(rows, keys, num_warps=4, num_stages=5, max_registers=168)


def programs_per_sm(tile: Tile, capability: int) -> int:
    """How many of a tile's programs a multiprocessor runs at once: as registers and shared memory allow."""
    by_registers = _SM_REGISTERS // (tile.max_registers * 32 * tile.num_warps)
    program_kb = {16: 75, 32: 84}.get(tile.rows, 114)  # at most, 1 of them the system's
    return max(min(by_registers, _SM_KB.get(capability, 228) // program_kb), 1)


def _width(layer: LayerShape) -> int:
    width: int = triton.next_power_of_2(max(layer.key_dim, layer.value_dim))
    return width


def _most_rows(width: int, dtype: torch.dtype, capability: int) -> int:
    """Rows beyond which registers would spill; in 9.x to 11.x operands stay in shared memory."""
    if dtype == torch.float32:
        return 32
    return _MOST_ROWS if width <= 128 and 90 <= capability < 120 else _MOST_ROWS // 2


def _wide_warps(rows: int, layer: LayerShape, capability: int) -> int:
    """Of more than 32 rows. A warp group of 9.0 has 64: a second would compute the same ones again.

    With wider heads or a window it does, or registers would spill.
    """
    fits_one = rows == 64 and _width(layer) <= 128 and layer.window is None
    return 4 if fits_one and capability // 10 == 9 else 8


def workspace_elements(num_tokens: int, layer: LayerShape, num_splits: int) -> int:
    """The length of the float32 workspace that `paged_attention` needs."""
    if num_splits == 1:
        return 0
    return num_splits * num_tokens * layer.num_heads * (layer.value_dim + 1)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: AttentionTables,
    *,
    scale: float,
    block_size: int,
    tile: Tile,
    window: int | None = None,
    num_splits: int = 1,
    layer: int = 0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Attention `[tokens, heads, value_dim]` of packed queries `[heads, tokens, key_dim]`.

    `keys` and `values` are one layer's cache, `[kv_heads, slots, dim]`; `tables` must have been
    made for tiles of `tile.rows // (heads // kv_heads)` tokens. See `workspace_elements`.
    """
    heads, num_tokens, key_dim = query.shape
    kv_heads, num_slots, value_dim = values.shape
    group = heads // kv_heads
    assert query.stride(2) == 1
    assert keys.is_contiguous()
    assert tables.shape.tile_tokens == tile.rows // group
    if out is None:
        out = query.new_empty(num_tokens, heads, value_dim)
    parts, weights = _parts(out, workspace, num_splits)
    pages = tables.pages_of(layer)
    attention_kernel[len(tables.tiles), kv_heads, num_splits](
        query, keys, values, out, parts, weights, tables.requests, tables.tiles, tables.nodes,
        pages, tables.split_keys_of(window), num_tokens, num_slots, query.stride(0), query.stride(1),
        pages.stride(0), pages.stride(1) if pages.shape[1] > 1 else 0, scale * math.log2(math.e),
        GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        PADDED_KEY=_padded(key_dim), PADDED_VALUE=_padded(value_dim),
        BLOCK_SIZE=block_size, WINDOW=window or 0, HAS_TREES=tables.nodes.shape[0] > 0,
        IS_SPLIT=num_splits > 1, TILE_ROWS=tile.rows, TILE_KEYS=tile.keys,
        WIDEN=IS_INTERPRETED and query.dtype == torch.bfloat16,
        num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
        **OPTIONS,
    )  # fmt: skip
    if num_splits > 1:
        _combine(parts, weights, out, num_splits)
    return out


def _combine(parts: Tensor, weights: Tensor, out: Tensor, num_splits: int) -> None:
    rows, value_dim = out.shape[0] * out.shape[1], out.shape[2]
    dims, splits = _padded(value_dim), triton.next_power_of_2(num_splits)
    rows_at_once = combined_rows(dims * splits, rows)
    combine_kernel[(triton.cdiv(rows, rows_at_once),)](
        parts, weights, out, rows, VALUE_DIM=value_dim, PADDED_VALUE=dims, SPLITS=num_splits,
        PADDED_SPLITS=splits, ROWS=rows_at_once, num_warps=combine_warps(dims * splits), **OPTIONS,
    )  # fmt: skip


def combine_warps(numbers: int) -> int:
    """How many share the parts of a row, `numbers` in all, so that registers hold them."""
    return 4 if numbers <= _MOST_COMBINED else 8


def combined_rows(numbers: int, rows: int) -> int:
    """Rows for one program, of `rows` with `numbers` each: several where there are enough programs anyway."""
    if rows < _MANY_ROWS:
        return 1
    return min(max(_MOST_COMBINED // numbers, 1), _MOST_ROWS_AT_ONCE)


def _padded(dim: int) -> int:
    """What a tile must measure to hold `dim`: a power of two, as tensor cores take it."""
    padded: int = triton.next_power_of_2(dim)
    return max(padded, 16)


def _parts(out: Tensor, workspace: Tensor | None, num_splits: int) -> tuple[Tensor, Tensor]:
    """Where parts of contexts go: outputs and, behind them, log-sum-exps; float32."""
    if num_splits == 1:
        return out, out  # not used
    size = num_splits * out.numel()
    if workspace is None:
        size_with_weights = size + size // out.shape[2]
        workspace = torch.empty(size_with_weights, dtype=torch.float32, device=out.device)
    return workspace[:size], workspace[size:]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """One forward's tables for layers of one kind."""

    tile: Tile
    tables: AttentionTables
    num_splits: int


class TritonAttention:
    """The Triton kernel as an `AttentionBackend`: any mix of segments, one launch per layer.

    Tables are made once a forward and kept for the layers that follow. `num_splits` is for tests;
    otherwise it follows from the batch and the device.
    """

    def __init__(self, num_splits: int | None = None) -> None:
        self._num_splits = num_splits
        self._batch: PackedBatch | None = None
        self._prepared: dict[LayerShape, _Prepared] = {}

    def attend(
        self, layer: int, query: Tensor, cache: KVCache, batch: PackedBatch, scale: float
    ) -> Tensor:
        """Attention of packed queries `[heads, tokens, key_dim]`; returns `[tokens, heads, dim]`.

        The keys and values of the packed tokens are in the cache already.
        """
        if batch is not self._batch:
            self._batch, self._prepared = batch, {}
        shape = cache.layers[layer]
        if shape not in self._prepared:
            self._prepared[shape] = self._prepare(shape, cache, batch, query.device)
        prepared = self._prepared[shape]
        return paged_attention(
            query if query.stride(-1) == 1 else query.contiguous(),
            cache.keys[layer],
            cache.values[layer],
            prepared.tables,
            scale=scale,
            block_size=cache.block_size,
            tile=prepared.tile,
            window=shape.window,
            num_splits=prepared.num_splits,
            layer=layer,
        )

    def _prepare(
        self, shape: LayerShape, cache: KVCache, batch: PackedBatch, device: torch.device
    ) -> _Prepared:
        segments = [segment for group in batch.groups for segment in group.members]
        capability, num_sms = gpu_of(device)
        tile = choose_tile(
            shape, max(len(segment.tokens) for segment in segments), capability=capability
        )
        plan = SplitPlan(
            shape.num_kv_heads,
            tile.rows // (shape.num_heads // shape.num_kv_heads),
            programs_per_sm(tile, capability),
            num_sms,
            shape.window,
        )
        tables = segment_tables(
            segments,
            block_size=cache.block_size,
            tile_tokens=plan.tile_tokens,
            plans=(plan,),
            device=device,
        )
        contexts = np.array([segment.start - segment.table.shift for segment in segments])
        tokens = np.array([len(segment.tokens) for segment in segments])
        return _Prepared(tile, tables, self._num_splits or plan.parts(contexts, tokens))


def gpu_of(device: torch.device) -> tuple[int, int]:
    """Compute capability times ten, and the number of SMs; the interpreter passes for a small one."""
    if device.type != "cuda":
        return 90, 1
    properties = torch.cuda.get_device_properties(device)
    num_sms: int = properties.multi_processor_count
    return 10 * properties.major + properties.minor, num_sms
