"""The GPU benchmark: its arithmetic, what it keeps and leaves out, and every part at small scale."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    against_transformers,
    attention,
    correctness,
    magicdec,
    plain,
    promise,
    timing,
)
from benchmarks.gpu.acceptance import KINDS, MIXES, kind_rates, seeds_of
from benchmarks.gpu.bench import USABLE, Bench, Budget
from benchmarks.gpu.correctness import exact_attention, random_step
from benchmarks.gpu.decoder import Decoder, DecoderSpec, Turn, kv_tokens_for
from benchmarks.gpu.dry_run import GIB, bench_of
from benchmarks.gpu.figures import (
    OUT_OF_TIME,
    CellFigures,
    Figure,
    block_facts,
    failed,
    failures,
    fuller,
    judged,
    spread,
)
from benchmarks.gpu.floors import (
    Load,
    Need,
    Rates,
    acceptance_length,
    floor_seconds,
    kv_bytes,
    score_bytes,
    self_drafting_bound,
    step_bytes,
    step_flops,
    weight_bytes,
)
from benchmarks.gpu.magicdec import best_bound
from benchmarks.gpu.models import llama_config, random_llama
from benchmarks.gpu.part import Cell, Part
from benchmarks.gpu.plain import target_ratio
from benchmarks.gpu.promise import RIVAL, figures_of, fixed_specs, screened
from benchmarks.gpu.report import Report, markdown, missing
from benchmarks.gpu.rivals import (
    BATCHED_COMPILED,
    attention_used,
    decoding_rate,
    static_loop,
    token_times,
)
from benchmarks.gpu.scale import FULL, SMALL
from benchmarks.gpu.verification import ragged_lengths
from benchmarks.keeping import Keeping
from benchmarks.measuring import write_results
from benchmarks.regret.rig import Arm
from benchmarks.regret.scoring import ADAPTIVE, OFF
from sdcontrol import policies
from sdcontrol.compiled import is_compiling
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.base import Draft, Drafter, DraftTask, KeepDrafting
from sdcontrol.engine.drafters.ngram import NgramDrafter
from sdcontrol.engine.graphs import forward_bytes, largest_forward_bytes
from sdcontrol.engine.kernels.splits import SplitPlan
from sdcontrol.engine.kv_cache import LayerShape
from sdcontrol.engine.model_watch import ModelWatch
from sdcontrol.engine.packing import PageTable, Segment
from sdcontrol.engine.verify import CoupledVerifier
from sdcontrol.errors import DrafterFault
from tests.graph_support import FakeRecorder, use_fake_graphs

LLAMA = FULL.target
H200 = Rates(4.3e12, 7.5e11 * 1e3)
LOADS = st.builds(Load, st.integers(1, 256), st.integers(16, 32768), st.integers(1, 16))


# -- floors ----------------------------------------------------------------------------------------


def test_the_8b_target_is_16_gigabytes_and_128_kibibytes_of_kv_per_token() -> None:
    assert weight_bytes(LLAMA) == pytest.approx(16.06e9, rel=1e-3)
    assert kv_bytes(LLAMA, 1) == 128 * 1024
    assert weight_bytes(FULL.draft) == pytest.approx(2.47e9, rel=1e-2)
    assert LLAMA.vocab_size == FULL.draft.vocab_size == 128256


def test_a_step_reads_layers_head_and_all_contexts_but_not_the_embedding() -> None:
    table = LLAMA.vocab_size * LLAMA.hidden_size * 2.0
    plain = step_bytes(LLAMA, Load(16, 32768))
    assert plain == pytest.approx(weight_bytes(LLAMA) - table + kv_bytes(LLAMA, 16 * 32769))


@given(LOADS, LOADS)
def test_more_work_has_no_lower_floor(load: Load, other: Load) -> None:
    larger = Load(
        max(load.batch_size, other.batch_size),
        max(load.context_tokens, other.context_tokens),
        max(load.tokens_per_request, other.tokens_per_request),
    )
    assert floor_seconds(LLAMA, larger, H200) >= floor_seconds(LLAMA, load, H200)


@given(LOADS)
def test_a_floor_is_what_the_slower_of_memory_and_arithmetic_takes(load: Load) -> None:
    seconds = floor_seconds(LLAMA, load, H200)
    read = step_bytes(LLAMA, load) / H200.bytes_per_second
    computed = step_flops(LLAMA, load) / H200.flops_per_second
    assert seconds == max(read, computed)


def test_a_plain_step_of_one_request_is_bound_by_memory_and_a_wide_one_by_arithmetic() -> None:
    for load, by_memory in ((Load(1, 1024), True), (Load(256, 512, 16), False)):
        read = step_bytes(LLAMA, load) / H200.bytes_per_second
        assert (floor_seconds(LLAMA, load, H200) == read) is by_memory


@given(st.floats(0.0, 1.0), st.integers(0, 16))
def test_the_acceptance_length_is_the_geometric_sum(rate: float, length: int) -> None:
    expected = length + 1 if rate == 1.0 else (1 - rate ** (length + 1)) / (1 - rate)
    assert acceptance_length(rate, length) == pytest.approx(expected, rel=1e-6)


def test_bounds_of_self_drafting_are_those_of_the_issue() -> None:
    """About 1.96, 1.91, 1.83 and 1.43; how the embedding and writes count moves them a little."""
    stated = dict(zip(FULL.magicdec, (1.96, 1.91, 1.83, 1.43), strict=False))
    for (batch, context), bound in stated.items():
        assert best_bound(FULL, batch, context, 0)[0] == pytest.approx(bound, rel=0.03)


@given(LOADS, st.floats(0.0, 1.0), st.integers(1, 8), st.sampled_from([512, 2048]))
def test_no_bound_is_above_the_acceptance_length(
    load: Load, rate: float, length: int, budget: int
) -> None:
    bound = self_drafting_bound(
        LLAMA, load, budget_tokens=budget, rate=rate, num_draft_tokens=length
    )
    assert bound <= acceptance_length(rate, length)
    if rate == 0.0:
        assert bound < 1.0


# -- what fits ---------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text("abc", min_size=1), st.floats(0, 1e12), min_size=1), st.floats(0, 1e12)
)
def test_a_cell_is_left_out_exactly_where_it_does_not_fit(
    needed: dict[str, float], free: float
) -> None:
    reason = Need(needed, free).lack
    assert (reason is None) == (sum(needed.values()) <= free)
    if reason is not None:
        assert all(name in reason for name in needed)
        assert f"{free / 1e9:.1f} GB free" in reason


def bench_with(free_bytes: float) -> Bench:
    """Of `free_bytes` that can be used."""
    return Bench(FULL, torch.device("cpu"), free_bytes / USABLE)


def test_scored_pages_take_a_sixteenth_of_the_cache_beside_their_queries() -> None:
    """Two bounds for a page of 16 keys and 16 values: a sixteenth."""
    without = score_bytes(LLAMA, 1 << 19, 0)
    assert without == kv_bytes(LLAMA, 1 << 19) / 16
    assert score_bytes(LLAMA, 1 << 19, 16) - without == 16 * 32 * 32 * 97 * 128 * 2


def test_what_engines_take_beside_kv_lies_within_the_reserve_of_a_cell() -> None:
    """Of the largest batch, with a draft model: graphs, a step that also prefills, and a gigabyte for
    libraries and graphs' nodes. Else a cell that fits would be refused.
    """
    batch = max(batch for batch, _ in FULL.promise)
    tokens = batch * (1 + EngineConfig().max_draft_tokens)
    taken = 1e9
    for shape in (FULL.target, FULL.draft):
        model = SimpleNamespace(config=llama_config(shape), dtype=torch.bfloat16)
        heads, dim = (shape.num_heads, shape.num_kv_heads), shape.head_dim
        layers = [LayerShape(*heads, dim, dim, torch.bfloat16)]
        runner = SimpleNamespace(model=model, vocab_size=shape.vocab_size, layers=layers)
        taken += largest_forward_bytes(runner, tokens)  # type: ignore[arg-type]
        if shape is FULL.target:
            taken += forward_bytes(runner, 8192 + tokens, batch + tokens)  # type: ignore[arg-type]
    assert taken < FULL.reserve_bytes


@pytest.mark.parametrize(("gigabytes", "left_out"), [(134.0, 1), (76.0, 3)])
def test_cells_too_large_for_a_device_say_so_with_numbers(gigabytes: float, left_out: int) -> None:
    """An H200 has room for all plain cells but 128 x 8k; an H100 lacks 64 x 8k and 16 x 32k too."""
    bench = bench_with(gigabytes * 1e9)
    (plain,) = [part for part in command.PARTS if part.number == 1]
    as_they_are = [cell for cell in plain.cells(bench) if "compiled" not in cell.name]
    skipped = {cell.name: cell.skip for cell in as_they_are if cell.skip}
    assert len(skipped) == left_out
    assert "batch 128, context 8192" in skipped
    assert all("target KV" in str(reason) for reason in skipped.values())


def test_a_device_without_room_for_the_weights_leaves_out_every_cell_with_a_model() -> None:
    for part in command.PARTS:
        if part.number not in {0, 3}:
            assert all(cell.skip for cell in part.cells(bench_with(10e9)))


@pytest.mark.parametrize("gib", [24.0, 78.0, 79.2, 139.0])
def test_a_dry_run_lists_every_cell_with_its_bytes_and_leaves_out_what_does_not_fit(
    gib: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU: an H100 and an H200, and less than that."""
    bench = bench_of(gib)
    for part in command.PARTS:
        asked = ["--dry-run", "--memory-gib", str(gib), "--part", str(part.number)]
        assert command.main(asked) == 0
        _, title, *lines = capsys.readouterr().out.splitlines()
        cells = part.cells(bench)
        assert title.startswith(f"part {part.number}: {part.title}; 60.0 minutes")
        for cell, line in zip(cells, lines, strict=True):
            assert line.startswith(f"  {cell.name}")
            if cell.need is not None:
                is_too_large = cell.need.num_bytes > USABLE * gib * GIB
                assert (": skipped: needs " in line) == is_too_large
                assert f" {cell.need.num_bytes / 1e9:.1f} GB" in line
    fitting = {
        part.number: sum(cell.skip is None for cell in part.cells(bench)) for part in command.PARTS
    }
    assert fitting[0] == 5
    assert all(fitting.values()) == (gib > 24)


