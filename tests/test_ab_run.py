"""Running a comparison: order, warm-up, failures, interruption, resumption, texts."""

import json
import math
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdcontrol.errors import ConfigError, UnsupportedModel
from sdcontrol.experiments.judge import decide, fewest_blocks
from sdcontrol.experiments.machine import PeakMemory
from sdcontrol.experiments.records import BlockRecord, Place, RunRecord
from sdcontrol.experiments.report.numbers import block_ratios
from sdcontrol.experiments.results import Results
from sdcontrol.experiments.run import run_experiment
from sdcontrol.experiments.runner import Outputs
from sdcontrol.experiments.schedule import is_warmup, turns
from sdcontrol.experiments.store import RunFolder
from tests.ab_support import PLACE, NoisyRunner, experiment, run_record

ARMS = [{"name": name, "policy": "off"} for name in ("a", "b", "c")]


class Killed(BaseException):
    """The process is gone: nothing handles it."""


class DyingRunner(NoisyRunner):
    """Is killed, or interrupted, at its n-th turn."""

    def __init__(self, at: int, error: type[BaseException], **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._at, self._error = at, error

    def run_block(self, arm: str, block: int, *, start_seconds: float) -> tuple[RunRecord, Outputs]:
        if len(self.calls) == self._at:
            raise self._error
        return super().run_block(arm, block, start_seconds=start_seconds)


def order_of(blocks: list[BlockRecord]) -> list[tuple[str, bool]]:
    return [(run.arm, run.is_repeat) for block in blocks for run in block.runs]


def stable(results: Results) -> Results:
    """Without what only says when."""
    return results.model_copy(update={"created": ""})


fresh = map("run-{}".format, count())


def folder(root: Path, plan: object, **options: bool) -> RunFolder:
    return RunFolder(root, plan, **options)  # type: ignore[arg-type]


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(0, 40), st.integers(0, 5))
def test_a_run_killed_anywhere_and_resumed_is_the_run_that_was_not(
    tmp_path: Path, at: int, seed: int
) -> None:
    plan = experiment(
        arms=ARMS, blocks=6, seed=seed, repeat_every=2, warmup={"min_blocks": 1, "max_blocks": 2}
    )
    factors = {"b": 0.8}
    whole = folder(tmp_path / next(fresh), plan)
    expected = run_experiment(plan, NoisyRunner(factors=factors), whole)
    path = tmp_path / next(fresh)
    try:
        run_experiment(plan, DyingRunner(at, Killed, factors=factors), folder(path, plan))
    except Killed:
        finished = folder(path, plan, resume=True).blocks()
        assert finished == whole.blocks()[: len(finished)]
    again = NoisyRunner(factors=factors)
    results = run_experiment(plan, again, folder(path, plan, resume=True))
    assert stable(results) == stable(expected)
    assert order_of(folder(path, plan, resume=True).blocks()) == order_of(whole.blocks())


def test_ctrl_c_leaves_a_valid_partial_result(tmp_path: Path) -> None:
    plan = experiment(blocks=6)
    where = folder(tmp_path / "run", plan)
    results = run_experiment(plan, DyingRunner(7, KeyboardInterrupt), where)
    assert not results.is_complete
    assert results.stopping.num_blocks == 3
    assert results.stopping.reason.startswith("interrupted")
    assert stable(Results.load(where.results_path)) == stable(results)


def test_an_interruption_before_the_first_block_still_gives_results(tmp_path: Path) -> None:
    plan = experiment(blocks=6)
    results = run_experiment(plan, DyingRunner(0, KeyboardInterrupt), folder(tmp_path / "r", plan))
    assert results.verdict == "Nothing was compared yet."
    assert not results.is_complete


