"""The Triton attention over tables that stay where they are: what a CUDA graph can capture.

Grids and tiles follow from the bucket alone; lengths are read on the device. Knows buckets,
layers' shapes and tables; nothing of models or graphs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdcontrol.engine.buckets import Bucket
from sdcontrol.engine.kernels.splits import SplitPlan
from sdcontrol.engine.kernels.tables import AttentionTables, TableShape, Written, fill_tables
from sdcontrol.engine.kernels.triton_attention import (
    Tile,
    choose_tile,
    gpu_of,
    paged_attention,
    programs_per_sm,
)
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.packing import PackedBatch, Segment

__all__ = ["TritonBucketAttention", "query_tile"]


def query_tile(layers: Sequence[LayerShape], longest: int, device: torch.device) -> int:
    """Tokens of a request that one tile takes where requests have up to `longest`.

    `layers` are the model's, or one of each shape.
    """
    capability, _ = gpu_of(device)
    return max(
        choose_tile(layer, longest, capability=capability).rows // _group(layer) for layer in layers
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """How layers of one shape are computed. Those with the same `place` share their tables."""

    tile: Tile
    num_splits: int
    place: tuple[int, int]  # tokens of a tile, KV heads


class TritonBucketAttention:
    """See `static_inputs.BucketAttention`. `layers` are those of the model."""

    def __init__(
        self,
        bucket: Bucket,
        layers: Sequence[LayerShape],
        *,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._shapes: dict[tuple[int, int], TableShape] = {}
        self._kinds: dict[LayerShape, _Kind] = {}
        self._tables: dict[tuple[int, int], AttentionTables] = {}
        self._written: dict[tuple[int, int], Written] = defaultdict(list)
        for layer in dict.fromkeys(layers):
            self._add_kind(layer, bucket, gpu_of(device))

    @property
    def num_elements(self) -> int:
        """The length of all tables, int32."""
        return sum(shape.num_elements for shape in self._shapes.values())

    @property
    def first_keys(self) -> Sequence[Tensor]:
        """See `static_inputs.BucketAttention`: it stands third in a request's row."""
        return [tables.requests[:, 2] for tables in self._tables.values()]

    def bind(self, tables: Tensor) -> None:
        """Read tables from here from now on."""
        parts = tables.split([shape.num_elements for shape in self._shapes.values()])
        pairs = zip(self._shapes.items(), parts, strict=True)
        self._tables = {place: shape.views(part) for (place, shape), part in pairs}

    def fill(self, segments: Sequence[Segment], into: NDArray[np.int32]) -> None:
        """See `static_inputs.BucketAttention`."""
        first = 0
        for place, shape in self._shapes.items():
            end = first + shape.num_elements
            fill_tables(
                segments,
                shape,
                block_size=self._block_size,
                into=into[first:end],
                written=self._written[place],
            )
            first = end

    def attend(
        self, layer: int, query: Tensor, cache: KVCache, batch: PackedBatch, scale: float
    ) -> Tensor:
        """See `AttentionBackend`; what stands in the tables says who sees what."""
        shape = cache.layers[layer]
        kind = self._kinds[shape]
        return paged_attention(
            query if query.stride(-1) == 1 else query.contiguous(),
            cache.keys[layer],
            cache.values[layer],
            self._tables[kind.place],
            scale=scale,
            block_size=self._block_size,
            tile=kind.tile,
            window=shape.window,
            num_splits=kind.num_splits,
            layer=layer,
        )

    def _add_kind(self, layer: LayerShape, bucket: Bucket, gpu: tuple[int, int]) -> None:
        capability, num_sms = gpu
        tile = choose_tile(layer, bucket.query_tokens, capability=capability)
        place = (tile.rows // _group(layer), layer.num_kv_heads)
        plan = SplitPlan(
            layer.num_kv_heads,
            place[0],
            programs_per_sm(tile, capability),
            num_sms,
            layer.window,
        )
        shape = self._shapes.get(place) or TableShape(
            requests=bucket.requests + 1,  # the spare one owns the padding
            tokens=bucket.tokens,
            tile_tokens=place[0],
            pages=bucket.pages,
            page_layers=bucket.page_layers,
            page_heads=bucket.page_heads,
            has_trees=bucket.has_trees,
        )
        if all(other.window != plan.window for other in shape.plans):
            shape = replace(shape, plans=(*shape.plans, plan))
        self._shapes[place] = shape
        splits = plan.parts_of_grid(num_tiles=shape.tiles, num_keys=bucket.pages * self._block_size)
        self._kinds[layer] = _Kind(tile, splits, place)


def _group(layer: LayerShape) -> int:
    return layer.num_heads // layer.num_kv_heads