def test_memory_that_is_no_number_above_0_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--dry-run", "--memory-gib", "0"])
    assert "0 GiB; give a number above 0" in capsys.readouterr().err


def test_cells_of_a_part_have_names_of_their_own() -> None:
    for scale in (FULL, SMALL):
        bench = Bench(scale, torch.device("cpu"))
        for part in command.PARTS:
            names = [cell.name for cell in part.cells(bench)]
            assert len(set(names)) == len(names) > 0


# -- what comes first ------------------------------------------------------------------------------


def names_of(number: int, bench: Bench) -> list[str]:
    (part,) = [part for part in command.PARTS if part.number == number]
    return [cell.name for cell in part.cells(bench)]


def test_correctness_of_what_is_timed_comes_first_and_float32_last() -> None:
    assert names_of(0, bench_of(139.0)) == [
        "attention, bfloat16",
        "verdicts against the host's",
        "texts against generate",
        "graphs against eager",
        "attention, float32",
    ]


def test_every_tile_that_is_timed_is_compared_with_float64_first() -> None:
    """In bfloat16 on a GPU of 9.0, by the model's heads; and contexts are split in many parts."""
    triton_attention = pytest.importorskip("sdcontrol.engine.kernels.triton_attention")
    shape = FULL.target
    layer = LayerShape(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim, torch.bfloat16
    )

    def rows_of(query_tokens: int) -> int:
        rows: int = triton_attention.choose_tile(layer, query_tokens).rows
        return rows

    compared = {rows_of(max(lengths)) for _, lengths in correctness._LOADS.values()}
    assert compared == {rows_of(tokens) for tokens in range(1, 100)}
    longest = max(max(contexts) for contexts, _ in correctness._LOADS.values())
    plan = SplitPlan(layer.num_kv_heads, tile_tokens=4, programs_per_sm=3, num_sms=132)
    assert plan.parts(np.array([longest]), np.array([1])) >= 32


@pytest.mark.parametrize("gib", [78.0, 139.0])
def test_in_part_5_loads_that_fit_come_first_then_halves_then_what_is_left_out(gib: float) -> None:
    bench = bench_of(gib)
    cells = magicdec.cells(bench)
    lacking = [cell.skip is not None for cell in cells]
    assert lacking == sorted(lacking)
    loads = dict.fromkeys(cell.name.rpartition(",")[0] for cell in cells if not cell.skip)
    given = [f"batch {batch}, context {context}" for batch, context in FULL.magicdec]
    fitting = [load for load in given if load in loads]
    assert [*loads][: len(fitting)] == fitting
    assert len(fitting) == (1 if gib < 100 else 5)


def test_the_first_cells_of_the_promise_are_mixed_within_the_batch() -> None:
    first = [(16, 4096), (64, 512), (4, 4096), (256, 512), (64, 4096)]
    assert names_of(6, bench_of(78.0))[:5] == [
        f"batch {batch}, context {context}, acceptance mixed" for batch, context in first
    ]
    assert len(set(FULL.promise)) == len(FULL.promise) == 12


def test_rivals_with_a_target_come_first_and_what_compiles_longest_comes_last() -> None:
    names = names_of(4, bench_of(139.0))
    assert [tuple(name.replace(", context 1024", "").split(", ", 1)) for name in names] == [
        ("batch 32", "generate, dynamic cache"),
        ("batch 32", "generate_batch"),
        ("batch 1", "compiled loop"),
        ("batch 32", "generate, static cache"),
        ("batch 1", "generate, dynamic cache"),
        ("batch 1", "generate_batch"),
        ("batch 1", "generate, static cache"),
        ("batch 32", "generate_batch, graphs and compiled"),
        ("batch 1", "generate_batch, graphs and compiled"),
    ]


def test_every_cell_says_how_long_it_takes_and_fits_a_command_of_ten_minutes() -> None:
    for part in command.PARTS:
        seconds = [cell.seconds for cell in part.cells(bench_of(139.0))]
        assert 10.0 <= min(seconds) <= max(seconds) <= 240.0


