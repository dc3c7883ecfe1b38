"""Packed segments attend as if each query stood alone: the torch twin against plain float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdcontrol.engine.kernels import masks, reference
from sdcontrol.engine.kernels.reference import TorchAttention
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.packing import PageTable, Part, Segment, ancestors, pack

CPU = torch.device("cpu")
NUM_BLOCKS = 40
KEY_DIM, VALUE_DIM = 6, 4


@dataclass(frozen=True)
class Case:
    """A cache full of random keys and values, and segments that may look at it."""

    seed: int
    block_size: int = 4
    num_heads: int = 4
    kv_heads: int = 2
    window: int | None = None

    def cache(self, num_layers: int = 2) -> KVCache:
        layer = LayerShape(
            self.num_heads, self.kv_heads, KEY_DIM, VALUE_DIM, torch.float64, self.window
        )
        cache = KVCache(
            [layer] * num_layers, num_blocks=NUM_BLOCKS, block_size=self.block_size, device=CPU
        )
        generator = torch.Generator().manual_seed(self.seed)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_(generator=generator)
        return cache


class SegmentMaker:
    """Random segments over blocks that may be consecutive, shuffled or shared."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)

    def make(self, kind: str) -> Segment:
        if kind == "long":
            return self._dense(int(self.rng.integers(65, 90)), self.rng.integers(0, 20))
        if kind == "whole":
            return self._dense(int(self.rng.integers(2, 12)), 0)
        if kind == "chain":
            return self._dense(int(self.rng.integers(1, 9)), self.rng.integers(0, 40))
        if kind == "tree":
            return self._tree()
        return self._sparse(per_head=kind == "per head")

    def _blocks(self, num_tokens: int) -> np.ndarray:
        count = -(-num_tokens // self.case.block_size)
        if self.rng.random() < 0.5:
            first = int(self.rng.integers(1, NUM_BLOCKS - count + 1))
            return np.arange(first, first + count)
        return self.rng.permutation(np.arange(1, NUM_BLOCKS))[:count]

    def _dense(self, length: int, start: int, parents: tuple[int, ...] | None = None) -> Segment:
        return self._segment(length, int(start), PageTable(self._blocks(start + length)), parents)

    def _tree(self) -> Segment:
        nodes = int(self.rng.integers(1, 9))
        parents = tuple(int(self.rng.integers(-1, node)) for node in range(nodes))
        return self._dense(nodes + 1, self.rng.integers(0, 40), parents)

    def _sparse(self, *, per_head: bool) -> Segment:
        """Sinks, some pages in between, and the last ones; heads may differ in the middle."""
        page, kept = self.case.block_size, int(self.rng.integers(2, 6))
        left_out = int(self.rng.integers(1, 8)) * page
        keys = kept * page + int(self.rng.integers(0, page))  # key index of the token
        blocks = self._blocks(keys + 1)
        if per_head:
            shape = (2, self.case.kv_heads, len(blocks))
            own = self.rng.integers(1, NUM_BLOCKS, shape)
            own[..., 0], own[..., -1] = blocks[0], blocks[-1]
            blocks = own
        return self._segment(1, keys + left_out, PageTable(blocks, shift=left_out), None)

    def _segment(
        self, length: int, start: int, table: PageTable, parents: tuple[int, ...] | None
    ) -> Segment:
        tokens = self.rng.integers(0, 100, length).tolist()
        page, last = self.case.block_size, table.blocks.reshape(-1, table.blocks.shape[-1])[-1]
        places = [start - table.shift + index for index in range(length)]
        slots = [int(last[place // page]) * page + place % page for place in places]
        num_logits = int(self.rng.integers(0, length + 1))
        return Segment(tokens, start, table, slots, num_logits, parents)


def visible(segment: Segment, query: int, window: int | None) -> list[int]:
    """Key indices that a query of a segment sees, from the definition."""
    start = segment.start - segment.table.shift
    if segment.parents is None or query == 0:
        last = start + query
        return [k for k in range(last + 1) if window is None or k > last - window]
    path, node = [], query - 1
    while node >= 0:
        path.append(node)
        node = segment.parents[node]
    position = start + len(path)
    seen = [(k, k) for k in range(start + 1)]
    seen += [(start + 1 + n, position - height) for height, n in enumerate(path)]
    return [key for key, at in seen if window is None or at > position - window]


def attend_plainly(
    case: Case,
    cache: KVCache,
    layer: int,
    table: PageTable,
    *,
    keys_seen: list[int],
    vector: Tensor,
) -> Tensor:
    """One query `[heads, key_dim]` against the keys that it sees, head by head."""
    page = case.block_size
    out = []
    for head in range(case.num_heads):
        kv_head = head // (case.num_heads // case.kv_heads)
        blocks = table.blocks
        row = blocks[layer, kv_head] if blocks.ndim == 3 else blocks
        slots = [int(row[k // page]) * page + k % page for k in keys_seen]
        scores = cache.keys[layer][kv_head, slots] @ vector[head] * 0.37
        out.append(scores.softmax(0) @ cache.values[layer][kv_head, slots])
    return torch.stack(out)


def check_attention(case: Case, segments: Sequence[Segment], part_work: float) -> None:
    cache = case.cache()
    batch = pack(segments, case.block_size, CPU, part_work)
    num_tokens = sum(len(segment.tokens) for segment in segments)
    generator = torch.Generator().manual_seed(case.seed + 1)
    query = torch.randn(
        case.num_heads, num_tokens, KEY_DIM, dtype=torch.float64, generator=generator
    )
    for layer in range(2):
        out = TorchAttention().attend(layer, query, cache, batch, 0.37)
        assert out.shape == (num_tokens, case.num_heads, VALUE_DIM)
        row = 0
        for index in batch.order:
            for place in range(len(segments[index].tokens)):
                seen = visible(segments[index], place, case.window)
                expected = attend_plainly(
                    case, cache, layer, segments[index].table, keys_seen=seen, vector=query[:, row]
                )
                torch.testing.assert_close(out[row], expected, rtol=1e-9, atol=1e-10)
                row += 1


KINDS = st.lists(
    st.sampled_from(["chain", "tree", "sparse", "per head", "whole", "long"]),
    min_size=1,
    max_size=6,
)
CASES = st.builds(
    lambda seed, block, heads, window: Case(seed, block, *heads, window),
    st.integers(0, 999),
    st.sampled_from([4, 8]),
    st.sampled_from([(4, 2), (4, 4), (4, 1), (6, 2)]),
    st.sampled_from([None, 1, 3, 7, 30]),
)


@pytest.mark.parametrize("copied_bytes", [0, 1 << 40], ids=["one by one", "together"])
@pytest.mark.parametrize("how", ["as they are", "with company", "by products"])
@settings(max_examples=40)
@given(kinds=KINDS, case=CASES, part_work=st.sampled_from([1.0, 100.0, 1e6]))
def test_packed_attention_is_each_querys_own(
    copied_bytes: int, how: str, kinds: list[str], case: Case, part_work: float
) -> None:
    """Chains, trees, chunks, sparse and per-head tables, windows: whatever stands beside it.

    However finely groups are cut, also where every odd number of rows gets one more, and where scores are kept.
    """
    maker = SegmentMaker(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_COPIED_BYTES_PER_CALL", copied_bytes)
        if how == "with company":
            patch.setattr(reference, "_BLOCK_ROWS", 2)
            for module in (reference, masks):
                patch.setattr(module, "needs_company", lambda rows: True)
        if how == "by products":
            patch.setattr(reference, "_are_products_faster", lambda keys: True)
        check_attention(case, [maker.make(kind) for kind in kinds], part_work)


@pytest.mark.parametrize(
    ("dtype", "dim", "capability", "expected"),
    [
        (torch.bfloat16, 64, "AVX512", True),
        (torch.bfloat16, 64, "AVX2", False),
        (torch.bfloat16, 32, "AVX512", False),
        (torch.float32, 64, "AVX512", False),
    ],
)
def test_only_keys_without_gaps_go_by_products_and_only_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    dim: int,
    capability: str,
    *,
    expected: bool,
) -> None:
    monkeypatch.setattr(reference, "_cpu_capability", lambda: capability)
    keys = torch.ones(2, 3, 32, dim, dtype=dtype)
    assert reference._are_products_faster(keys) is expected
    assert not reference._are_products_faster(keys[:, :, :31])


@pytest.mark.parametrize(("dtype", "handed"), [(torch.bfloat16, 34), (torch.float32, 33)])
def test_in_bfloat16_a_query_that_is_alone_in_its_block_gets_company(
    dtype: torch.dtype, handed: int
) -> None:
    """It would take longer than two; in other types it would not."""
    shapes = []

    def attend(rows: Tensor, *others: Tensor, **options: object) -> Tensor:
        shapes.append(rows.shape[2])
        return torch.zeros_like(rows)

    rows, keys = torch.ones(2, 1, 33, 8, dtype=dtype), torch.ones(2, 1, 5, 8, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.functional, "scaled_dot_product_attention", attend)
        out = reference._attend_rows(rows, keys, keys, None, 1.0)
        reference._attend_rows(rows[:, :, :32], keys, keys, None, 1.0)
    assert out.shape == rows.shape
    assert shapes == [handed, 32]


def test_products_in_bfloat16_are_as_near_to_the_truth_as_rounded_scores_allow() -> None:
    """A score between 2 and 4 is rounded by 0.008 at most, and its weight by as many parts."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, 3, 40, 16)
    rows, keys, values = (
        torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(3)
    )
    mask = torch.zeros(2, 40, 40, dtype=torch.bfloat16)
    mask[1, :, 30:] = torch.finfo(torch.bfloat16).min
    out = reference._attend_by_products(rows, keys, values, mask, 0.25)
    truth = reference.functional.scaled_dot_product_attention(
        rows.double(), keys.double(), values.double(), attn_mask=mask.double()[:, None], scale=0.25
    )
    assert (out.double() - truth).abs().max() < 0.02
    alone = reference._attend_by_products(rows[:1], keys[:1], values[:1], None, 0.25)
    assert torch.equal(out[:1], alone)


@settings(max_examples=60)
@given(kinds=KINDS, seed=st.integers(0, 999))
def test_packing_loses_and_invents_nothing(kinds: list[str], seed: int) -> None:
    maker = SegmentMaker(Case(seed))
    segments = [maker.make(kind) for kind in kinds]
    batch = pack(segments, 4, CPU)
    assert sorted(batch.order) == list(range(len(segments)))
    offset = 0
    for index in batch.order:
        segment, end = segments[index], offset + len(segments[index].tokens)
        assert batch.input_ids[0, offset:end].tolist() == list(segment.tokens)
        assert batch.slots[offset:end].tolist() == list(segment.slots)
        positions = batch.positions[0, offset:end].tolist()
        assert positions == [segment.start + depth for depth in segment.depths]
        first = batch.first_row[index]
        rows = batch.logit_rows[first : first + segment.num_logits].tolist()
        assert rows == list(range(end - segment.num_logits, end))
        offset = end
    assert offset == batch.input_ids.shape[1]
    assert sum(group.num_tokens for group in batch.groups) == offset
    assert len(batch.logit_rows) == sum(segment.num_logits for segment in segments)


@pytest.mark.parametrize("first", [3, 65_530, 70_000])
@pytest.mark.parametrize("is_gapless", [True, False])
def test_pages_that_follow_one_another_are_told(first: int, is_gapless: bool) -> None:
    blocks = np.arange(first, first + 10)
    blocks[7:] += not is_gapless
    packed = pack([Segment([5], 150, PageTable(blocks), [0])], 16, torch.device("cpu"))
    assert packed.groups[0].first_slots == ([16 * first] if is_gapless else None)


@given(st.integers(0, 999))
def test_depths_and_ancestors_follow_the_parents(seed: int) -> None:
    segment = SegmentMaker(Case(seed)).make("tree")
    assert segment.parents is not None
    paths = ancestors(segment.parents)
    for node, parent in enumerate(segment.parents):
        above = set() if parent < 0 else set(np.flatnonzero(paths[parent]))
        assert set(np.flatnonzero(paths[node])) == above | {node}
        assert segment.depths[node + 1] == len(above) + 1


def test_rows_and_layers_of_the_cache_are_told_apart_and_moves_may_overlap() -> None:
    cache = Case(seed=1).cache()
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    sources, targets = [9, 11, 14], [8, 9, 11]
    cache.move(torch.tensor(sources), torch.tensor(targets))
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(tensor[:, targets], old[:, sources])
        rest = [slot for slot in range(tensor.shape[1]) if slot not in targets]
        assert torch.equal(tensor[:, rest], old[:, rest])
    keys = torch.ones(2, 2, KEY_DIM, dtype=torch.float64)
    values = torch.ones(2, 2, VALUE_DIM, dtype=torch.float64)
    untouched = cache.keys[0].clone()
    cache.write(1, torch.tensor([3, 70]), keys, values)
    assert torch.equal(cache.keys[0], untouched)
    assert torch.equal(cache.keys[1][:, [3, 70]], keys)


def test_kv_bytes_are_those_of_all_layers() -> None:
    cache = Case(seed=1).cache(num_layers=3)
    assert cache.num_bytes == 3 * NUM_BLOCKS * 4 * 2 * (KEY_DIM + VALUE_DIM) * 8


def test_the_parts_of_a_group_hold_its_requests_in_order() -> None:
    table = PageTable(np.arange(1, 9))
    lengths = [2, 9, 1, 9, 2]
    rows = [Segment([7] * n, 16, table, list(range(16, 16 + n)), n) for n in lengths]
    (group,) = pack(rows, 4, CPU, 1.0).groups
    assert group.lengths == [9, 9, 2, 2, 1]
    assert group.parts == [Part(0, 2, 9), Part(2, 2, 2), Part(4, 1, 1)]
    (together,) = pack(rows, 4, CPU, 1e6).groups
    assert together.lengths == lengths
    assert together.parts == [Part(0, 5, 9)]
