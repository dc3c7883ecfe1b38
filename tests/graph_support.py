"""A graph recorder for machines without a GPU: what it recorded it does again, and watches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdcontrol.engine import graphs
from sdcontrol.engine.buckets import Bucket
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.graphs import GraphParts
from sdcontrol.engine.kernels.reference import TorchAttention
from sdcontrol.engine.kv_cache import KVCache
from sdcontrol.engine.packing import PackedBatch, Segment, pack
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.static_inputs import BucketAttention

CPU = torch.device("cpu")


class TorchBucketAttention:
    """The torch twin over a bucket: segments one by one, zeros for the padding.

    Tables are the number of real tokens, then the key index of each request's first token: where
    segments stand is read there, as a kernel does.
    """

    def __init__(self, bucket: Bucket, block_size: int) -> None:
        self.bucket = bucket
        self._block_size = block_size
        self._segments: list[Segment] = []
        self.tables = torch.zeros(self.num_elements, dtype=torch.int32)

    @property
    def num_elements(self) -> int:
        return 1 + self.bucket.tokens

    def bind(self, tables: Tensor) -> None:
        self.tables = tables

    def fill(self, segments: Sequence[Segment], into: NDArray[np.int32]) -> None:
        self._segments = list(segments)
        into[:] = 0
        into[0] = sum(len(segment.tokens) for segment in segments)
        into[1 : 1 + len(segments)] = [s.start - s.table.shift for s in segments]

    @property
    def first_keys(self) -> Sequence[Tensor]:
        return [self.tables[1:]]

    @property
    def sees(self) -> list[bool]:
        """Of each real token, whether it belongs to a request that sees anything."""
        pairs = zip(self._segments, self.tables[1:].tolist(), strict=False)
        return [first >= 0 for segment, first in pairs for _ in segment.tokens]

    def attend(
        self, layer: int, query: Tensor, cache: KVCache, batch: PackedBatch, scale: float
    ) -> Tensor:
        assert query.shape[1] == self.bucket.tokens
        parts, first = [], 0
        for segment, first_key in zip(self._segments, self.tables[1:].tolist(), strict=False):
            count = len(segment.tokens)
            own = query[:, first : first + count]
            first += count
            if first_key < 0:
                parts.append(query.new_zeros(count, len(query), cache.layers[layer].value_dim))
                continue
            moved = segment._replace(start=first_key + segment.table.shift)
            pages = segment.table.blocks.shape[-1]
            assert (first_key + count - 1) // self._block_size < pages <= self.bucket.pages
            alone = pack([moved], self._block_size, CPU)
            parts.append(TorchAttention().attend(layer, own, cache, alone, scale))
        assert first == int(self.tables[0]), "the tables on the device are not the current ones"
        padding = parts[0].new_zeros(query.shape[1] - first, *parts[0].shape[1:])
        return torch.cat([*parts, padding])


@dataclass
class FakeRecorder:
    """Captures by keeping the work, replays by doing it; counts both."""

    failure: str | Exception | None = None
    captures: int = 0
    replays: int = 0
    buckets: list[Bucket] = field(default_factory=list)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.failure is not None:
            raise RuntimeError(self.failure) if isinstance(self.failure, str) else self.failure
        work()  # as a warm-up does
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            work()

        return replay

    def reserved_bytes(self) -> int:
        return 1000 * self.captures


class Waits(TorchDispatchMode):
    """Operations whose result the host has to wait for: a graph cannot hold them."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = str(function).split(".")[1]
        if name.lstrip("_") in {own.lstrip("_") for own in self.NAMES} or (
            name.startswith("index") and _has_masks(args)
        ):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def _has_masks(arguments: Sequence[object]) -> bool:
    """How many entries a mask picks is known to the device alone."""
    parts = [part for each in arguments if isinstance(each, list) for part in each]
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


Attention = Callable[[Bucket, ModelRunner, int], BucketAttention]


def use_fake_graphs(
    patch: pytest.MonkeyPatch,
    *,
    failure: str | Exception | None = None,
    attention: Attention = lambda bucket, _, page: TorchBucketAttention(bucket, page),
    query_tile: Callable[[ModelRunner, int], int] = lambda _, longest: longest,
) -> FakeRecorder:
    """Engines made from now on capture their forwards with the recorder that is returned."""
    recorder = FakeRecorder(failure)

    def parts_of(runner: ModelRunner, config: EngineConfig) -> GraphParts | None:
        def make(bucket: Bucket) -> BucketAttention:
            recorder.buckets.append(bucket)
            return attention(bucket, runner, config.block_size)

        tile = lambda longest: query_tile(runner, longest)  # noqa: E731
        return GraphParts(recorder, tile, make) if config.cuda_graphs else None

    patch.setattr(graphs, "parts_of", parts_of)
    _watch_addresses(patch)
    return recorder


def _watch_addresses(patch: pytest.MonkeyPatch) -> None:
    """A captured forward finds its inputs where it found them first, and padding hurts nobody."""
    compute = ModelRunner.compute
    seen: dict[int, tuple[object, list[int]]] = {}

    def watching(
        self: ModelRunner, batch: PackedBatch, backend: object, queries: object = None
    ) -> Tensor:
        if isinstance(getattr(backend, "bucket", None), Bucket):
            tensors = (batch.input_ids, batch.positions, batch.slots, batch.logit_rows)
            addresses = [tensor.data_ptr() for tensor in tensors]
            _, before = seen.setdefault(id(batch), (batch, addresses))
            assert addresses == before
            num_tokens = int(backend.tables[0])  # type: ignore[attr-defined]
            assert self.cache is not None
            blocks = batch.slots // self.cache.block_size
            sees = getattr(backend, "sees", [True] * num_tokens)
            assert (blocks[:num_tokens] > 0).tolist() == sees
            assert (blocks[num_tokens:] == 0).all()
        return compute(self, batch, backend, queries)  # type: ignore[arg-type]

    patch.setattr(ModelRunner, "compute", watching)