def test_every_cell_of_the_promise_has_an_engine_of_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One for all would meet more shapes of graphs than an engine keeps, and take more memory."""
    bench, specs = bench_of(139.0), list[DecoderSpec]()

    def open_none(spec: DecoderSpec) -> Decoder:
        specs.append(spec)
        raise RuntimeError("no engine")

    monkeypatch.setattr(bench, "decoder", open_none)
    for cell in promise.cells(bench):
        with pytest.raises(RuntimeError, match="no engine"):
            cell.measure()
    mixes = len(FULL.mixes)
    assert [spec.max_batch_size for spec in specs] == [batch for batch, _ in FULL.promise] * mixes
    assert len({(spec.max_batch_size, spec.kv_tokens) for spec in specs}) == len(FULL.promise)


# -- loads and arms --------------------------------------------------------------------------------


@given(st.integers(1, 128), st.integers(1, 16))
def test_ragged_requests_have_the_uniform_total_and_1_to_16_tokens(batch: int, mean: int) -> None:
    lengths = ragged_lengths(batch, mean)
    assert len(lengths) == batch
    assert sum(lengths) == batch * mean
    assert 1 <= min(lengths) <= max(lengths) <= 16
    if batch > 1 and 1 < mean < 16:
        assert len(set(lengths)) > 1


@given(st.sampled_from(sorted(MIXES)), st.integers(1, 64), st.integers(1, 9))
def test_kinds_of_an_odd_block_are_those_of_the_even_one_after_it(
    mix: str, batch: int, pair: int
) -> None:
    odd, even = (
        [seed % len(KINDS) for seed in seeds_of(MIXES[mix], batch, block)]
        for block in (2 * pair - 1, 2 * pair)
    )
    assert odd == even
    assert set(odd) <= {list(KINDS).index(rate) for rate in MIXES[mix]}
    assert len(set(seeds_of(MIXES[mix], batch, pair))) == batch


def test_one_request_meets_every_kind_of_a_mix_over_six_blocks() -> None:
    kinds = {seeds_of(MIXES["mixed"], 1, block)[0] % 3 for block in range(1, FULL.blocks + 1)}
    assert kinds == {0, 1, 2}


def test_every_fixed_arm_can_be_built_and_sparse_kv_needs_a_longer_context() -> None:
    arms = fixed_specs("sparse_kv:512", 4096)
    for spec in arms.values():
        policies.build(spec)
    short = fixed_specs("sparse_kv:512", 512)
    assert {name for name in arms if name not in short} == {
        "sparse_kv:512:2",
        "sparse_kv:512:4",
        "sparse_kv:512:8",
    }


def test_only_fixed_settings_without_a_chance_in_any_block_are_dropped() -> None:
    rates = {OFF: [0.1, 0.1], "a": [1.0, 0.2], "b": [0.2, 1.0], "c": [0.3, 0.3]}
    assert screened(rates, [*rates]) == {"c": pytest.approx(0.3)}


RATE_BLOCKS = st.fixed_dictionaries(
    {
        name: st.lists(st.floats(1.0, 100.0), min_size=6, max_size=6)
        for name in (OFF, "ngram:2", ADAPTIVE, RIVAL)
    }
)


@given(RATE_BLOCKS)
def test_the_rival_is_no_fixed_setting_and_is_compared_on_even_blocks(
    rates: dict[str, list[float]],
) -> None:
    best, off, rival, mixed = figures_of(rates, is_mixed=True)
    assert RIVAL not in best.name
    assert (best.target, off.target, rival.target, mixed.target) == (0.97, 0.99, 1.0, 1.10)
    assert mixed.value == best.value
    ratios = np.array(rates[ADAPTIVE][1::2]) / np.array(rates[RIVAL][1::2])
    assert rival.value == pytest.approx(float(np.median(ratios)))
    assert len(figures_of(rates, is_mixed=False)) == 3


def test_the_target_is_looser_beyond_batch_64() -> None:
    assert [target_ratio(batch) for batch in (1, 64, 128)] == [1.30, 1.30, 1.50]


# -- figures and report ----------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_are_values_that_were_seen_around_the_median(values: list[float]) -> None:
    seen = spread(values)
    assert {seen.p10, seen.p90} <= set(values)
    assert seen.p10 <= seen.median <= seen.p90


def test_targets_are_least_or_most_and_misses_are_marked() -> None:
    least, most = Figure("a", 0.9, "x", 1.0), Figure("b", 0.9, "x", 1.0, is_ceiling=True)
    assert (least.is_met, most.is_met) == (False, True)
    assert judged(least.to_dict()) == "at least 1: MISSED"
    assert judged(most.to_dict()) == "at most 1: met"
    assert not Figure("c", float("nan"), "x", 1.0, is_ceiling=True).is_met
    assert judged(Figure("d", 1.0).to_dict()) == ""


def result(part: int, name: str, **more: object) -> dict[str, object]:
    figures = [Figure("step / floor", 1.6, "x", 1.3, is_ceiling=True).to_dict()]
    return {"part": part, "name": name, "scale": "full", "figures": figures, **more}


def test_a_rival_that_fails_is_told_of_beside_the_others_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    why = failed(TypeError("no page_size\nin this version"))
    figure = Figure("ours", 2.0, "x").to_dict()
    facts = {"theirs": why, "another": OUT_OF_TIME, "copies": 3}
    result = {"part": 3, "name": "a", "scale": "full", "figures": [figure], "facts": facts}
    assert failures(result) == {"theirs": why}
    table = markdown([result], command.PARTS)
    assert "| theirs |  |  | failed: TypeError: no page_size in this version |" in table
    command._print(result)
    assert "theirs: failed: TypeError: no page_size in this version\n" in capsys.readouterr().out


def test_cells_are_kept_over_runs_and_failed_ones_are_known(tmp_path: Path) -> None:
    report = Report(tmp_path, "NVIDIA H200", command.PARTS)
    report.add(result(1, "one"))
    report.add(result(2, "two", failed="RuntimeError: lost"))
    again = Report(tmp_path, "NVIDIA H200", command.PARTS)
    assert again.path.name == "gpu-nvidia-h200.json"
    assert not again.is_open(1, "one")
    assert not again.is_open(2, "two")
    assert again.is_open(2, "other")
    assert again.failed(1) == frozenset()
    assert again.failed(2) == {"two"}
    again.forget(2)
    again.add(result(2, "other"))
    assert [(r["part"], r["name"]) for r in again.results] == [(1, "one"), (2, "other")]
    table = again.path.with_suffix(".md").read_text("utf-8")
    assert "at most 1.3: MISSED" in table


def test_a_cell_that_ran_out_of_time_is_open_again(tmp_path: Path) -> None:
    report = Report(tmp_path, "device", command.PARTS)
    report.add(result(3, "cut", facts={"ours": "graph", "FlexAttention": OUT_OF_TIME}))
    report.add(result(3, "whole", facts={"ours": "graph", "FlexAttention": "eager"}))
    assert report.is_open(3, "cut")
    assert not report.is_open(3, "whole")


def test_a_cell_that_did_not_fit_is_open_where_it_does(tmp_path: Path, bench: Bench) -> None:
    """Somebody else may have had the memory; what never fits takes no part in sharing the time."""
    report, part = Report(tmp_path, "device", command.PARTS), part_of(fine)
    (fits,) = part.cells(bench)
    without_room = Part(1, "made up", lambda bench: [replace(fits, out_of_place="too large")])
    command.run_part(without_room, bench, report, seconds=60.0)
    assert command._todo(without_room, bench, report, None) == []
    command.run_part(part, bench, report, seconds=60.0)
    assert "figures" in report.results[0]
    assert "skipped" not in report.results[0]


@pytest.mark.parametrize(("blocks", "kept"), [(2, 4), (4, 4), (6, 6)])
def test_of_a_cell_that_is_cut_again_more_blocks_stay(blocks: int, kept: int) -> None:
    earlier = result(5, "cell", facts=block_facts(4, 6))
    again = result(5, "cell", facts=block_facts(blocks, 6))
    facts = fuller(earlier, again)["facts"]
    assert isinstance(facts, dict)
    assert facts["counted_blocks"] == kept
    assert fuller(None, again) is again
    lost = result(5, "cell", failed="RuntimeError: lost")
    assert fuller(earlier, lost) is lost


def test_a_run_that_is_killed_while_it_writes_leaves_the_results_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_results("name", "command", [{"cell": 1}], folder=tmp_path)
    before = path.read_text("utf-8")
    write = Path.write_text

    def killed(path: Path, text: str, **options: str) -> int:
        write(path, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        write_results("name", "command", [{"cell": 1}, {"cell": 2}], folder=tmp_path)
    assert path.read_text("utf-8") == before


def test_what_only_a_gpu_gives_is_missing_until_a_full_run_has_it() -> None:
    small = {**result(1, "one"), "scale": SMALL.name}
    assert "not judged" in markdown([small], command.PARTS)
    before = missing([small], command.PARTS)
    after = missing([small, result(1, "two")], command.PARTS)
    assert any(line.startswith("- part 1") for line in before)
    assert not any(line.startswith("- part 1") for line in after)
    every = [result(part.number, "cell") for part in command.PARTS]
    assert missing(every, command.PARTS) == []


def part_of(*measures: Callable[[], CellFigures]) -> Part:
    cells = [Cell(f"cell {index}", measure) for index, measure in enumerate(measures)]
    return Part(1, "made up", lambda bench: cells)


def fine() -> CellFigures:
    return CellFigures((Figure("number", 1.0),))


def test_figures_of_before_stay_where_a_run_is_killed_while_it_measures_a_cell_again(
    tmp_path: Path, bench: Bench
) -> None:
    def killed() -> CellFigures:
        raise KeyboardInterrupt

    cut = CellFigures((Figure("number", 2.0),), block_facts(4, 6))
    command.run_part(
        part_of(lambda: cut), bench, Report(tmp_path, "device", command.PARTS), seconds=60.0
    )
    with pytest.raises(KeyboardInterrupt):
        command.run_part(
            part_of(killed), bench, Report(tmp_path, "device", command.PARTS), seconds=60.0
        )
    report = Report(tmp_path, "device", command.PARTS)
    (left,) = report.results
    assert left["figures"] == [{"name": "number", "value": 2.0, "unit": ""}]
    assert "ended" in str(left["failed"])
    assert "| cell 0 | number | 2 |" in report.path.with_suffix(".md").read_text("utf-8")
    assert not report.is_open(1, "cell 0")
    assert report.failed(1) == {"cell 0"}
    again = Report(tmp_path, "device", command.PARTS)
    command.run_part(part_of(fine), bench, again, seconds=60.0, only={"cell 0"})
    assert "failed" not in Report(tmp_path, "device", command.PARTS).results[0]


def broken() -> CellFigures:
    raise RuntimeError("out of luck\nand a traceback")


def test_a_cell_that_fails_costs_no_other_and_says_where_it_did(
    tmp_path: Path, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(tmp_path, "device", command.PARTS)
    command.run_part(part_of(broken, fine), bench, report, seconds=60.0)
    first, second = report.results
    assert first["failed"] == "RuntimeError: out of luck"
    assert "figures" in second
    assert "in broken" in capsys.readouterr().err


def test_the_engine_of_a_cell_that_fails_is_not_used_again(tmp_path: Path, bench: Bench) -> None:
    spec = DecoderSpec((), CoupledVerifier(), 512, 2, 32)
    opened: list[Decoder] = []

    def open_one() -> CellFigures:
        opened.append(bench.decoder(spec))
        return broken() if len(opened) == 1 else fine()

    report = Report(tmp_path, "device", command.PARTS)
    command.run_part(part_of(open_one, open_one), bench, report, seconds=60.0)
    assert opened[0] is not opened[1]


def test_no_cell_begins_that_may_not_end_in_time(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell takes 3 of 8 seconds: after the second, a third would end too late."""
    now = [0.0]

    def slow() -> CellFigures:
        now[0] += 3.0
        return fine()

    monkeypatch.setattr(command, "Budget", lambda seconds: Budget(seconds, lambda: now[0]))
    report = Report(tmp_path, "device", command.PARTS)
    command.run_part(part_of(slow, slow, slow), bench, report, seconds=8.0)
    assert [r["name"] for r in report.results] == ["cell 0", "cell 1"]
    command.run_part(part_of(slow, slow, slow), bench, report, seconds=8.0)
    assert [r["name"] for r in report.results] == ["cell 0", "cell 1", "cell 2"]


