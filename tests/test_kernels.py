"""Every kernel against its torch twin, in Triton's interpreter; on a GPU where there is one.

Whether a kernel is interpreted is settled when its module is imported, so the checks, which are in
`kernel_checks`, run in a process of their own with the variable set: what else this process has
imported does not matter.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from sdcontrol.engine.kernels.tables import MAX_TREE_NODES, TableShape, fill_tables
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
