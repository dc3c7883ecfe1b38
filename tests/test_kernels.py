"""Every kernel against its torch twin, in Triton's interpreter; on a GPU where there is one.

Whether a kernel is interpreted is settled when its module is imported, so the checks, which are in
`kernel_checks`, run in a process of their own with the variable set: what else this process has
imported does not matter.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from sdcontrol.engine.buckets import Bucket
from sdcontrol.engine.copies import upload
from sdcontrol.engine.kernels import tables as tables_module
from sdcontrol.engine.kernels.splits import MOST_PART_ROWS, SplitPlan
from sdcontrol.engine.kernels.tables import (
    MAX_TREE_NODES,
    TableShape,
    Written,
    fill_tables,
    segment_tables,
)
from sdcontrol.engine.kv_cache import LayerShape
from sdcontrol.engine.packing import PageTable, Segment
from sdcontrol.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ["attention", "steps", "engine", "device_engine", "rounds"]

Run = Callable[[list[str], Path], str]


def run_checks(run: Run, name: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    path = f"tests/kernel_checks/{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    assert " passed" in run(command, ROOT)


@pytest.mark.timeout(900)  # a process of its own, which compiles; its tests have their limits
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted_kernels_agree_with_their_twins(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
        pytest.skip("before 3.7 Triton's interpreter needs numpy < 2.4")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_checks(run, name)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKS)
def test_compiled_kernels_agree_with_their_twins(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run_checks(run, name)


# Tables


def segment(length: int, parents: tuple[int, ...] | None = None) -> Segment:
    return Segment([1] * length, 5, PageTable(np.arange(1, 9)), [0] * length, 1, parents)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    tile_tokens=st.integers(1, 9),
    spare=st.sampled_from([(0, 0), (1, 0), (1, 13), (3, 40)]),
)
def test_tiles_cover_every_token_once_padding_included(
    lengths: list[int], tile_tokens: int, spare: tuple[int, int]
) -> None:
    tokens = sum(lengths) + spare[1]
    shape = TableShape(len(lengths) + spare[0], tokens, tile_tokens, pages=4)
    flat = fill_tables([segment(length) for length in lengths], shape, block_size=16)
    tables = shape.views(torch.from_numpy(flat))
    covered: list[int] = []
    for request, first in tables.tiles.tolist():
        first_token, length, _ = tables.requests[request].tolist()
        end = min(first + tile_tokens, length)
        covered.extend(range(first_token + first, first_token + end))
    assert sorted(covered) == list(range(tokens))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    spare=st.sampled_from([(0, 0), (1, 0), (2, 5)]),
    has_trees=st.booleans(),
)
def test_tables_are_the_same_over_those_of_others(
    lengths: list[int], spare: tuple[int, int], has_trees: bool
) -> None:
    """All of them but pages that a request does not have."""
    segments = [segment(n, (-1,) * (n - 1) if has_trees else None) for n in lengths]
    tokens = sum(lengths) + spare[1]
    shape = TableShape(len(lengths) + spare[0], tokens, 2, pages=8, has_trees=has_trees)
    fresh = fill_tables(segments, shape, block_size=4)
    used = np.full(shape.num_elements, -7, dtype=np.int32)
    assert fill_tables(segments, shape, block_size=4, into=used) is used
    *expected, pages, split_keys = shape.parts(fresh)
    *ours, our_pages, our_split_keys = shape.parts(used)
    for mine, theirs in zip((*ours, our_split_keys), (*expected, split_keys), strict=True):
        assert np.array_equal(mine, theirs)
    for row, length in enumerate(lengths):
        count = -(-(5 + length) // 4)
        assert np.array_equal(our_pages[:, row, :, :count], pages[:, row, :, :count])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5))
def test_pages_that_stand_in_their_place_are_not_written_again(steps: list[list[int]]) -> None:
    """Of any steps over a few page tables: what is read is the same."""
    tables = [PageTable(np.arange(10 * n + 1, 10 * n + 4)) for n in range(4)]
    shape = TableShape(5, 5, 1, pages=4)
    used = np.zeros(shape.num_elements, dtype=np.int32)
    written: Written = []
    for step in steps:
        segments = [Segment([1], 9 + 16 * (n % 2), tables[n], [0]) for n in step]
        fresh = shape.parts(fill_tables(segments, shape, block_size=16))
        ours = shape.parts(fill_tables(segments, shape, block_size=16, into=used, written=written))
        assert all(written[row]() is tables[n].blocks for row, n in enumerate(step))
        assert np.array_equal(ours[3][:, : len(step), :, :3], fresh[3][:, : len(step), :, :3])
        ours[3][:] = -ours[3]  # whoever reads it again has not been written again
        again = fill_tables(segments, shape, block_size=16, into=used, written=written)
        assert (shape.parts(again)[3][:, : len(step), :, :3] < 0).all()
        ours[3][:] = -ours[3]


def test_a_page_table_that_took_the_place_of_one_that_is_gone_is_written() -> None:
    """Whatever memory it got; and nobody keeps the one before."""
    shape = TableShape(1, 1, 1, pages=4)
    used = np.zeros(shape.num_elements, dtype=np.int32)
    written: Written = []
    for first in (1, 11, 21):
        table = PageTable(np.arange(first, first + 4))
        whole = Segment([1], 60, table, [0])
        fill_tables([whole], shape, block_size=16, into=used, written=written)
        assert shape.parts(used)[3].reshape(-1).tolist() == table.blocks.tolist()
        del table, whole
        assert written[0]() is None


def test_what_tables_cannot_hold_is_refused_in_one_line() -> None:
    one = TableShape(1, 4, 1, pages=4, has_trees=True)
    with pytest.raises(ConfigError, match="do not fit attention tables for 1 and 4"):
        fill_tables([segment(5)], one, block_size=16)
    with pytest.raises(ConfigError, match="1 tokens of padding belong to no request"):
        fill_tables([segment(3)], one, block_size=16)
    with pytest.raises(ConfigError, match="9 pages do not fit"):
        fill_tables([segment(4)], one, block_size=1)
    nodes = MAX_TREE_NODES + 1
    wide = TableShape(1, nodes + 1, 1, pages=8, has_trees=True)
    with pytest.raises(ConfigError, match="a draft tree of 65 nodes; at most 64"):
        fill_tables([segment(nodes + 1, (-1,) * nodes)], wide, block_size=16)


def test_tables_of_a_forward_are_uploaded_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """`upload` is the copy that does not wait for what the device was asked to do before."""
    uploads = Mock(side_effect=upload)
    monkeypatch.setattr(tables_module, "upload", uploads)
    segment_tables([segment(3)], block_size=16, tile_tokens=4, device=torch.device("cpu"))
    assert uploads.call_count == 1


# Parts of contexts

NARROW = SplitPlan(kv_heads=8, tile_tokens=4, programs_per_sm=3, num_sms=132)
WIDE = SplitPlan(kv_heads=8, tile_tokens=32, programs_per_sm=1, num_sms=132)


def pieces(
    plan: SplitPlan, contexts: Sequence[int], tokens: Sequence[int], parts: int
) -> list[int]:
    """Keys that each program reads, as the kernel counts them; those that read none are left out."""
    found = []
    wanted = plan.part_keys(np.array(contexts), np.array(tokens))
    for context, count in zip(contexts, tokens, strict=True):
        for first in range(0, count, plan.tile_tokens):
            span = context + min(first + plan.tile_tokens, count)
            if plan.window is not None:
                span = min(span, plan.window - 1 + min(plan.tile_tokens, count - first))
            chunk = max(wanted, -(-span // parts))
            chunk = -(-span // -(-span // chunk))
            starts = range(0, span, -(-chunk // 64) * 64)
            found += plan.kv_heads * [min(starts.step, span - start) for start in starts]
    return found


def test_contexts_are_split_where_programs_are_few_and_keys_many() -> None:
    assert NARROW.parts_of_grid(num_tiles=1, num_keys=32768) == 64
    assert NARROW.parts_of_grid(num_tiles=16, num_keys=32768) == 16
    assert NARROW.parts_of_grid(num_tiles=128, num_keys=4096) == 1
    assert NARROW.parts_of_grid(num_tiles=1, num_keys=200) == 1


def test_a_long_context_among_many_others_is_split() -> None:
    """Its few programs would go on alone; where a window ends what they read, they do not."""
    assert NARROW.parts_of_grid(num_tiles=128, num_keys=8192) == 1
    assert NARROW.parts_of_grid(num_tiles=128, num_keys=16384) == 2
    assert NARROW.parts_of_grid(num_tiles=128, num_keys=1 << 20) == 4
    assert replace(NARROW, window=1024).parts_of_grid(num_tiles=128, num_keys=32768) == 1


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 16, 32, 49])
@pytest.mark.parametrize("context", [3000, 8192, 32768])
def test_contexts_that_are_alike_are_read_in_one_wave(batch: int, context: int) -> None:
    """All programs run at once, and hardly a place is left, unless parts would be too short."""
    contexts = [context - 100 * (n % 3) for n in range(batch)]
    parts = NARROW.parts_of_grid(num_tiles=batch + 1, num_keys=2 * context)
    found = pieces(NARROW, contexts, [1] * batch, parts)
    assert len(found) <= NARROW.places
    assert sum(found) == 8 * (sum(contexts) + batch)
    is_full = len(found) >= 0.5 * NARROW.places
    assert is_full or min(found) < 320 or parts == 64


@given(st.lists(st.integers(200, 60_000), min_size=1, max_size=80), st.integers(1, 2))
def test_no_program_goes_on_when_the_others_have_ended(contexts: list[int], spare: int) -> None:
    """Of any contexts, as far as a grid has parts at all. Four times its share is read by a program of
    contexts twice the mean that fill half of the places.
    """
    parts = NARROW.parts_of_grid(num_tiles=len(contexts) + spare, num_keys=max(contexts) + 1)
    found = pieces(NARROW, contexts, [1] * len(contexts), parts)
    fair = sum(found) / NARROW.places
    assert max(found) <= max(4 * fair, max(contexts) / parts, 256) + 64 + 1


def test_a_window_is_split_as_far_as_it_reads() -> None:
    windowed = replace(NARROW, window=1024)
    for batch, context in ((4, 32768), (8, 32768), (16, 16384)):
        parts = windowed.parts_of_grid(num_tiles=batch + 1, num_keys=context)
        found = pieces(windowed, [context] * batch, [1] * batch, parts)
        assert len(found) >= 0.3 * windowed.places
        assert max(found) <= 1024 * 8 * batch / len(found) + 64


def test_prompts_are_split_where_many_places_on_the_device_stay_empty() -> None:
    """Each tile writes 128 rows of every part: what is gained must be worth that."""

    def parts(tiles: int) -> int:
        return WIDE.parts(np.array([16384]), np.array([32 * tiles]))

    assert parts(16) == 1  # 128 programs, 132 places
    assert parts(20) == 2  # 160 programs, 264 places
    assert parts(32) == 1
    assert parts(2) == 8  # 128 programs


def test_no_more_is_written_of_parts_than_there_is_memory_for() -> None:
    """The same bound for any step: see `forward_bytes`."""
    for tokens in (1, 100, 600, 5000, 9000):
        parts = WIDE.parts(np.array([1 << 20, 0]), np.array([1, tokens]))
        assert parts == 1 or parts * (tokens + 1) <= MOST_PART_ROWS
        parts = WIDE.parts_of_grid(num_tiles=-(-tokens // 32), num_keys=1 << 20)
        assert parts == 1 or parts * tokens <= MOST_PART_ROWS
    assert WIDE.parts(np.array([1 << 20, 0]), np.array([1, 600])) == 8


@pytest.mark.parametrize(
    ("contexts", "prompt"),
    [([32768] + [512] * 63, 448), ([131072] + [512] * 31, 480), ([32768], 512)],
)
def test_a_long_context_beside_a_prompt_does_not_go_on_alone(
    contexts: list[int], prompt: int
) -> None:
    tokens = [1] * len(contexts) + [prompt]
    contexts = [*contexts, 0]
    parts = WIDE.parts(np.array(contexts), np.array(tokens))
    found = pieces(WIDE, contexts, tokens, parts)
    assert max(found) <= max(contexts[0] / 8, sum(found) / WIDE.places) + 64
    alike = WIDE.parts(np.array([32768] * 16 + [0]), np.array([1] * 16 + [496]))
    assert alike == 1  # 128 long programs of 132 places


def test_the_length_of_a_part_is_planned_for_every_window_of_a_model() -> None:
    module = pytest.importorskip("sdcontrol.engine.kernels.bucket_attention")
    layers = [LayerShape(8, 2, 16, 16, torch.float32, window) for window in (None, 1024, None)]
    bucket = Bucket(requests=1, tokens=1, rows=1, query_tokens=1, pages=200)
    attention = module.TritonBucketAttention(
        bucket, layers, block_size=16, device=torch.device("cpu")
    )
    flat = torch.zeros(attention.num_elements, dtype=torch.int32)
    attention.bind(flat)
    attention.fill([Segment([1], 2999, PageTable(np.arange(200)), [2999])], flat.numpy())
    (tables,) = attention._tables.values()
    assert tables.split_keys_of(None)[0] == 3000  # there is room for one program
    assert tables.split_keys_of(1024)[0] == 1024 + tables.shape.tile_tokens