def test_what_the_first_cell_makes_for_all_stops_no_other(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 seconds the first takes 6, the others 1 each; what is left out takes none."""
    now = [0.0]

    def takes(seconds: float) -> Callable[[], CellFigures]:
        def measure() -> CellFigures:
            now[0] += seconds
            return fine()

        return measure

    monkeypatch.setattr(command, "Budget", lambda seconds: Budget(seconds, lambda: now[0]))
    report = Report(tmp_path, "device", command.PARTS)
    skipped = Cell("left out", fine, None, "too large")
    others = part_of(*[takes(6.0)] + [takes(1.0)] * 5).cells(bench)
    part = Part(1, "made up", lambda bench: [skipped, *others])
    command.run_part(part, bench, report, seconds=10.0)
    assert [r["name"] for r in report.results] == ["left out", *(f"cell {n}" for n in range(4))]


def test_a_cell_that_takes_longer_than_is_left_waits_and_shorter_ones_do_not(
    tmp_path: Path, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left out of a device is written down at once: it takes no time."""
    began: list[str] = []

    def cell(name: str, seconds: float, out_of_place: str | None = None) -> Cell:
        measure = lambda: began.append(name) or fine()  # type: ignore[func-returns-value]  # noqa: E731
        return Cell(name, measure, None, out_of_place, seconds=seconds)

    cells = [cell("long", 200.0), cell("short", 10.0), cell("out", 200.0, "too large")]
    part = Part(1, "made up", lambda bench: cells)
    report = Report(tmp_path, "device", command.PARTS)
    command.run_part(part, bench, report, seconds=100.0)
    assert [r["name"] for r in report.results] == ["short", "out"]
    assert "left for --resume (1 in all): long\n" in capsys.readouterr().out
    assert report.is_open(1, "long")
    command.run_part(part, bench, report, seconds=300.0)
    assert began == ["short", "long"]


def test_cells_that_were_never_tried_come_before_those_that_ran_out_of_time(
    tmp_path: Path, bench: Bench
) -> None:
    began: list[str] = []

    def measure(name: str) -> Callable[[], CellFigures]:
        return lambda: began.append(name) or fine()  # type: ignore[func-returns-value]

    report = Report(tmp_path, "device", command.PARTS)
    report.add(result(1, "cell 0", facts={"theirs": OUT_OF_TIME}))
    report.add(result(1, "cell 1", failed="RuntimeError: lost"))
    part = part_of(*[measure(name) for name in "abc"])
    command.run_part(part, bench, report, seconds=60.0)
    assert began == ["c", "a"]
    command.run_part(part, bench, report, seconds=60.0, only={"cell 1"})
    assert began == ["c", "a", "b"]


def test_a_run_that_breaks_off_leaves_its_cell_to_be_tried_again(
    tmp_path: Path, bench: Bench
) -> None:
    def stopped() -> CellFigures:
        raise KeyboardInterrupt

    report = Report(tmp_path, "device", command.PARTS)
    with pytest.raises(KeyboardInterrupt):
        command.run_part(part_of(fine, stopped), bench, report, seconds=60.0)
    again = Report(tmp_path, "device", command.PARTS)
    assert not again.is_open(1, "cell 0")
    assert again.failed(1) == {"cell 1"}


def run_made_up(
    parts: list[Part], monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str
) -> int:
    monkeypatch.setattr(command, "PARTS", tuple(parts))
    monkeypatch.setattr(Bench, "rates", Rates(1e10, 1e11))
    return command.main(["--cpu", "--folder", str(folder), "--total", "10", *more])


def test_what_failed_is_resumed_after_all_parts_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a cell that hangs until the run is killed would let no other begin, ever."""
    began: list[str] = []

    def part(number: int, *is_fine: bool) -> Part:
        def measure(name: str, is_fine: bool) -> CellFigures:
            began.append(name)
            return fine() if is_fine else broken()

        names = [f"{number}{letter}" for letter, _ in zip("ab", is_fine, strict=False)]
        cells = [
            Cell(name, lambda name=name, ok=ok: measure(name, ok))  # type: ignore[misc]
            for name, ok in zip(names, is_fine, strict=True)
        ]
        return Part(number, "made up", lambda bench: cells)

    run_made_up([part(0, False)], monkeypatch, tmp_path)
    parts = [part(0, False, True), part(1, True, False)]
    assert run_made_up(parts, monkeypatch, tmp_path, "--resume") == 1
    assert began == ["0a", "0b", "1a", "1b", "0a"]
    run_made_up(parts, monkeypatch, tmp_path, "--resume", "--keep-failed")
    assert began == ["0a", "0b", "1a", "1b", "0a"]
    run_made_up(parts, monkeypatch, tmp_path, "--resume")
    assert began[5:] == ["0a", "1b"]


@pytest.mark.parametrize("numbers", [[3], [3, 4]])
def test_what_is_resumed_keeps_within_the_minutes_of_its_parts(
    numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything fails after a minute, so that all of it is tried twice if there is time."""
    now = [0.0]

    def slow() -> CellFigures:
        now[0] += 60.0
        return broken()

    monkeypatch.setattr(command, "Budget", lambda seconds: Budget(seconds, lambda: now[0]))
    parts = [Part(n, "made up", part_of(slow, slow).cells) for n in numbers]
    run_made_up(parts, monkeypatch, tmp_path, "--minutes", "2")
    now[0] = 0.0
    more = [Part(n, "made up", part_of(slow, slow, slow).cells) for n in numbers]
    run_made_up(more, monkeypatch, tmp_path, "--minutes", "2", "--resume")
    assert now[0] == 120.0 * len(numbers)


def test_time_that_a_part_leaves_over_is_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 minutes for parts of 2 and 6, the important one first; none takes any time.

    No part has more than 8 minutes, and correctness may have those, whatever its share. A part that
    is measured already has no share.
    """
    limits: dict[int, float] = {}

    def part(number: int, minutes: float, num_cells: int = 1) -> Part:
        def cells(bench: Bench) -> list[Cell]:
            def measure() -> CellFigures:
                limits[number] = bench.budget.seconds
                return fine()

            return [Cell(f"cell {index}", measure) for index in range(num_cells)]

        return Part(number, "made up", cells, minutes=minutes)

    monkeypatch.setattr(command, "Budget", lambda seconds: Budget(seconds, lambda: 0.0))
    assert run_made_up([part(2, 2.0), part(5, 6.0), part(0, 2.0)], monkeypatch, tmp_path) == 0
    assert list(limits) == [0, 5, 2]
    assert limits == {0: 480.0, 5: 450.0, 2: 480.0}
    limits.clear()
    parts = [part(1, 2.0), part(5, 6.0), part(2, 2.0, num_cells=2)]
    assert run_made_up(parts, monkeypatch, tmp_path, "--resume") == 0
    assert limits == {1: 300.0, 2: 480.0}


def test_the_time_of_all_begins_before_what_takes_long_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[list[str], Path], str]
) -> None:
    program = "import benchmarks.gpu as g, sys; print(g.STARTED > 0, len({'torch', 'numba'} & {*sys.modules}))"
    root = Path(command.__file__).parents[2]
    assert run([sys.executable, "-c", program], root).split() == ["True", "0"]
    limits: list[float] = []

    def cells(bench: Bench) -> list[Cell]:
        return [Cell("cell", lambda: limits.append(bench.budget.seconds) or fine())]  # type: ignore[func-returns-value]

    monkeypatch.setattr(command, "PARTS", (Part(1, "made up", cells),))
    monkeypatch.setattr(Bench, "rates", Rates(1e10, 1e11))
    arguments = ["--cpu", "--folder", str(tmp_path), "--total", "3"]
    for spent in (0.0, 100.0, 300.0):
        assert command.main(arguments, started=time.perf_counter() - spent) == 0
    assert limits == pytest.approx([180.0, 80.0], abs=20.0)


def test_figures_of_a_gpu_are_not_taken_where_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else plans would be plain Python, and goodput slower than it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "is_compiling", False)
    with pytest.raises(SystemExit, match="numba cannot be imported"):
        command.main(["--folder", str(tmp_path)])


@pytest.mark.parametrize("seconds", [1.0, 3600.0])
def test_after_an_error_that_the_device_does_not_survive_another_process_goes_on(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what is left of the 10 minutes, and nothing is freed on the device, which would raise."""
    restarts: list[list[str]] = []
    now = [0.0]  # the device breaks as soon as time passes

    def breaks() -> CellFigures:
        now[0] += seconds
        return broken()

    def release(bench: Bench) -> None:
        assert not now[0], "CUDA error: an illegal memory access was encountered"

    def restart(arguments: list[str]) -> None:
        restarts.append(arguments)
        raise SystemExit

    monkeypatch.setattr(command, "Budget", lambda seconds: Budget(seconds, lambda: now[0]))
    monkeypatch.setattr(command, "_restart", restart)
    monkeypatch.setattr(Bench, "is_usable", property(lambda bench: not now[0]))
    monkeypatch.setattr(Bench, "release", release)
    parts = [Part(n, "made up", part_of(breaks, fine).cells) for n in (0, 1)]
    with pytest.raises(SystemExit):
        run_made_up(parts, monkeypatch, tmp_path)
    ((*_, resume, keep, total, minutes),) = restarts
    assert (resume, keep, total) == ("--resume", "--keep-failed", "--total")
    assert not minutes.startswith("-"), "which would be taken for an option"
    assert float(minutes) == pytest.approx(max(10.0 - seconds / 60.0, 0.0), abs=0.01)
    report = Report(tmp_path, "cpu-small-scale", command.PARTS)
    assert [(r["part"], r["name"]) for r in report.results] == [(0, "cell 0")]


# -- rivals ----------------------------------------------------------------------------------------


@dataclass
class Output:
    generated_tokens: list[int]
    timestamps: list[float] | None
    error: str | None = None


@given(st.integers(1, 8), st.integers(0, 20), st.floats(0.001, 1.0))
def test_requests_that_begin_one_after_the_other_are_timed_while_all_decode(
    batch: int, lag: int, step: float
) -> None:
    """Everybody has a token per step, the last request from `lag` steps after the first on."""
    begins = [row * lag // batch for row in range(batch)]
    times = [[step * (begin + n) for n in range(104)] for begin in begins]
    assert decoding_rate(times) == pytest.approx(batch / step, rel=0.05)


def test_a_rival_that_answers_in_part_has_no_rate() -> None:
    """Else a request that failed at once would count as a fast one."""
    whole, cut = Output([1, 2], [0.1, 0.2]), Output([1], [0.1], "out of memory")
    assert token_times({"a": whole}, 1, 2) == [[0.1, 0.2]]
    with pytest.raises(RuntimeError, match=r"1 of 2 requests are whole; \['out of memory'\]"):
        token_times({"a": whole, "b": cut}, 2, 2)
    with pytest.raises(RuntimeError, match="0 of 1 requests are whole; no error"):
        token_times({}, 1, 2)
    with pytest.raises(RuntimeError, match="did not decode together"):
        decoding_rate([[0.0, 1.0], [2.0, 3.0]])


def test_the_compiled_rival_is_one_graph_and_gives_the_text_of_generate(bench: Bench) -> None:
    """Else it would be measured with breaks in its graph, or while it does something else."""
    from torch._dynamo.testing import CompileCounter  # slow to import

    model, ids = bench.target(), torch.arange(16, 80).view(1, -1)
    counter = CompileCounter()
    forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    tokens = static_loop(model, forward, ids, 12, lambda step: None)
    assert counter.frame_count == 1
    text = model.generate(  # type: ignore[misc]
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=13
    )
    assert torch.cat(tokens, dim=1).tolist() == text[:, 64:].tolist()


def test_a_rival_that_cannot_be_measured_fails_its_cell(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.target(), "generate", lambda *ids, **options: broken())
    cells = {cell.name.split(", ", 2)[2]: cell for cell in against_transformers.cells(bench)}
    with pytest.raises(RuntimeError, match="out of luck"):
        cells["generate, dynamic cache"].measure()


@pytest.mark.parametrize("failure", [None, RuntimeError("operation not permitted")])
def test_a_rival_that_cannot_be_captured_is_timed_without_a_graph(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine's own recorder: torch alone leaves another stream and no random numbers."""
    recorder, calls = FakeRecorder(failure), list[int]()
    monkeypatch.setattr(timing, "CudaRecorder", lambda device: recorder)
    monkeypatch.setattr(timing, "_seconds", lambda bench, run: run() or 1.0)
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda", wait=lambda: None)
    seen = timing.seconds_per_call(on_gpu, calls.append, 3, repeats=2)  # type: ignore[arg-type]
    assert seen.seconds == (1 / 15, 1 / 15)
    assert seen.is_graph == (failure is None)
    assert recorder.replays == (0 if failure else 3)
    assert calls == [0, 1, 2] * (len(calls) // 3)


def test_a_timing_begins_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would hold the launch."""
    done: list[str] = []

    class Event:
        def __init__(self, **options: object) -> None:
            pass

        def record(self) -> None:
            done.append("mark")

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    on_gpu = SimpleNamespace(is_cuda=True)
    assert timing._seconds(on_gpu, lambda: done.append("run")) == 0.002  # type: ignore[arg-type]
    assert done == ["run", "mark", "run", "mark"]


@pytest.mark.parametrize("is_usable", [True, False])
def test_a_kernel_that_breaks_the_device_is_not_taken_for_one_that_fails(
    is_usable: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention.KERNELS, "FlashInfer", lambda inputs: broken())  # type: ignore[arg-type]
    monkeypatch.setattr(Bench, "is_usable", is_usable)
    (cell,) = attention.cells(bench)
    if is_usable:
        assert cell.measure().facts["FlashInfer"] == failed(
            RuntimeError("out of luck and a traceback")
        )
        return
    with pytest.raises(RuntimeError, match="out of luck"):
        cell.measure()


def test_the_attention_that_a_rival_takes_for_a_call_is_known_and_put_back() -> None:
    """Newer versions put it back themselves, older ones do not."""
    for puts_back in (True, False):
        model = random_llama(SMALL.target, device=torch.device("cpu"), dtype=torch.float32, seed=0)
        with attention_used(model) as names:
            assert names == ["sdpa"]
            model.set_attn_implementation("eager")
            if puts_back:
                model.set_attn_implementation("sdpa")
        assert names[:2] == ["sdpa", "eager"]
        assert model.config._attn_implementation == "sdpa"
        model.set_attn_implementation("eager")
        assert names[-1] != "eager" or not puts_back, "nobody listens any more"


def test_a_rival_that_compiles_in_every_call_is_called_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def generate_batch(prompts: list[object], **options: object) -> dict[str, Output]:
        calls.append(options["continuous_batching_config"])
        tokens = options["generation_config"].max_new_tokens  # type: ignore[attr-defined]
        each = Output([1] * tokens, [0.5 * token for token in range(tokens)])
        return {str(row): each for row, _ in enumerate(prompts)}

    monkeypatch.setattr(bench.target(), "generate_batch", generate_batch)
    assert BATCHED_COMPILED.rates(bench, 3, 64) == [6.0]
    assert len(calls) == 1


def test_forwards_of_generate_batch_have_the_same_size_whatever_memory_is_free(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Mapping[str, object]] = []

    def generate_batch(prompts: object, **options: object) -> None:
        asked.append(vars(options["continuous_batching_config"]))
        broken()

    monkeypatch.setattr(bench.target(), "generate_batch", generate_batch)
    cells = {cell.name.split(", ", 2)[2]: cell for cell in against_transformers.cells(bench)}
    with pytest.raises(RuntimeError, match="out of luck"):
        cells["generate_batch"].measure()
    assert asked[0]["max_batch_tokens"] == 8192


# -- models, references, engine --------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [False, True])
def test_random_models_have_exactly_the_shape_and_finite_logits(is_tied: bool) -> None:
    shape = replace(SMALL.target, is_head_tied=is_tied)
    model = random_llama(shape, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert matrices == shape.num_parameters
    ids = torch.arange(16, 80).unsqueeze(0)
    out = model(ids).logits
    assert torch.isfinite(out).all()
    assert out.std() > 0
    swapped = ids.flip(1)
    swapped[0, -1] = ids[0, -1]
    assert not torch.allclose(model(swapped).logits[0, -1], out[0, -1])  # positions count


def test_steps_whose_verdicts_are_compared_have_some_of_every_kind() -> None:
    logits, tasks = random_step(3200, torch.float32)
    verdicts = CoupledVerifier().verify(logits, tasks)
    lengths = [len(verdict.accepted_nodes) for verdict in verdicts]
    proposed = [len(task.draft.tokens) if task.draft else 0 for task in tasks]
    assert 0 < sum(lengths) < sum(proposed)
    assert not all(task.draft.is_chain for task in tasks if task.draft)
    assert {task.sampler.do_sample for task in tasks} == {False, True}


def test_the_exact_attention_is_causal_softmax_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 64, 8, generator=generator) for _ in range(2))
    query = torch.randn(4, 5, 8, generator=generator)
    blocks = np.array([2, 1, 3])
    segment = Segment([1] * 5, 30, PageTable(blocks), [0] * 5)
    out = exact_attention(query, keys, values, segment, 0.3)
    order = torch.from_numpy((blocks[:, None] * 16 + np.arange(16)).reshape(-1)[:35])
    for token in range(5):
        for head in range(4):
            k, v = (t[head // 2, order[: 31 + token]].double() for t in (keys, values))
            weights = (k @ query[head, token].double() * 0.3).softmax(0)
            torch.testing.assert_close(out[token, head], weights @ v)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(SMALL, torch.device("cpu"))
    bench.rates = Rates(1e10, 1e11)  # type: ignore[misc]
    yield bench
    bench.release()


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    bench = Bench(SMALL, torch.device("cpu"))
    kv_tokens = kv_tokens_for(6, 128, 160)
    spec = DecoderSpec(("draft_model", "ngram"), kind_rates(), kv_tokens, 6, 160)
    decoder = bench.decoder(spec)
    decoder.prepare(6, 128)
    yield decoder
    bench.release()


def test_a_turn_looks_through_the_model_as_often_for_many_requests_as_for_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time takes a millisecond or more of an 8B model; a cell has a hundred turns of 256."""
    calls: list[int] = []
    content = ModelWatch.content

    def counted(watch: ModelWatch) -> bytes:
        calls[-1] += 1
        return content(watch)

    monkeypatch.setattr(ModelWatch, "content", counted)
    for batch in (1, 5):
        spec = DecoderSpec(
            ("draft_model",), kind_rates(), kv_tokens_for(batch, 64, 32), batch, 32, has_queue=True
        )
        decoder = bench.decoder(spec)
        calls.append(0)
        decoder.prepare(batch, 64)
        decoder.turn(Arm(OFF, OFF), steps=2)
    assert calls[1] == calls[0] > 0


@pytest.mark.parametrize("spec", [OFF, "static:draft_model:2", ADAPTIVE])
def test_nobody_prefills_a_context_and_every_request_decodes(decoder: Decoder, spec: str) -> None:
    (runner,) = decoder.engine._host.runners.values()
    widest = 0

    def forward(segments: list[Segment], *others: object) -> object:
        nonlocal widest
        widest = max(widest, *(len(segment.tokens) for segment in segments))
        return original(segments, *others)  # type: ignore[arg-type]

    original, runner.forward = runner.forward, forward  # type: ignore[assignment, method-assign]
    try:
        turn = decoder.turn(Arm("arm", spec), steps=4)
    finally:
        runner.forward = original  # type: ignore[method-assign]
    assert turn.stats.prefill_tokens == 0
    assert turn.stats.decoded_requests == 4 * 6
    assert turn.tokens >= 4 * 6
    assert len(turn.step_seconds) == 4
    assert sum(turn.step_seconds) <= turn.seconds
    assert widest < 128  # the draft model's contexts are in place


def test_turns_leave_the_cache_as_they_found_it(decoder: Decoder) -> None:
    before = decoder.engine.pool.free_blocks
    decoder.turn(Arm("arm", "static:ngram:4"), steps=3)
    assert decoder.engine.pool.free_blocks == before
    assert not decoder.engine.has_work


def test_kinds_are_accepted_at_their_own_rates(decoder: Decoder) -> None:
    """Of 6 x 14 first draft tokens a turn; each share is within 4 standard deviations, 0.2."""
    for rate in KINDS:
        seeds = seeds_of((rate,), 6, 1)
        turn = decoder.turn(Arm("arm", "static:draft_model:1"), steps=14, seeds=seeds)
        assert turn.stats.drafters["draft_model"].acceptance_rate == pytest.approx(rate, abs=0.21)


def test_unused_ngrams_are_scored_at_the_kinds_rates_and_alike_where_steps_overlap(
    decoder: Decoder,
) -> None:
    """By row and context, how many of the tokens emitted there the n-gram drafter had foreseen."""
    scored: list[dict[tuple[int, int], tuple[int, int]]] = []
    for overlaps in (False, True):
        arm = Arm("arm", OFF)
        arm.controller = keeper = Keeping({"kind": "heuristic", "drafter": "draft_model"})
        decoder.engine._overlaps = overlaps
        for _ in range(3):
            decoder.turn(arm, steps=14, seeds=seeds_of((0.5, 0.9), 6, 0))
        found: dict[tuple[int, int], tuple[int, int]] = {}
        scored.append(found)
        for observation in keeper.observations:
            for row, request in enumerate(observation.view.requests):
                agreed = observation.shadow.get("ngram", [None] * 6)[row]
                if agreed is not None:
                    found[row, request.context_tokens] = observation.emitted[row], agreed
    decoder.engine._overlaps = False
    plain, ahead = scored
    shared = plain.keys() & ahead.keys()
    for place in shared:
        (given, agreed), (given_ahead, agreed_ahead) = plain[place], ahead[place]
        most = min(given, given_ahead)
        assert min(agreed, most) == min(agreed_ahead, most)
    assert len(shared) > 40
    hits = [[plain[place][1] > 0 for place in shared if place[0] % 2 == kind] for kind in (0, 1)]
    assert np.mean(hits[0]) < 0.35 < np.mean(hits[1])  # 0.1 and 0.6


class Breaks(Drafter):
    """Raises whenever it is asked."""

    name = "breaks"

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> list[Draft]:
        raise RuntimeError("out of luck")


def test_a_drafter_that_breaks_is_not_measured(bench: Bench) -> None:
    """The engine goes on without it, and what that takes is no figure of any drafter."""
    spec = DecoderSpec((), CoupledVerifier(), kv_tokens_for(2, 64, 32), 2, 32, (Breaks(),))
    decoder = bench.decoder(spec)
    decoder.prepare(2, 64)
    assert decoder.turn(Arm(OFF, OFF), steps=2).tokens == 4
    for arm in (Arm("breaks", "static:breaks:2"), Arm(OFF, OFF)):
        with pytest.raises(DrafterFault, match="breaks quarantined: RuntimeError: out of luck"):
            decoder.turn(arm, steps=2)
    assert not decoder.engine.has_work


def correctness_of(bench: Bench, name: str) -> Callable[[], CellFigures]:
    (cell,) = [cell for cell in correctness.cells(bench) if cell.name == name]
    return cell.measure


def test_texts_of_a_drafter_that_breaks_are_not_taken_for_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(replace(SMALL, text_tokens=4), torch.device("cpu"))
    monkeypatch.setattr(NgramDrafter, "propose", Breaks.propose)
    with pytest.raises(DrafterFault, match="ngram quarantined"):
        correctness_of(bench, "texts against generate")()


def let_capture(patch: pytest.MonkeyPatch, most: int) -> None:
    """Engines made from now on capture so many graphs; further ones fail."""
    use_fake_graphs(patch)
    capture = FakeRecorder.capture

    def capture_some(self: FakeRecorder, work: Callable[[], None]) -> Callable[[], None]:
        if self.captures == most:
            raise RuntimeError("operation not permitted")
        return capture(self, work)

    patch.setattr(FakeRecorder, "capture", capture_some)


def test_graphs_are_compared_with_eager_only_where_they_were_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(replace(SMALL, text_tokens=4), torch.device("cpu"))
    measure = correctness_of(bench, "graphs against eager")
    with pytest.raises(RuntimeError, match="off: 0 graphs"):
        measure()
    with monkeypatch.context() as patch:
        let_capture(patch, 3)
        with pytest.raises(RuntimeError, match=r": [1-9] graphs.*'capture failed': \d"):
            measure()
    let_capture(monkeypatch, 1000)
    found = measure()
    assert all(figure.is_met for figure in found.figures)
    graphs = found.facts["graphs"]
    assert isinstance(graphs, dict)
    assert all(used["captured"] > 0 for used in graphs.values())


@pytest.mark.parametrize("part", [magicdec.PART, promise.PART])
def test_a_cell_that_the_end_of_time_cuts_short_is_resumed(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is over once a turn was taken, then it stands still."""
    now, turn = [0.0], Decoder.turn

    def slow(self: Decoder, *args: object, **options: object) -> Turn:
        now[0] += 3600.0
        return turn(self, *args, **options)  # type: ignore[arg-type]

    def facts(*more: str) -> list[dict[str, object]]:
        assert run_made_up([part], monkeypatch, tmp_path, *more) == 0
        report = Report(tmp_path, "cpu-small-scale", command.PARTS)
        return [r["facts"] for r in report.results]  # type: ignore[misc]

    monkeypatch.setattr(command, "SMALL", replace(SMALL, blocks=4, steps=2))
    monkeypatch.setattr(command, "Budget", lambda seconds: Budget(seconds, lambda: now[0]))
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "turn", slow)
        (first,) = facts()
    assert (first["counted_blocks"], first["further_blocks"]) == (2, OUT_OF_TIME)
    resumed = facts("--resume")
    assert len(resumed) == len(part.cells(Bench(SMALL, torch.device("cpu"))))
    for each in resumed:
        assert each["counted_blocks"] == 4
        assert "further_blocks" not in each
    written = (tmp_path / "gpu-cpu-small-scale.json").read_text("utf-8")
    facts("--resume")
    assert (tmp_path / "gpu-cpu-small-scale.json").read_text("utf-8") == written


@pytest.mark.parametrize("module", [magicdec, promise, plain])
def test_forwards_that_lack_their_graph_are_counted_and_are_no_figures_of_the_promise(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures fail in the first cell; in the next its engine is used again, where nothing failed."""
    let_capture(monkeypatch, 0)
    bench = Bench(replace(SMALL, steps=2), torch.device("cpu"))
    bench.rates = Rates(1e10, 1e11)  # type: ignore[misc]
    cell = module.cells(bench)[0]
    if module is not plain:
        with pytest.raises(
            RuntimeError, match=r"0 graphs, forwards without: {'capture failed': \d"
        ):
            cell.measure()
        return
    once, twice = (cell.measure().facts["graphs"] for _ in range(2))
    assert isinstance(once, dict)
    assert isinstance(twice, dict)
    count = once["eager_in_cell"]["capture failed"]
    assert count == once["eager"]["capture failed"] > 0
    assert twice["eager_in_cell"]["capture failed"] == count
    assert twice["eager"]["capture failed"] == 2 * count
    bench.release()


def test_an_engine_is_kept_while_the_same_one_is_asked_for(bench: Bench) -> None:
    verifier = CoupledVerifier()
    spec = DecoderSpec((), verifier, 512, 2, 32)
    first = bench.decoder(spec)
    assert bench.decoder(DecoderSpec((), verifier, 512, 2, 32)) is first
    assert bench.decoder(replace(spec, kv_tokens=256)) is not first


def assert_facts_are_complete(part: int, facts: list[dict[str, object]]) -> None:
    assert facts
    assert all(each["is_compiling"] is is_compiling for each in facts)
    if part == 4:
        paged = "paged|sdpa"  # as `generate_batch` calls its own in transformers 5.17
        assert {each["attention"] for each in facts} in ({"sdpa"}, {"sdpa", paged})
    if part not in {0, 3}:
        assert all("graphs" in each for each in facts), "whether forwards had graphs"
    if part in {5, 6}:
        assert all(each["counted_blocks"] == SMALL.blocks for each in facts)
    if part == 6:
        for each in facts:
            spent = cast("dict[str, dict[str, float]]", each["milliseconds_of_a_step"])
            assert spent.keys() == cast("dict[str, object]", each["rates"]).keys()
            for ms in spent.values():
                parts = sum(ms.values()) - ms["all"] - ms["tokens"]
                before = ms[
                    "controller"
                ]  # a turn's first step counts what observing its warm-up took
                assert 0.0 < parts <= ms["all"] + before + 0.005  # and each is rounded
    if part == 7:
        assert all({OFF, ADAPTIVE} < set(each["host_microseconds"]) for each in facts)  # type: ignore[call-overload]


@pytest.mark.parametrize("number", [part.number for part in command.PARTS])
def test_every_part_runs_at_small_scale_and_is_resumed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = replace(SMALL, steps=2, text_tokens=6, plain=SMALL.plain[:1], transformers=((1, 64),))
    monkeypatch.setattr(command, "SMALL", replace(tiny, tokens_per_request=(4,)))
    if number != 1:  # measured once is enough
        monkeypatch.setattr(Bench, "rates", Rates(1e10, 1e11))
    arguments = ["--cpu", "--part", str(number), "--folder", str(tmp_path)]
    assert command.main(arguments) == 0
    path = tmp_path / "gpu-cpu-small-scale.json"
    written = path.read_text("utf-8")
    results = json.loads(written)["results"]
    assert {r["part"] for r in results} == {number}
    assert {r["scale"] for r in results} == {"cpu, small scale"}
    assert all("figures" in r or "skipped" in r for r in results)
    assert not any(failures(r) for r in results), "a rival that could not be measured here"
    assert_facts_are_complete(number, [r["facts"] for r in results if "facts" in r])
    if number == 0:
        figures = [f for r in results if "figures" in r for f in r["figures"]]
        met = [f["is_met"] for f in figures if "target" in f]
        assert met
        assert all(met)
    said = capsys.readouterr().out
    assert "Not measured on a GPU yet" in said
    assert command.main([*arguments, "--resume"]) == 0
    assert path.read_text("utf-8") == written
