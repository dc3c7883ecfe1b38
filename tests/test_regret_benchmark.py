"""The live-regret benchmark: all arms find the same contexts, and what they are told is true."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import closed_batches, late_draft_model, learned_live
from benchmarks.regret import among_fixed as among
from benchmarks.regret.__main__ import main, measure
from benchmarks.regret.arms import fixed_specs
from benchmarks.regret.grid import CELLS, CLOSED, KINDS, LATE, RATES, WORKLOADS, PhaseSpec, quick
from benchmarks.regret.pairs import Prompt, prompts_of, seed_of
from benchmarks.regret.plot import svg
from benchmarks.regret.results import misses
from benchmarks.regret.rig import Arm, Rig, Run
from benchmarks.regret.scoring import ADAPTIVE, OFF
from benchmarks.regret.table import markdown
from benchmarks.regret.training import trained_model
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Observation, Plan


@given(st.sampled_from(sorted(RATES)), st.integers(0, 99), st.integers(0, 999))
def test_a_seed_tells_its_kind(kind: str, block: int, index: int) -> None:
    assert seed_of(kind, block, index) % len(RATES) == list(RATES).index(kind)


def test_prompts_have_one_token_more_than_the_context() -> None:
    for is_synthetic in (True, False):
        phase = PhaseSpec("mixed", 5, 256, "mixed")
        prompts = prompts_of(phase, is_synthetic=is_synthetic, seed=0)
        assert [len(prompt.tokens) for prompt in prompts] == [257] * 5
        assert [prompt.kind for prompt in prompts] == [*KINDS["mixed"], "prose"]
        assert len({prompt.tokens for prompt in prompts}) == 5


def test_the_learned_policy_is_trained_on_other_prompts_than_it_is_judged_on() -> None:
    enough = 48  # tokens, so that `static:ngram` alone drafts in more steps than a price needs
    rig = Rig(replace(quick(CELLS[0]), phases=CELLS[0].phases[:2], tokens=enough))
    model = trained_model(rig)
    rig.close()
    scored = {prompt.tokens for phase in rig.phases for prompt in phase}
    assert not scored & {prompt.tokens for phase in rig.training for prompt in phase}
    assert "ngram" in model.cost.rounds


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(replace(quick(WORKLOADS[0]), tokens=24), is_tiny=True)


def test_no_context_is_prefilled_while_time_is_taken(rig: Rig) -> None:
    """Of a request that begins again, the last token of its prompt alone."""
    for block in (1, 2):
        for spec in (OFF, "static:draft_model:2", ADAPTIVE):
            run = rig.run(Arm("arm", spec), 1, block)
            assert run.stats.prefill_tokens <= 2 * len(rig.phases[1])
            assert len(run.outputs) == len(rig.phases[1])
            assert run.tokens >= rig.case.tokens * len(rig.phases[1])
            assert run.seconds > 0


def test_arms_leave_the_cache_as_they_found_it(rig: Rig) -> None:
    before = rig.engine.pool.free_blocks
    cached = rig.run(Arm("arm", "static:ngram:4"), 1, 3).outputs
    assert rig.engine.pool.free_blocks == before
    assert rig.run(Arm("arm", "static:ngram:4"), 1, 3).outputs == cached


def test_a_late_draft_model_computes_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every request that begins, whoever had the same one before; the target computes none."""
    rig, lags = Rig(replace(quick(LATE[0]), tokens=12), is_tiny=True), dict[str, list[int]]()

    def note(observation: Observation) -> None:
        for request in observation.view.requests:
            if (hint := request.hints.get("draft_model")) is not None:  # with a token to go, none
                lags.setdefault(request.id, []).append(hint.catch_up_tokens)

    monkeypatch.setattr(rig.engine, "_learn", note)
    run = rig.run(Arm("arm", "static:draft_model:1"), 0, 1)
    rig.close()
    assert run.stats.prefill_tokens <= 12  # last tokens of prompts
    assert len(lags) >= 12  # four generations of four, less what is under way
    for first, *later in lags.values():
        assert first == 256
        assert all(lag <= 2 for lag in later)