@given(st.integers(0, 1000), st.integers(0, 4))
def test_every_block_runs_every_arm_once_and_the_baseline_again_where_planned(
    seed: int, every: int
) -> None:
    plan = experiment(arms=ARMS, seed=seed, repeat_every=every)
    blocks: list[BlockRecord] = []
    for number in range(6):
        order = turns(plan, blocks)
        repeats = [name for name, is_repeat in order if is_repeat]
        assert sorted(name for name, is_repeat in order if not is_repeat) == ["a", "b", "c"]
        assert repeats == (["a"] if every and number % every == 0 else [])
        assert not repeats or order.index(("a", True)) > order.index(("a", False))
        runs = tuple(run_record(name, 1.0) for name, _ in order)
        blocks.append(BlockRecord(block=number, is_warmup=False, runs=runs))


def test_orders_differ_between_blocks_and_seeds() -> None:
    def orders(seed: int) -> Iterator[tuple[object, ...]]:
        plan, blocks = experiment(arms=ARMS, seed=seed), []
        for number in range(20):
            yield tuple(turns(plan, blocks))
            blocks.append(BlockRecord(block=number, is_warmup=False, runs=()))

    assert len(set(orders(0))) == 6  # all orders of three arms come up
    assert list(orders(0)) != list(orders(1))


def test_warm_up_ends_with_the_first_steady_block() -> None:
    plan = experiment(warmup={"min_blocks": 1, "max_blocks": 4, "tolerance": 0.1})
    blocks: list[BlockRecord] = []
    for second in (1.0, 0.5, 0.96, 0.5):
        runs = (run_record("off", 1.0), run_record("off", second), run_record("on", 1.0))
        dropped = is_warmup(plan, blocks, runs)
        blocks.append(BlockRecord(block=len(blocks), is_warmup=dropped, runs=runs))
    assert [block.is_warmup for block in blocks] == [True, True, False, False]


def test_warm_up_is_never_longer_than_allowed(tmp_path: Path) -> None:
    plan = experiment(blocks=3, warmup={"min_blocks": 1, "max_blocks": 3, "tolerance": 1e-9})
    results = run_experiment(plan, NoisyRunner(), folder(tmp_path / "run", plan))
    assert (results.stopping.num_warmup_blocks, results.stopping.num_blocks) == (3, 3)


class FailingRunner(NoisyRunner):
    """One arm raises in block 1."""

    def run_block(self, arm: str, block: int, *, start_seconds: float) -> tuple[RunRecord, Outputs]:
        if (arm, block) == ("b", 1):
            raise UnsupportedModel("no such layer")
        return super().run_block(arm, block, start_seconds=start_seconds)


def test_a_failed_arm_does_not_lose_the_others(tmp_path: Path) -> None:
    plan = experiment(arms=ARMS, blocks=8)
    runner = FailingRunner(factors={"c": 0.5})
    results = run_experiment(plan, runner, folder(tmp_path / "run", plan))
    by_name = {arm.name: arm for arm in results.arms}
    assert by_name["b"].failed == "block 1: no such layer"
    assert len(by_name["c"].blocks) == 8
    verdicts = {found.arm: found.verdict for found in results.comparisons}
    assert verdicts == {"b": "no difference shown", "c": "faster"}
    assert "b failed" in results.verdict
    assert runner.calls.count(("b", 2)) == 0


def test_a_large_difference_ends_the_run_at_a_look(tmp_path: Path) -> None:
    plan = experiment(blocks=40, stopping={"looks": 4})
    runner = NoisyRunner(noise=0.01, factors={"on": 0.5})
    results = run_experiment(plan, runner, folder(tmp_path / "run", plan))
    assert results.is_complete
    assert results.stopping.num_blocks in (10, 20)
    assert results.comparisons[0].verdict == "faster"
    assert results.comparisons[0].ratio.value == pytest.approx(2.0, rel=0.02)


def test_texts_that_differ_are_counted_and_the_first_place_is_named(tmp_path: Path) -> None:
    class Babbler(NoisyRunner):
        def run_block(
            self, arm: str, block: int, *, start_seconds: float
        ) -> tuple[RunRecord, Outputs]:
            record, _ = super().run_block(arm, block, start_seconds=start_seconds)
            texts = {"x": (1, 2, 3), "y": (4, 5)}
            return record, texts if arm == "off" else {"x": (1, 2, 3, 9), "y": (4, 6)}

    plan = experiment(blocks=2)
    results = run_experiment(plan, Babbler(), folder(tmp_path / "run", plan))
    assert (results.texts.num_compared, results.texts.num_differing) == (4, 4)
    assert [(d.request, d.position) for d in results.texts.first_differences][:2] == [
        ("x", 3),
        ("y", 1),
    ]
    assert "4 of 4 texts differ" in results.verdict


