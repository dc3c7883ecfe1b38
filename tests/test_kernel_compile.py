"""The kernels compile for the GPUs that they are for, without spills and within shared memory.

No GPU is needed: Triton brings the compiler. Signatures are what the launchers pass; numbers that
launchers pass in multiples of 16 are declared so, as Triton itself does at a launch.
"""

import importlib.util
import inspect
import re
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sdcontrol.engine.kernels import (  # noqa: E402
    cache_kernels,
    coupled_kernels,
    page_kernels,
    paged_attention,
    triton_attention,
)
from sdcontrol.engine.kernels.cache_kernels import ELEMENTS  # noqa: E402
from sdcontrol.engine.kernels.launching import OPTIONS  # noqa: E402
from sdcontrol.engine.kernels.tables import segment_tables  # noqa: E402
from sdcontrol.engine.kv_cache import LayerShape  # noqa: E402
from sdcontrol.engine.packing import PageTable, Segment  # noqa: E402
from sdcontrol.errors import UnsupportedModel  # noqa: E402

pytestmark = pytest.mark.skipif(
    triton_attention.IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing is compiled"
)

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What one program may use, by compute capability (CUDA programming guide, table of limits)."""

CONSUMER_SHARED_BYTES = 99 * 1024  # of 8.6, 8.9 and 12.0

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SIZES = "num_tokens num_rows num_blocks num_pages num_moves row_stride verdict_stride"
UNEVEN = {*SIZES.split(), "page_row_stride", "page_head_stride", "vocab_size", "stream"}
"""Integers that are not always multiples of 16."""


@dataclass(frozen=True)
class Compiled:
    """What the compilers say of a kernel for one GPU."""

    ptx: str
    ttgir: str
    shared_bytes: int
    stack_bytes: int


def compiled(
    kernel: object,
    capability: int,
    *,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    ones: Collection[str] = (),
    **options: int,
) -> Compiled:
    """Compile `kernel`; `types` of its arguments that are no constants, `i32` where not given.

    `ones` are integers that a launch passes as 1: constants, unless the kernel forbids it. `options`
    are the launch's.
    """
    assert isinstance(kernel, triton.JITFunction)
    kept = {p.name for p in kernel.params if p.do_not_specialize}
    constants = {**constants, **{name: 1 for name in ones if name not in kept}}
    names = [name for name in inspect.signature(kernel.fn).parameters if name not in constants]
    signature = {name: types.get(name, "i32") for name in names}
    unaligned = {p.name for p in kernel.params if p.do_not_specialize_on_alignment}
    attributes = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, type_name in signature.items()
        if name not in unaligned and (type_name[0] == "*" or name not in UNEVEN)
    }
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={**OPTIONS, **options}
    )
    with TemporaryDirectory() as folder:
        stack = stack_bytes(binary.asm["cubin"], Path(folder))
    return Compiled(binary.asm["ptx"], binary.asm["ttgir"], binary.metadata.shared, stack)


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Bytes of the frame that a thread needs for registers that were spilled."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    done = subprocess.run(
        [str(tool("cuobjdump")), "--dump-resource-usage", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    counts = re.findall(r"(?:STACK|LOCAL):(\d+)", done.stdout)
    assert len(counts) == 2, done.stdout
    return sum(map(int, counts))


@cache
def tool(name: str) -> Path:
    spec = importlib.util.find_spec("triton")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name


def check(result: Compiled, capability: int) -> None:
    assert result.stack_bytes == 0
    assert result.shared_bytes <= SHARED_BYTES.get(capability, CONSUMER_SHARED_BYTES)


def pointers(names: str, type_name: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"*{type_name}")


# Attention


def compiled_attention(
    layer: LayerShape, query_tokens: int, capability: int, *, has_trees: bool, is_split: bool
) -> Compiled:
    tile = triton_attention.choose_tile(layer, query_tokens, capability=capability)
    return compiled(
        paged_attention.attention_kernel,
        capability,
        types=pointers("query keys values out", NAMES[layer.dtype])
        | pointers("parts weights", "fp32")
        | pointers("requests tiles nodes pages split_keys", "i32")
        | {"scale_log2": "fp32"},
        constants={
            "GROUP": layer.num_heads // layer.num_kv_heads,
            "KEY_DIM": layer.key_dim,
            "VALUE_DIM": layer.value_dim,
            "PADDED_KEY": triton_attention._padded(layer.key_dim),
            "PADDED_VALUE": triton_attention._padded(layer.value_dim),
            "BLOCK_SIZE": 16,
            "WINDOW": layer.window or 0,
            "HAS_TREES": has_trees,
            "IS_SPLIT": is_split,
            "TILE_ROWS": tile.rows,
            "TILE_KEYS": tile.keys,
            "WIDEN": False,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
    )


STEPS = {
    "decode": (1, False, True),
    "verify 5": (5, True, True),
    "verify 9": (9, True, False),
    "verify 17": (17, True, True),
    "prefill": (512, False, False),
}
"""Query tokens, whether there are trees, whether contexts are split."""


def compiled_step(layer: LayerShape, step: str, capability: int) -> Compiled:
    tokens, has_trees, is_split = STEPS[step]
    return compiled_attention(layer, tokens, capability, has_trees=has_trees, is_split=is_split)


def check_step(layer: LayerShape, step: str, capability: int) -> None:
    """And as many of its programs as are planned with fit a multiprocessor, whose system takes 1 KB of each."""
    result = compiled_step(layer, step, capability)
    check(result, capability)
    tile = triton_attention.choose_tile(layer, STEPS[step][0], capability=capability)
    at_once = triton_attention.programs_per_sm(tile, capability)
    assert at_once * 32 * tile.num_warps * tile.max_registers <= 65536
    most = SHARED_BYTES.get(capability, CONSUMER_SHARED_BYTES)
    assert at_once * (result.shared_bytes + 1024) <= most + 1024


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("head", [64, 128, 256])
def test_attention_compiles_without_spills(head: int, step: str, capability: int) -> None:
    layer = LayerShape(32, 8, head, head, torch.bfloat16)
    check_step(layer, step, capability)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("head", [64, 128, 256])
def test_every_tile_is_computed_while_the_next_is_loaded(
    head: int, step: str, capability: int
) -> None:
    """What the loop first waits for leaves at least a tile's keys and its values on their way."""
    layer = LayerShape(32, 8, head, head, torch.bfloat16)
    _, _, loop = compiled_step(layer, step, capability).ttgir.partition("scf.for")
    waits = re.findall(r"async_wait.*num = (\d+)", loop)
    assert int(waits[0]) >= 2


