"""The attention kernel against its torch twin in float64, over random batches."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdcontrol.engine.kernels import triton_attention
from sdcontrol.engine.kernels.reference import TorchAttention
from sdcontrol.engine.kernels.splits import SplitPlan
from sdcontrol.engine.kernels.tables import TableShape, fill_tables
from sdcontrol.engine.kernels.triton_attention import (
    IS_INTERPRETED,
    Tile,
    TritonAttention,
    choose_tile,
    paged_attention,
    workspace_elements,
)
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.packing import PageTable, Segment, pack

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
SCALE = 0.29
NUM_BLOCKS = 24
NUM_LAYERS = 2

ROUNDING = {torch.float32: 2**-23, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of numbers that are at most about 3: of 16 bits, rounding of the inputs' type, and a little.

Of 32 bits it is per dimension of a key. Scores come near 20, and what is lost in summing one up grows
as its dimensions: their root roundings of sums as large as their root. Products added one by one lose
a third of this (simulated for 32 to 256 dimensions: 4e-8 for each, at worst), blocked sums less.
"""


@dataclass(frozen=True)
class Case:
    """A cache full of random keys and values, and a batch of segments that look at it."""

    seed: int
    kinds: tuple[str, ...] = ("chain", "one", "tree")
    block_size: int = 16
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 32
    value_dim: int = 32
    dtype: torch.dtype = torch.float32
    window: int | None = None

    @property
    def layer(self) -> LayerShape:
        heads = self.kv_heads * self.group
        return LayerShape(
            heads, self.kv_heads, self.key_dim, self.value_dim, self.dtype, self.window
        )

    @property
    def tolerance(self) -> float:
        """Of outputs, relative and absolute."""
        rounding = ROUNDING[self.dtype]
        return rounding * self.key_dim if self.dtype == torch.float32 else rounding


class World:
    """What a case describes, made."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        generator = torch.Generator().manual_seed(case.seed)
        self.cache = KVCache(
            [case.layer] * NUM_LAYERS,
            num_blocks=NUM_BLOCKS,
            block_size=case.block_size,
            device=DEVICE,
        )
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.batch = pack([self._segment(kind) for kind in case.kinds], case.block_size, DEVICE)
        self.segments = [s for group in self.batch.groups for s in group.members]
        tokens = self.batch.input_ids.shape[1]
        packed = torch.randn(tokens, case.layer.num_heads, case.key_dim, generator=generator)
        self.query = packed.to(DEVICE, case.dtype).transpose(0, 1)  # strided, as models give it

    def _segment(self, kind: str) -> Segment:
        page, rng = self.case.block_size, self.rng
        if kind == "per head":
            return self._per_head()
        length = {"one": 1, "chunk": int(rng.integers(65, 80)), "whole": 23}.get(kind, 0)
        length = length or int(rng.integers(2, 12))
        start = 0 if kind == "whole" else int(rng.integers(0, NUM_BLOCKS * page // 2 - 80))
        parents = None
        if kind == "tree":
            parents = tuple(int(rng.integers(-1, node)) for node in range(length - 1))
        if kind == "bush":  # as wide as drafts get
            length, parents = 65, tuple(int(rng.integers(-1, node)) for node in range(64))
        count = -(-(start + length) // page)
        table = PageTable(rng.permutation(np.arange(1, NUM_BLOCKS))[:count])
        return Segment([1] * length, start, table, [0] * length, 1, parents)

    def _per_head(self) -> Segment:
        """A sparse table: heads and layers differ in the middle, and pages are left out."""
        page, pages = self.case.block_size, int(self.rng.integers(2, 5))
        shape = (NUM_LAYERS, self.case.kv_heads, pages + 1)
        blocks = self.rng.integers(1, NUM_BLOCKS, shape)
        left_out = 3 * page
        start = pages * page + int(self.rng.integers(0, page)) + left_out
        return Segment([1], start, PageTable(blocks, shift=left_out), [0])

    def expected(self, index: int) -> Tensor:
        """What the twin makes of it in float64."""
        wide = replace(self.case.layer, dtype=torch.float64)
        cache = KVCache(
            [wide] * NUM_LAYERS,
            num_blocks=NUM_BLOCKS,
            block_size=self.case.block_size,
            device=DEVICE,
        )
        for layer in range(NUM_LAYERS):
            cache.keys[layer].copy_(self.cache.keys[layer])
            cache.values[layer].copy_(self.cache.values[layer])
        batch = pack(self.segments, self.case.block_size, DEVICE)
        assert batch.order == list(range(len(self.segments)))
        return TorchAttention().attend(index, self.query.double(), cache, batch, SCALE)

    def attend(self, layer: int, num_splits: int) -> Tensor:
        return TritonAttention(num_splits).attend(layer, self.query, self.cache, self.batch, SCALE)

    def check(self, *, num_splits: int = 1, layer: int = 1) -> None:
        out = self.attend(layer, num_splits)
        assert out.dtype == self.case.dtype
        self.check_close(out.double(), self.expected(layer))

    def check_close(self, out: Tensor, expected: Tensor) -> None:
        tolerance = self.case.tolerance
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


KINDS = ["one", "one", "chain", "tree", "per head", "whole"]


CASES = st.builds(
    lambda seed, kinds, page, heads, window: Case(seed, tuple(kinds), page, *heads, window=window),
    st.integers(0, 999),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    st.sampled_from([16, 24]),
    st.sampled_from([(2, 1), (2, 2), (1, 4), (1, 8), (1, 7)]),
    st.sampled_from([None, 1, 9, 70]),
)


@settings(max_examples=40)
@given(case=CASES, num_splits=st.sampled_from([1, 2, 5]))
def test_a_batch_attends_as_its_twin(case: Case, num_splits: int) -> None:
    """Ragged chains, trees, sparse tables of every head, windows: at once, split or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitPlan, "part_keys", lambda *_: 32)
        World(case).check(num_splits=num_splits)