def test_the_baselines_second_run_measures_the_machines_noise(tmp_path: Path) -> None:
    plan = experiment(blocks=30, repeat_every=1, stopping={"early": False})
    results = run_experiment(plan, NoisyRunner(noise=0.02), folder(tmp_path / "run", plan))
    assert results.drift is not None
    assert len(results.drift.per_block) == 30
    assert results.drift.noise == pytest.approx(0.02 * 2**0.5, rel=0.5)
    assert results.drift.ratio.low < 1 < results.drift.ratio.high
    assert results.drift.smallest_ratio is not None
    assert 0.9 < results.drift.smallest_ratio < 1


def test_a_folder_with_another_run_is_not_touched(tmp_path: Path) -> None:
    plan, other = experiment(blocks=2), experiment(blocks=3)
    run_experiment(plan, NoisyRunner(), folder(tmp_path / "run", plan))
    before = sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))
    with pytest.raises(ConfigError, match="--resume"):
        folder(tmp_path / "run", plan)
    with pytest.raises(ConfigError, match="another blocks"):
        folder(tmp_path / "run", other, resume=True)
    assert before == sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))
    fresh_one = folder(tmp_path / "run", other, overwrite=True)
    assert len(fresh_one.blocks()) == 2  # until it begins
    fresh_one.begin()
    assert fresh_one.blocks() == []