def test_adaptive_arms_are_scored_beside_every_fixed_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(among, "Rig", partial(Rig, is_tiny=True))
    result: dict[str, Any] = late_draft_model.live(quick(LATE[0]))
    fixed = set(fixed_specs(quick(LATE[0])))
    assert result["best_fixed"] in fixed
    assert {"off", "goodput", "each for itself"} <= set(result["rates"])
    assert set(result["rates"]) <= fixed | {"goodput", "each for itself"}
    assert all(len(row) == 2 for row in result["rates"].values())
    even = {name: row[1] for name, row in result["rates"].items()}
    ratio = result["goodput_to_off"]["median"]
    assert ratio == pytest.approx(even["goodput"] / even["off"], rel=0.01)


def test_a_first_batch_is_decoded_by_a_controller_that_saw_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps_before: dict[str, list[int]] = {}
    steps_told: dict[str, list[int]] = {}
    steps_seen: dict[str, list[int]] = {}

    class Noting(Rig):
        def run(self, arm: Arm, *args: Any, **options: Any) -> Run:
            steps_before.setdefault(arm.name, []).append(arm.stats.steps)
            steps_told.setdefault(arm.name, []).append(arm.controller.num_observed)
            run = super().run(arm, *args, **options)
            steps_seen.setdefault(arm.name, []).append(len(run.observations))
            return run

    monkeypatch.setattr(among, "Rig", partial(Noting, is_tiny=True))
    result: dict[str, Any] = closed_batches.live(replace(quick(CLOSED[0]), tokens=8))
    first_batch, warm_start = "goodput, first batch", "goodput, first batch, warm start"
    assert steps_before[first_batch] == steps_told[first_batch] == [0, 0, 0]
    assert steps_before[warm_start] == [0, 0, 0]
    assert steps_told[warm_start] == [0, *steps_seen[first_batch][:2]]
    assert min(steps_seen[first_batch]) > 0
    warm, first, second = steps_before[ADAPTIVE]
    assert warm == 0 < first < second
    even = {name: row[1] for name, row in result["rates"].items()}
    for key, name in {"first_batch": first_batch, "warm_start": warm_start}.items():
        ratio = result[f"{key}_to_best_fixed"]["median"]
        assert ratio == pytest.approx(even[name] / even[result["best_fixed"]], rel=0.01)


def test_kinds_are_accepted_at_their_own_rates(rig: Rig) -> None:
    """Of 144 free-text drafts 12 % are accepted by rate, of 144 copies 90 %."""
    share = {}
    for kind in ("copy", "prose"):
        rig.phases[1][:] = [Prompt(prompt.tokens, kind) for prompt in rig.phases[1]]
        runs = [rig.run(Arm("arm", "static:ngram:1"), 1, block) for block in range(6)]
        stats = [run.stats.drafters["ngram"] for run in runs]
        share[kind] = sum(s.accepted for s in stats) / sum(s.proposed for s in stats)
    assert share["prose"] < 0.4 < 0.7 < share["copy"]


class Watching(Controller):
    """Notes what each request had accepted or scored at each position, by seed and context."""

    def __init__(self, rig: Rig, spec: str | dict[str, object]) -> None:
        super().__init__(spec)
        self.rig = rig
        self.seeds: dict[str, int] = {}
        self.used: dict[tuple[int, int], tuple[int, int]] = {}  # draft tokens, accepted
        self.scored: dict[tuple[int, int], tuple[int, int]] = {}  # emitted tokens, agreed

    def plan(self, view: BatchView) -> Plan:
        """Requests are live."""
        self.seeds |= {r.id: self.rig.engine.requests[r.id].sampler.seed for r in view.requests}
        return super().plan(view)

    def observe(self, observation: Observation) -> None:
        """Some have ended."""
        shadow = observation.shadow.get("ngram", (None,) * len(observation.accepted))
        for row, request in enumerate(observation.view.requests):
            place = self.seeds[request.id], request.context_tokens
            accepted = observation.accepted[row]
            self.used[place] = observation.proposed[row], accepted
            if (agreed := shadow[row]) is not None:
                self.scored[place] = accepted + 1, agreed
        super().observe(observation)