@pytest.mark.parametrize("window", [None, 11])
def test_long_chunks_and_the_widest_trees_attend_as_their_twin(window: int | None) -> None:
    for seed in range(2):
        World(Case(seed, ("chunk", "bush", "one"), window=window, group=3)).check()


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)],
)
def test_every_head_size_and_type_attends_as_its_twin(
    key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    case = Case(3, ("chain", "tree"), key_dim=key_dim, value_dim=value_dim, dtype=dtype)
    World(case).check(num_splits=2)


@pytest.mark.parametrize("rows", [16, 64])
def test_parts_of_a_context_make_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 to 9 parts, some of them empty: the same to rounding."""
    monkeypatch.setattr(SplitPlan, "part_keys", lambda *_: 1)
    monkeypatch.setattr(
        triton_attention,
        "choose_tile",
        lambda layer, tokens, **device: replace(choose_tile(layer, tokens), rows=rows, keys=32),
    )
    world = World(Case(5, ("one", "chain", "tree", "whole")))
    whole = world.attend(0, 1)
    for num_splits in (2, 3, 9):
        world.check_close(world.attend(0, num_splits), whole)


@pytest.mark.parametrize("num_splits", [2, 3, 9])
def test_parts_are_combined_the_same_by_many_rows_at_once(
    num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last program has rows too many, and rows have no part at all."""
    monkeypatch.setattr(SplitPlan, "part_keys", lambda *_: 1)
    world = World(Case(6, ("one", "chain", "tree", "whole"), dtype=torch.float32))
    one_by_one = world.attend(1, num_splits)
    for rows in (2, 8):
        monkeypatch.setattr(triton_attention, "combined_rows", lambda *_, most=rows: most)
        assert torch.equal(world.attend(1, num_splits), one_by_one)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_padding_gets_zeros_and_changes_nothing(num_splits: int) -> None:
    """Tables of a bucket: room for more requests and tokens, pages and tiles than there are.

    Page numbers that nobody may read are far outside of the cache.
    """
    world = World(Case(7, ("one", "tree", "one")))
    layer, tokens = world.case.layer, world.query.shape[1]
    tile = Tile(16, 32, 4, 2)
    shape = TableShape(
        requests=6, tokens=tokens + 21, tile_tokens=8, pages=NUM_BLOCKS, has_trees=True
    )
    used = np.full(shape.num_elements, 1 << 28, dtype=np.int32)
    flat = fill_tables(world.segments, shape, block_size=16, into=used)
    shape.parts(flat)[-1][:] = 32  # keys of a part
    query = torch.full((layer.num_heads, tokens + 21, layer.key_dim), torch.nan, device=DEVICE)
    query[:, :tokens] = world.query
    elements = workspace_elements(tokens + 21, layer, num_splits)
    out = torch.full((tokens + 21, layer.num_heads, layer.value_dim), torch.nan, device=DEVICE)
    given_back = paged_attention(
        query,
        world.cache.keys[1],
        world.cache.values[1],
        shape.views(torch.from_numpy(flat).to(DEVICE)),
        scale=SCALE,
        block_size=16,
        tile=tile,
        num_splits=num_splits,
        out=out,
        workspace=torch.full((elements,), torch.nan, device=DEVICE),
    )
    assert given_back is out
    assert not out[tokens:].any()
    world.check_close(out[:tokens].double(), world.expected(1))