@pytest.mark.parametrize("again", [{}, {"resume": True}, {"overwrite": True}])
def test_two_comparisons_never_share_a_folder(tmp_path: Path, again: dict[str, bool]) -> None:
    """The second is refused, whatever it asks for, and the first goes on as if nothing had been."""
    plan = experiment(blocks=2)
    rival = folder(tmp_path / "run", plan) if not again else None

    class Joined(NoisyRunner):
        def run_block(
            self, arm: str, block: int, *, start_seconds: float
        ) -> tuple[RunRecord, Outputs]:
            other = rival or folder(tmp_path / "run", plan, **again)
            idle = NoisyRunner()
            with pytest.raises(ConfigError, match="is running here; wait"):
                run_experiment(plan, idle, other)
            assert idle.calls == []
            return super().run_block(arm, block, start_seconds=start_seconds)

    beside = run_experiment(plan, Joined(), folder(tmp_path / "run", plan))
    alone = run_experiment(plan, NoisyRunner(), folder(tmp_path / "alone", plan))
    assert beside.is_complete
    assert stable(beside) == stable(alone)
    run_experiment(plan, NoisyRunner(), folder(tmp_path / "run", plan, resume=True))  # free again


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    plan = experiment(blocks=3)
    run_experiment(plan, NoisyRunner(), folder(tmp_path / "run", plan))
    (tmp_path / "run" / "blocks" / "00001.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"00001\.json is damaged"):
        folder(tmp_path / "run", plan, resume=True).blocks()


@given(st.randoms())
def test_a_decision_depends_on_counted_blocks_alone(random: random.Random) -> None:
    plan = experiment(blocks=5)
    blocks = [
        BlockRecord(block=n, is_warmup=random.random() < 0.5, runs=(run_record("off", 1.0),))
        for n in range(8)
    ]
    kept = sum(not block.is_warmup for block in blocks)
    assert decide(plan, blocks).is_done == (kept >= 5)


def test_one_block_has_intervals_of_no_width_and_says_so(tmp_path: Path) -> None:
    plan = experiment(blocks=1, repeat_every=1)
    results = run_experiment(plan, NoisyRunner(), folder(tmp_path / "run", plan))
    ratio = results.comparisons[0].ratio
    assert ratio.low == ratio.value == ratio.high
    assert results.drift is not None
    assert results.drift.smallest_ratio is None
    assert any(note.startswith("One block") for note in results.notes)


def test_results_are_json_that_any_reader_takes(tmp_path: Path) -> None:
    plan = experiment(blocks=2)
    where = folder(tmp_path / "run", plan)
    run_experiment(plan, NoisyRunner(), where)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads(where.results_path.read_text("utf-8"), parse_constant=refuse)


class _Watched:
    def __init__(self) -> None:
        self.shares: list[float] = []
        self.left: list[float] = []

    def turn(self, label: str, *, share: float, left_seconds: float) -> None:
        self.shares.append(share)
        self.left.append(left_seconds)


def test_progress_grows_and_the_time_left_is_that_of_the_blocks_left(tmp_path: Path) -> None:
    class Slow(NoisyRunner):
        now = 100.0

        def run_block(
            self, arm: str, block: int, *, start_seconds: float
        ) -> tuple[RunRecord, Outputs]:
            self.now += 3.0
            return super().run_block(arm, block, start_seconds=start_seconds)

    plan, watched, runner = experiment(blocks=8, stopping={"looks": 1}), _Watched(), Slow()
    run_experiment(plan, runner, folder(tmp_path / "run", plan), watched, clock=lambda: runner.now)
    assert watched.shares == sorted(watched.shares)
    assert 0 <= watched.shares[0] <= watched.shares[-1] < 1
    assert math.isnan(watched.left[0])
    assert watched.left[8] == pytest.approx(4 * 2 * 3.0)  # after 4 blocks of 2 turns


def test_too_few_planned_blocks_are_said_to_be_too_few(tmp_path: Path) -> None:
    few, enough = experiment(blocks=5), experiment(blocks=8, stopping={"looks": 1})
    runner = NoisyRunner(factors={"on": 0.1})
    assert fewest_blocks(few) > 5
    assert fewest_blocks(enough) <= 8
    results = run_experiment(few, runner, folder(tmp_path / "run", few))
    assert results.comparisons[0].verdict == "no difference shown"
    assert any("cannot show any difference" in note for note in results.notes)


def test_a_block_in_which_an_arm_kept_no_limit_counts_against_it(tmp_path: Path) -> None:
    """A block left out would flatter whoever failed in it: half a request is what it counts as."""

    class Missing(NoisyRunner):
        def run_block(
            self, arm: str, block: int, *, start_seconds: float
        ) -> tuple[RunRecord, Outputs]:
            record, texts = super().run_block(arm, block, start_seconds=start_seconds)
            kept = 4 if arm == "off" else 4 * (block % 4 == 0)
            metrics = {**record.metrics, "slo_requests_per_second": kept / record.seconds}
            return record.model_copy(update={"metrics": metrics}), texts

    plan = experiment(blocks=12, metrics=["slo_requests_per_second"], stopping={"looks": 1})
    results = run_experiment(plan, Missing(noise=0.01), folder(tmp_path / "run", plan))
    (found,) = results.comparisons
    assert (found.verdict, found.num_blocks) == ("slower", 12)
    assert found.ratio.value < 0.25
    drawn = block_ratios(results, found.metric)[found.metric][1]
    assert [ratio for _, ratio in drawn] == pytest.approx(
        [kept / 4 for kept in (4, 0.5, 0.5, 0.5) * 3], rel=0.1
    )


def test_a_run_whose_baseline_failed_compares_nothing_more_and_ends(tmp_path: Path) -> None:
    class Broken(NoisyRunner):
        def run_block(
            self, arm: str, block: int, *, start_seconds: float
        ) -> tuple[RunRecord, Outputs]:
            if arm == "a" and block == 2:
                raise UnsupportedModel("no such layer")
            return super().run_block(arm, block, start_seconds=start_seconds)

    plan = experiment(arms=ARMS, blocks=12)
    results = run_experiment(plan, Broken(), folder(tmp_path / "run", plan))
    assert (results.stopping.num_blocks, results.is_complete) == (3, True)
    assert results.stopping.reason == "too few arms are left to compare"
    paired = experiment(arms=ARMS, blocks=12, pairs=[["c", "b"]])
    results = run_experiment(paired, Broken(), folder(tmp_path / "pair", paired))
    assert results.stopping.num_blocks == 12


def test_an_arm_that_failed_does_not_keep_a_run_from_ending_early(tmp_path: Path) -> None:
    plan = experiment(arms=ARMS, blocks=40, stopping={"looks": 4})
    runner = FailingRunner(noise=0.01, factors={"c": 0.5})
    results = run_experiment(plan, runner, folder(tmp_path / "run", plan))
    assert results.stopping.num_blocks in (10, 20)
    assert "every comparison that is left" in results.stopping.reason


def test_the_fastest_of_the_other_settings_is_claimed_only_where_all_were_compared(
    tmp_path: Path,
) -> None:
    arms = [
        {"name": "off", "policy": "off"},
        {"name": "slow", "policy": "static:ngram:2"},
        {"name": "fast", "policy": "static:ngram:8"},
        {"name": "on", "policy": "goodput"},
    ]
    runner = NoisyRunner(factors={"slow": 0.9, "fast": 0.4, "on": 0.5})
    some = experiment(name="some", arms=arms, blocks=3, pairs=[["on", "slow"]])
    every = experiment(name="all", arms=arms, blocks=3, pairs=[["on", "slow"], ["on", "fast"]])
    said = [
        run_experiment(plan, runner, folder(tmp_path / plan.name, plan)).verdict
        for plan in (some, every)
    ]
    assert "that of slow, the fastest of those that it was compared with." in said[0]
    assert "that of fast, the fastest of the other settings." in said[1]


def test_a_run_of_one_arm_compares_nothing_and_says_so(tmp_path: Path) -> None:
    plan = experiment(arms=ARMS[:1], blocks=2, repeat_every=1)
    results = run_experiment(plan, NoisyRunner(), folder(tmp_path / "run", plan))
    assert results.is_complete
    assert results.verdict == "There is one arm, so nothing is compared."
    assert results.notes == ()  # nothing is to be shown, so no number of blocks is too small


def test_peak_memory_is_that_of_the_device_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU that decodes nothing, of the process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = PeakMemory(torch.device("cpu")).metric()
    assert found.get("peak_memory_bytes", 1e9) > 1e7
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 + device.index)
    assert PeakMemory(torch.device("cuda:2")).metric() == {"peak_memory_bytes": 7.0}


