"""Scores of live regret: choices see odd blocks only, and the arithmetic is what it says."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.regret.arms import (
    LENGTHS,
    fixed_specs,
    outclassed,
    rival_specs,
    schedule_spec,
)
from benchmarks.regret.grid import CELLS, WORKLOADS, Case, PhaseSpec, quick
from benchmarks.regret.scoring import (
    ADAPTIVE,
    LEARNED,
    OFF,
    best_on_odd,
    closed_gap,
    even,
    learned_to_adaptive,
    score_cell,
    score_workload,
    whole,
)
from sdcontrol import policies

RATE = st.floats(1.0, 1000.0)
ARMS = (OFF, "ngram:2", "draft_model:4", ADAPTIVE, LEARNED)


def blocks(count: int) -> st.SearchStrategy[list[float]]:
    return st.lists(RATE, min_size=count, max_size=count)


CELL_RATES = st.fixed_dictionaries({name: blocks(6) for name in ARMS})


# -- scores ----------------------------------------------------------------------------------------


@given(CELL_RATES, CELL_RATES)
def test_even_blocks_do_not_choose_the_best_fixed_setting(
    rates: dict[str, list[float]], other: dict[str, list[float]]
) -> None:
    """Whatever is measured in even blocks, the choice stays."""
    mixed = {
        name: [other[name][i] if i % 2 else rate for i, rate in enumerate(values)]
        for name, values in rates.items()
    }
    assert score_cell(mixed).best == score_cell(rates).best


@given(CELL_RATES, CELL_RATES)
def test_odd_blocks_do_not_score(
    rates: dict[str, list[float]], other: dict[str, list[float]]
) -> None:
    """With the choice made, odd blocks of the adaptive arm could be anything."""
    changed = dict(rates)
    changed[ADAPTIVE] = [
        rate if i % 2 else other[ADAPTIVE][i] for i, rate in enumerate(rates[ADAPTIVE])
    ]
    assert score_cell(changed) == score_cell(rates)


@given(CELL_RATES, blocks(6))
def test_a_machine_whose_speed_drifts_between_blocks_changes_no_score(
    rates: dict[str, list[float]], speeds: list[float]
) -> None:
    drifted = {
        name: [rate * speed for rate, speed in zip(values, speeds, strict=True)]
        for name, values in rates.items()
    }
    before, after = score_cell(rates), score_cell(drifted)
    assert after.to_off.median == pytest.approx(before.to_off.median)
    if after.best == before.best:  # ties may break either way
        assert after.to_best.median == pytest.approx(before.to_best.median)


def test_our_arms_are_no_fixed_settings() -> None:
    rates = {OFF: [1.0] * 4, "ngram:2": [2.0] * 4, ADAPTIVE: [3.0] * 4, LEARNED: [3.3] * 4}
    score = score_cell(rates)
    assert (score.best, score.to_best.median, score.to_off.median) == ("ngram:2", 1.5, 3.0)
    assert learned_to_adaptive(rates).median == pytest.approx(1.1)


@given(st.floats(1.05, 3.0), st.floats(-1.0, 1.5), blocks(5))
def test_a_gap_is_closed_by_the_share_that_was_put_in(
    oracle: float, share: float, fixed: list[float]
) -> None:
    ours = [rate * (1.0 + share * (oracle - 1.0)) for rate in fixed]
    gap = closed_gap(ours, fixed, [rate * oracle for rate in fixed])
    assert gap.share == pytest.approx(share, abs=1e-6)
    assert gap.low == pytest.approx(share, abs=1e-6)
    assert gap.high == pytest.approx(share, abs=1e-6)
    assert not gap.is_noise


@given(blocks(5))
def test_an_oracle_that_is_the_best_fixed_leaves_no_gap(fixed: list[float]) -> None:
    gap = closed_gap(fixed, fixed, fixed)
    assert gap.is_noise
    assert math.isfinite(gap.share)


@given(st.lists(st.tuples(RATE, RATE), min_size=1, max_size=6))
def test_the_rate_over_phases_is_all_work_over_all_time(phases: list[tuple[float, float]]) -> None:
    rates, work = [rate for rate, _ in phases], [tokens for _, tokens in phases]
    seconds = sum(tokens / rate for rate, tokens in phases)
    assert whole(rates, work) == pytest.approx(sum(work) / seconds)
    assert min(rates) <= whole(rates, work) * (1 + 1e-9)
    assert whole(rates, work) <= max(rates) * (1 + 1e-9)


def two_phases(adaptive: tuple[float, float]) -> dict[str, list[list[float]]]:
    """Off is best in the second phase, "a:2" in the first; all blocks alike."""
    of_arm = {OFF: (1.0, 2.0), "a:2": (4.0, 1.0), "rival": (1.0, 1.0)}
    of_arm |= {ADAPTIVE: adaptive, LEARNED: (adaptive[0] / 2, adaptive[1] / 2)}
    return {name: [list(rates)] * 4 for name, rates in of_arm.items()}


def test_the_oracle_of_a_workload_is_the_best_fixed_setting_of_each_phase() -> None:
    score = score_workload(two_phases((4.0, 2.0)), [OFF, "a:2"], ["rival"], [1.0, 1.0])
    assert (score.best, score.oracle) == ("a:2", ("a:2", OFF))
    assert score.gap.share == pytest.approx(1.0)
    assert score.gap.oracle.median == pytest.approx((1 / 4 + 1) / (1 / 4 + 1 / 2))
    assert score.to_rival.median == pytest.approx(2 / (1 / 4 + 1 / 2))
    assert score.learned_to_adaptive.median == pytest.approx(0.5)


@given(st.fixed_dictionaries({n: st.lists(blocks(2), min_size=4, max_size=4) for n in ARMS}))
def test_even_repetitions_choose_neither_oracle_nor_rival(
    rates: dict[str, list[list[float]]],
) -> None:
    spoilt = {
        name: [[1.0, 1.0] if i % 2 else block for i, block in enumerate(values)]
        for name, values in rates.items()
    }
    fixed, rivals, work = [OFF, "ngram:2"], ["draft_model:4"], [3.0, 5.0]
    before = score_workload(rates, fixed, rivals, work)
    after = score_workload(spoilt, fixed, rivals, work)
    assert (before.best, before.oracle) == (after.best, after.oracle)
    assert even(before.oracle) == even(after.oracle)


def test_the_best_is_the_best_against_off_in_the_same_block() -> None:
    """Block 3 was ten times as fast for all: its rates alone would choose "b"."""
    rates = {OFF: [1.0, 1, 10, 1, 1], "a": [3.0, 1, 21, 1, 3], "b": [2.0, 1, 25, 1, 2]}
    assert best_on_odd(rates, ["a", "b"]) == "a"


# -- arms ------------------------------------------------------------------------------------------


def case_of(*phases: PhaseSpec, is_workload: bool = True, pair: str = "large") -> Case:
    return Case("case", pair, "float32", 8, 2, phases, is_workload=is_workload)


PHASES = (PhaseSpec("one", 1, 256, "copy"), PhaseSpec("many", 8, 256, "copy"))


def test_the_grid_has_every_value_several_times_and_names_once() -> None:
    assert len(CELLS) == 12
    specs = [case.phases[0] for case in CELLS]
    for values in zip(*[(s.batch_size, s.context_tokens, s.kind) for s in specs], strict=True):
        assert min(values.count(value) for value in values) >= 3
    assert len({case.name for case in (*CELLS, *WORKLOADS)}) == 15


def test_every_arm_of_every_case_can_be_built() -> None:
    for case in (*CELLS, *WORKLOADS, *map(quick, CELLS)):
        specs = fixed_specs(case)
        assert len(specs) == 1 + sum(map(len, LENGTHS.values()))
        for spec in specs.values():
            policies.build(spec)


def test_sparse_kv_is_no_arm_where_no_context_exceeds_its_budget() -> None:
    short = case_of(PhaseSpec("short", 1, 128, "copy"))
    assert not [name for name in fixed_specs(short) if name.startswith("sparse_kv")]


def test_a_single_block_drops_what_is_far_behind_in_every_phase() -> None:
    rates = {OFF: [[0.1, 0.1]], "a": [[1.0, 0.1]], "b": [[0.1, 1.0]], "c": [[0.75, 0.2]]}
    assert outclassed(rates, case_of(*PHASES), [*rates], []) == {"c": pytest.approx(0.75)}
    cell = case_of(*PHASES, is_workload=False)
    assert outclassed({n: [b[0][:1]] for n, b in rates.items()}, cell, [*rates], []) == {
        "b": pytest.approx(0.1)
    }


def test_where_no_draft_pays_the_best_setting_that_drafts_stays_for_the_rivals() -> None:
    rates = {OFF: [[1.0, 1.0]], "a:2": [[0.5, 0.6]], "b:2": [[0.4, 0.7]]}
    assert outclassed(rates, case_of(*PHASES), [*rates], []) == {"a:2": pytest.approx(0.6)}


def test_arms_behind_in_every_phase_and_over_all_of_them_go_after_odd_blocks() -> None:
    """Even blocks, here the second, change nothing; neither does a machine that was twice as fast."""
    rates = {
        OFF: [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]],
        "a:2": [[2.0, 1.0], [0.1, 0.1], [4.0, 2.0]],
        "a:4": [[1.2, 1.0], [9.0, 9.0], [2.4, 2.0]],
        "b:2": [[1.0, 3.0], [0.1, 0.1], [2.0, 6.0]],
        "first": [[2.0, 2.0], [0.1, 0.1], [4.0, 4.0]],
        "second": [[9.0, 1.0], [9.0, 9.0], [18.0, 2.0]],
    }
    found = outclassed(rates, case_of(*PHASES), [OFF, "a:2", "a:4", "b:2"], ["first", "second"])
    second = whole([9.0, 1.0], case_of(*PHASES).work) / 2.0
    assert found == {"a:4": pytest.approx(0.6), "second": pytest.approx(second)}


def test_rivals_get_the_drafter_that_did_best_and_a_table_measured_on_odd_blocks() -> None:
    rates = {
        OFF: [[1.0, 9.0], [1.0, 1.0], [1.0, 9.0]],
        "a:2": [[2.0, 5.0], [9.0, 99.0], [2.0, 5.0]],
        "a:4": [[3.0, 4.0], [0.1, 0.1], [3.0, 4.0]],
        "b:2": [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]],
    }
    specs = rival_specs(rates, case_of(*PHASES), [*rates])
    assert {spec["drafter"] for spec in specs.values() if isinstance(spec, dict)} == {"a"}
    schedule = schedule_spec(rates, case_of(*PHASES), "a")
    assert schedule == specs["concurrency_schedule"]
    assert schedule["schedule"] == {1: 4, 8: 0}  # type: ignore[index]
    for spec in specs.values():
        policies.build(spec)