@pytest.mark.parametrize("head", [64, 80, 128])
def test_a_tile_of_64_rows_is_one_warp_group_and_two_fit_an_sm(head: int) -> None:
    """On 9.0 a second group would compute the same scores; an SM has 228 KB, a program 1 of them."""
    layer = LayerShape(32, 8, head, head, torch.bfloat16)
    for has_trees in (False, True):
        for is_split in (False, True):
            result = compiled_attention(layer, 9, 90, has_trees=has_trees, is_split=is_split)
            check(result, 90)
            assert set(re.findall(r"warpsPerCTA = \[(\d+), \d+\], instr", result.ttgir)) == {"4"}
            assert 2 * (result.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("capability", [86, 120])
@pytest.mark.parametrize("step", ["decode", "verify 9", "prefill"])
@pytest.mark.parametrize("head", [128, 256])
def test_attention_fits_consumer_parts(head: int, step: str, capability: int) -> None:
    layer = LayerShape(32, 8, head, head, torch.bfloat16)
    check_step(layer, step, capability)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("head", [8, 16, 32, 64, 128, 256])
def test_attention_in_float32_compiles_without_spills(head: int, capability: int) -> None:
    layer = LayerShape(32, 8, head, head, torch.float32)
    for step in ("decode", "verify 9"):
        result = compiled_step(layer, step, capability)
        check(result, capability)
        assert "mma" not in result.ptx  # no rounding to tf32


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(
    "layer",
    [
        LayerShape(28, 4, 128, 128, torch.float16),
        LayerShape(32, 32, 80, 80, torch.float16),
        LayerShape(16, 16, 192, 128, torch.bfloat16),
        LayerShape(16, 8, 256, 256, torch.bfloat16, window=1024),
        LayerShape(48, 1, 128, 128, torch.bfloat16),
    ],
    ids=["7 heads share", "odd size", "two sizes", "window", "all heads share"],
)
def test_attention_of_unusual_layers_compiles_without_spills(
    layer: LayerShape, capability: int
) -> None:
    result = compiled_attention(layer, 5, capability, has_trees=True, is_split=True)
    check(result, capability)


@pytest.mark.parametrize("head", [64, 128, 256])
def test_decoding_reads_keys_and_values_in_the_widest_pieces_ahead_of_time(head: int) -> None:
    """16 bytes a thread, straight into shared memory: no key passes through registers."""
    layer = LayerShape(32, 8, head, head, torch.bfloat16)
    tile = triton_attention.choose_tile(layer, 1)
    ptx = compiled_step(layer, "decode", 90).ptx
    tile_bytes = tile.keys * 2 * head * 2
    copies = len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*0x10", ptx))
    per_tile = tile_bytes // (16 * 32 * tile.num_warps)
    assert copies == 3 * per_tile  # two tiles before the loop, one inside
    assert not re.search(r"ld\.global\S*\.v[24]\.b32.*\n(?:.*\n){0,3}.*mma", ptx)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_parts_are_combined_without_spills(capability: int) -> None:
    for head, num_splits, rows in (
        *((64, 3, 1), (128, 64, 1), (256, 64, 1)),
        *((64, 4, 5000), (128, 4, 5000), (128, 2, 5000), (256, 8, 5000)),
    ):
        splits = triton.next_power_of_2(num_splits)
        result = compiled(
            paged_attention.combine_kernel,
            capability,
            types=pointers("parts weights", "fp32") | pointers("out", "bf16"),
            constants={
                "VALUE_DIM": head,
                "PADDED_VALUE": head,
                "SPLITS": num_splits,
                "PADDED_SPLITS": splits,
                "ROWS": triton_attention.combined_rows(head * splits, rows),
            },
            num_warps=triton_attention.combine_warps(head * splits),
        )
        check(result, capability)


# The small kernels


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
def test_cache_and_page_kernels_compile_without_spills(dtype: torch.dtype, capability: int) -> None:
    name, sizes = NAMES[dtype], {"DIM": 128, "PADDED": 128}
    written = compiled(
        cache_kernels.write_kernel,
        capability,
        types=pointers("keys values key_cache value_cache", name) | pointers("slots", "i64"),
        constants={"KEY_DIM": 128, "VALUE_DIM": 128, "PADDED": 128},
        num_warps=1,
    )
    moved = compiled(
        cache_kernels.move_kernel,
        capability,
        types=pointers("addresses sources targets", "i64"),
        constants={"LIKE": ELEMENTS[dtype], "TILE": 32, **sizes},
        num_warps=4,
    )
    summarised = compiled(
        page_kernels.summarise_kernel,
        capability,
        types=pointers("addresses blocks", "i64") | pointers("low high", name),
        constants={"LIKE": ELEMENTS[dtype], "BLOCK_SIZE": 16, "PADDED_BLOCK": 16, **sizes},
        num_warps=4,
    )
    for result in (written, moved, summarised):
        check(result, capability)
        assert re.search(r"ld\.global\S*\.v[24]\.", result.ptx)  # whole pieces of rows


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_scoring_compiles_without_spills(capability: int) -> None:
    for head, group in ((64, 8), (128, 4), (256, 2)):
        result = compiled(
            page_kernels.score_kernel,
            capability,
            types=pointers("queries scores", "fp32")
            | pointers("low high", "bf16")
            | pointers("blocks", "i64"),
            constants={"GROUP": group, "DIM": head, "PADDED": head, "TILE_PAGES": 32},
            num_warps=4,
        )
        check(result, capability)


PARTIAL = pointers("bests", "fp64") | pointers("winners", "i32") | pointers("tops totals", "fp32")


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
def test_sampling_and_the_walk_compile_without_spills(dtype: torch.dtype, capability: int) -> None:
    sampled = compiled(
        coupled_kernels.sample_kernel,
        capability,
        types=PARTIAL
        | pointers("scores", NAMES[dtype])
        | pointers("seeds positions is_sampled", "i64"),
        constants={"PART": 8192, "BLOCK": 1024},
        num_warps=4,
    )
    reduced = [
        compiled(
            coupled_kernels.reduce_kernel,
            capability,
            types=PARTIAL | pointers("is_sampled tokens", "i64") | pointers("confidence", "fp32"),
            constants={"PARTS": parts, "PADDED": triton.next_power_of_2(parts)},
            num_warps=1,
        )
        for parts in (126, 1)  # one of a tiny vocabulary
    ]
    for result in (sampled, *reduced):
        check(result, capability)
    for is_given in (False, True):
        walked = compiled(
            coupled_kernels.walk_kernel,
            capability,
            types=pointers(
                "samples draft_tokens parents stands first_rows first_nodes num_nodes verdicts",
                "i64",
            ),
            constants={"IS_GIVEN": is_given},
            num_warps=1,
        )
        check(walked, capability)


def test_a_stream_of_one_is_sampled() -> None:
    compiled(
        coupled_kernels.sample_kernel,
        90,
        types=PARTIAL | pointers("scores", "bf16") | pointers("seeds positions is_sampled", "i64"),
        constants={"PART": 8192, "BLOCK": 1024},
        ones=["stream"],
        num_warps=4,
    )


# The launcher's choices


def test_layers_that_do_not_fit_a_tile_are_refused() -> None:
    for layer in (
        LayerShape(71, 1, 64, 64, torch.bfloat16),
        LayerShape(8, 8, 576, 512, torch.bfloat16),
    ):
        with pytest.raises(UnsupportedModel, match="use the torch backend"):
            triton_attention.choose_tile(layer, 1)


class Launches:
    """Stands for a kernel and notes what it would be compiled for."""

    def __init__(self) -> None:
        self.constants: list[dict[str, object]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **constants: self.constants.append(constants)


def test_one_compiled_kernel_reads_contexts_in_any_number_of_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = Launches()
    monkeypatch.setattr(triton_attention, "attention_kernel", launches)
    monkeypatch.setattr(triton_attention, "combine_kernel", Launches())
    segment = Segment([1], 99, PageTable(np.arange(1, 8)), [99])
    tables = segment_tables([segment], block_size=16, tile_tokens=4, device=torch.device("cpu"))
    cache = torch.zeros(8, 128, 128, dtype=torch.bfloat16)
    tile = triton_attention.choose_tile(LayerShape(32, 8, 128, 128, torch.bfloat16), 1)
    for num_splits in (2, 4, 64):
        triton_attention.paged_attention(
            torch.zeros(32, 1, 128, dtype=torch.bfloat16),
            cache,
            cache,
            tables,
            scale=1.0,
            block_size=16,
            tile=tile,
            num_splits=num_splits,
        )
    assert launches.constants == [launches.constants[0]] * 3