@given(st.integers(1, 24), st.integers(1, 10), st.sampled_from([0.01, 0.05, 0.1]))
def test_as_many_blocks_as_are_asked_for_are_enough(blocks: int, looks: int, alpha: float) -> None:
    """Looks move with the number of blocks, and so does what the last one leaves of alpha."""
    rule = {"looks": looks, "alpha": alpha}
    wanted = max(fewest_blocks(experiment(blocks=blocks, stopping=rule)), blocks)
    assert fewest_blocks(experiment(blocks=wanted, stopping=rule)) <= wanted


@pytest.mark.parametrize("at", range(7))
def test_overwriting_that_is_cut_short_leaves_a_run_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Never blocks without their settings, nor the place of a run that is gone."""
    plan = experiment(blocks=3, stopping={"early": False})
    run_experiment(plan, NoisyRunner(), folder(tmp_path, plan))
    blocks = folder(tmp_path, plan, resume=True).blocks()
    unlink, calls = Path.unlink, count()

    def dying(path: Path, missing_ok: bool = False) -> None:
        if next(calls) == at:
            raise Killed
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", dying)
    with pytest.raises(Killed):
        folder(tmp_path, plan, overwrite=True).begin()
    monkeypatch.undo()
    left = folder(tmp_path, plan, resume=True)
    assert (tmp_path / "config.yaml").exists()
    assert left.blocks() == blocks[: len(left.blocks())]
    assert len(left.blocks()) == max(3 - at, 0)


def test_a_run_that_went_on_elsewhere_says_so(tmp_path: Path) -> None:
    """Else numbers of two machines would be shown as the first one's."""
    plan = experiment(blocks=4, stopping={"early": False})

    def place(threads: int, torch_version: str) -> Place:
        setting = PLACE.setting.model_copy(
            update={"threads": threads, "versions": {"torch": torch_version}}
        )
        return Place(is_simulated=False, setting=setting)

    def go_on(where: Place, turns: int) -> list[str]:
        """So many turns; the first two are to warm up again."""
        runner = DyingRunner(turns, KeyboardInterrupt, place=where)
        results = run_experiment(plan, runner, folder(tmp_path, plan, resume=True))
        assert results.setting == place(1, "2.11").setting
        return [note for note in results.notes if "interruption" in note]

    here, elsewhere = place(1, "2.11"), place(8, "2.12")
    said = [
        "After an interruption it went on with threads 8 in place of 1, torch 2.12 in place of 2.11."
    ]
    assert go_on(here, 2) == []
    assert go_on(elsewhere, 3) == []  # in which nothing was finished
    assert go_on(elsewhere, 4) == said
    assert go_on(here, 99) == said
    assert go_on(place(2, "2.12"), 99) == said  # when there was nothing left to do