def watched(rig: Rig, spec: str | dict[str, object]) -> Watching:
    arm = Arm("watched", OFF)
    arm.controller = Watching(rig, spec)
    for block in range(3):
        rig.run(arm, 1, block)
    return arm.controller


def test_the_ngram_drafter_is_scored_by_what_it_would_have_had_accepted(rig: Rig) -> None:
    rig.phases[1][:] = [
        Prompt(prompt.tokens, kind) for prompt, kind in zip(rig.phases[1], RATES, strict=True)
    ]
    others = watched(rig, {"kind": "heuristic", "drafter": "draft_model"})
    alone = watched(rig, "static:ngram:6")
    shared = others.scored.keys() & alone.used.keys()
    for place in shared:
        (given, agreed), (drafted, accepted) = others.scored[place], alone.used[place]
        assert min(agreed, drafted) == min(accepted, given)
    assert len(shared) > 40
    assert len({others.scored[place] for place in shared}) > 4  # misses, hits, short and long


def test_one_case_is_measured_scored_drawn_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "large-b1-c256-free"
    assert main(["--quick", "--cells", name, "--folder", str(tmp_path)]) == 0
    written = (tmp_path / "regret.json").read_text("utf-8")
    (result,) = json.loads(written)["results"]
    assert result["name"] == name
    assert result["blocks"] == 2
    assert set(result["rates"]) >= {OFF, ADAPTIVE, result["best_fixed"]}
    assert f"| {name} |" in capsys.readouterr().out
    ElementTree.parse(tmp_path / "regret.svg")
    assert main(["--quick", "--resume", "--cells", name, "--folder", str(tmp_path)]) == 0
    assert (tmp_path / "regret.json").read_text("utf-8") == written
    assert "Measured in parts" not in markdown([result])
    elsewhere = {"date": "2026-11-01", "processor": "another"}
    both = markdown([result, {**result, "name": "other", "measured": elsewhere}])
    assert "another, 2026-11-01: other." in both.splitlines()[-1]
    assert main(["--cells", "nothing"]) == 2


def test_measuring_some_cells_anew_keeps_the_others(tmp_path: Path) -> None:
    name, path = "large-b1-c256-free", tmp_path / "regret.json"
    assert main(["--quick", "--cells", name, "--folder", str(tmp_path)]) == 0
    facts = json.loads(path.read_text("utf-8"))
    (old,) = facts["results"]
    other = {**old, "name": "large-b32-c2048-code"}
    path.write_text(json.dumps({**facts, "results": [{**old, "blocks": 99}, other]}), "utf-8")
    assert main(["--quick", "--cells", name, "--folder", str(tmp_path)]) == 0
    results = {row["name"]: row for row in json.loads(path.read_text("utf-8"))["results"]}
    assert results[name]["blocks"] == 2
    assert results["large-b32-c2048-code"] == other


def test_a_workload_is_measured_with_rivals_scored_and_drawn() -> None:
    result = measure(replace(quick(WORKLOADS[0]), blocks=4), is_tiny=True)
    measured = {*result["phase_rates"], *result["dropped"]}  # type: ignore[misc]
    assert measured >= {"smartspec", "heuristic", "concurrency_schedule"}
    assert result["best_rival"] in result["phase_rates"]  # type: ignore[operator]
    for text in (markdown([result]), svg([result])):
        assert "batch-ramps" in text
    assert all(isinstance(missed, str) for missed in misses(result))


def test_a_head_start_is_measured_beside_the_same_policy_twice() -> None:
    found = learned_live.measure(quick(CELLS[3]), turns=2, is_tiny=True)
    for key in ("first_block", "whole", "goodput_again"):
        ratio = found[key]
        assert 0.0 < ratio["low"] <= ratio["mean"] <= ratio["high"]
    assert found["steps"] >= 3
    both = learned_live.over_all([found, found])
    assert both["whole"]["mean"] == pytest.approx(found["whole"]["mean"], abs=1e-3)
    with pytest.raises(ValueError, match="at least 2"):
        learned_live.measure(quick(CELLS[3]), turns=1)
