"""Every kernel against its torch twin, in Triton's interpreter; on a GPU where there is one.

Whether a kernel is interpreted is settled when its module is imported, so the checks, which are in
`kernel_checks`, run in a process of their own with the variable set: what else this process has
imported does not matter.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from sdcontrol.engine.kernels import tables as tables_module
from sdcontrol.engine.kernels.splits import choose_splits
from sdcontrol.engine.kernels.tables import (
    MAX_TREE_NODES,
    TableShape,
    fill_tables,
    segment_tables,
)
from sdcontrol.engine.kv_cache import LayerShape
from sdcontrol.engine.packing import PageTable, Segment, upload
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

PLAIN = LayerShape(32, 8, 128, 128, torch.bfloat16)
H100_SMS = 132


def splits(
    num_tiles: int, num_keys: int, *, layer: LayerShape = PLAIN, has_prompts: bool = False
) -> int:
    return choose_splits(
        layer,
        num_tiles=num_tiles,
        tile_tokens=4,
        num_keys=num_keys,
        num_sms=H100_SMS,
        has_prompts=has_prompts,
    )


def test_contexts_are_split_where_programs_are_few_and_keys_many() -> None:
    assert splits(1, 32768) == 64
    assert splits(16, 32768) == 16  # 9 parts are made; of 16, for which combining is compiled
    assert splits(128, 4096) == 1
    assert splits(1, 200) == 1


def test_a_long_context_among_many_others_is_split() -> None:
    """Its few programs would go on alone; where a window ends what they read, they do not."""
    assert splits(128, 8192) == 1
    assert splits(128, 16384) == 2
    assert splits(128, 1 << 20) == 4
    assert splits(128, 32768, layer=replace(PLAIN, window=1024)) == 1


def test_prompts_are_split_where_many_places_on_the_device_stay_empty() -> None:
    """Each tile writes 128 rows of every part: what is gained must be worth that."""
    assert splits(16, 16384, has_prompts=True) == 1  # 128 programs, 132 places
    assert splits(20, 16384, has_prompts=True) == 2  # 160 programs, 264 places
    assert splits(32, 16384, has_prompts=True) == 1
    assert splits(2, 16384, has_prompts=True) == 32