def test_a_comparison_without_a_single_pair_keeps_a_run_going(tmp_path: Path) -> None:
    """Limits that neither arm ever kept: whoever asked for that metric has no answer yet."""

    class Unkept(NoisyRunner):
        def run_block(
            self, arm: str, block: int, *, start_seconds: float
        ) -> tuple[RunRecord, Outputs]:
            record, texts = super().run_block(arm, block, start_seconds=start_seconds)
            kept = float(block >= 20)
            metrics = {**record.metrics, "slo_requests_per_second": kept / record.seconds}
            return record.model_copy(update={"metrics": metrics}), texts

    both = ["tokens_per_second", "slo_requests_per_second"]
    plan = experiment(blocks=40, stopping={"looks": 4}, metrics=both)
    runner = Unkept(noise=0.01, factors={"on": 0.5})
    results = run_experiment(plan, runner, folder(tmp_path / "run", plan))
    assert {found.metric for found in results.comparisons} == {*both}
    assert results.stopping.num_blocks == 30


def test_only_what_learns_is_said_to_learn(tmp_path: Path) -> None:
    names = ("off", "static:ngram:4", "concurrency_schedule", "roofline", "ema_steps", "goodput")
    arms = [{"name": name.partition(":")[0], "policy": name} for name in names]
    plan = experiment(arms=arms, blocks=2)
    results = run_experiment(plan, NoisyRunner(), folder(tmp_path, plan))
    assert [arm.name for arm in results.arms if arm.is_adaptive] == [
        "roofline",
        "ema_steps",
        "goodput",
    ]
    assert any(note.startswith("roofline, ema_steps, goodput: ") for note in results.notes)


def test_the_machines_noise_is_that_of_the_metric_that_is_compared(tmp_path: Path) -> None:
    """Under a load every run has the same output per second, however latencies vary."""

    class Loaded(NoisyRunner):
        def run_block(
            self, arm: str, block: int, *, start_seconds: float
        ) -> tuple[RunRecord, Outputs]:
            record, texts = super().run_block(arm, block, start_seconds=start_seconds)
            metrics = {"tokens_per_second": 100.0, "e2e_seconds_p50": record.seconds}
            return record.model_copy(update={"metrics": metrics}), texts

    metrics = ["e2e_seconds_p50", "tokens_per_second"]
    plan = experiment(blocks=30, repeat_every=1, stopping={"early": False}, metrics=metrics)
    drift = run_experiment(plan, Loaded(noise=0.05), folder(tmp_path, plan)).drift
    assert drift is not None
    assert drift.metric == "e2e_seconds_p50"
    assert drift.noise == pytest.approx(0.05 * 2**0.5, rel=0.5)
    assert drift.smallest_ratio is not None
    assert 1.01 < drift.smallest_ratio < 1.2  # longer, which is worse
