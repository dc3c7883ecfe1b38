"""What a run taught is there in the next one: kept, found, told, and refused where it does not fit."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from benchmarks.simulated_regret import closed_rate
from sdcontrol import Controller, SpeculativeDecoder, last_steps
from sdcontrol.core import BatchView, Belief, Observation, Plan
from sdcontrol.engine.drafters.draft_model import DraftModelDrafter
from sdcontrol.errors import ConfigError, ObservationError, TraceError
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.integrations.warm_start import _middle
from sdcontrol.policies import Policy
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.replay import replay_exactly
from sdcontrol.traces.warm_start import WarmStart
from sdcontrol.whole_files import write_whole
from tests.engine_support import noised, random_prompt, tiny_model
from tests.simulate_support import TIMES, drawn_workload, finished
from tests.trace_support import plain_step, view_of

SETTING = {"target": "tiny", "threads": 2}


def observed(seed: int = 0, requests: int = 8) -> list[Observation]:
    """What a controller saw of a simulated run."""
    seen: list[Observation] = []
    controller = Controller("goodput", clock=None)
    learn = controller.observe
    controller.observe = lambda one: (seen.append(one), learn(one))[1]  # type: ignore[method-assign]
    finished(drawn_workload(seed, requests), controller)
    return seen


def told(steps: list[Observation]) -> Controller:
    controller = Controller("goodput", clock=None)
    controller.warm_start(steps)
    return controller


# ---- a controller that is told


def test_a_controller_that_is_told_believes_what_one_that_saw_it_does() -> None:
    steps = observed()
    saw, knows, nothing = Controller("goodput", clock=None), told(steps), Controller("goodput")
    for one in steps:
        saw.observe(one)
    view = replace(view_of(0), requests=steps[-1].view.requests)
    beliefs = [controller.belief(view).survival for controller in (saw, knows, nothing)]
    for arm in view.requests[0].drafters:
        assert np.array_equal(beliefs[0][arm], beliefs[1][arm])
    assert not np.allclose(beliefs[1]["ngram"], beliefs[2]["ngram"], rtol=0.1)
    prices = [c.cost.verify_seconds(np.arange(1.0, 9.0), 400.0, 4) for c in (saw, knows, nothing)]
    assert np.array_equal(prices[0], prices[1])
    assert not np.allclose(prices[1], prices[2], rtol=0.3)  # seconds are not guessed
    assert knows.plan(view).choices == saw.plan(view).choices


def test_its_first_step_knows_what_a_step_takes() -> None:
    cost, at = told(observed(requests=24)).cost, (np.array([4.0, 12.0]), 400.0, 4)
    assert cost.verify_seconds(*at) == pytest.approx(TIMES.cost.verify_seconds(*at), rel=0.1)


def test_a_first_batch_is_decoded_faster() -> None:
    """What a batch before taught, beside nothing: 0.998 and 0.940 of the best fixed setting, of twelve seeds."""
    cell, seeds = ("large", 16, "code"), (1000, 2000, 3000)
    cold, warm = (
        closed_rate("goodput", cell, seeds, batches=1, earlier=earlier) for earlier in (0, 1)
    )
    assert warm > 1.02 * cold


def test_nothing_waits_and_no_choice_stands() -> None:
    """The controller takes much of each step, so that learning is put off and plans are kept."""
    steps = [
        replace(one, timing=replace(one.timing, controller_seconds=1e-3)) for one in observed()
    ]
    late, knows = Controller("goodput", clock=None), told(steps)
    for one in steps:
        late.observe(one)
    assert late._lessons._waiting.puts_off
    assert knows._lessons._waiting._aside == []
    assert not knows._lessons._waiting._begun
    assert not knows._lessons._unread
    assert not knows._lessons._untimed
    assert not knows._lessons._choices._made
    knows.warm_start([])  # twice, and of nothing: no more to learn
    knows.observe(steps[0])


def test_faults_of_an_earlier_run_are_not_held_against_the_policy() -> None:
    steps = [replace(one, faults=("plan_raised",)) for one in observed()]
    assert not told(steps).is_quarantined
    saw = Controller("goodput", clock=None)
    for one in steps:
        saw.observe(one)
    assert saw.is_quarantined


class Own(Policy):
    """A policy that expects to be told of the steps that it planned, and of no others."""

    uses_belief = False

    def __init__(self) -> None:
        self.planned: set[int] = set()

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        self.planned.add(view.step)
        return Plan.uniform(view, "ngram", 1)

    def update(self, observation: Observation) -> None:
        self.planned.remove(observation.view.step)

    def clone(self) -> "Own":
        return Own()


def test_a_policy_that_makes_nothing_of_earlier_steps_is_trusted_in_this_run() -> None:
    steps, controller = observed(), Controller(Own(), clock=None)
    controller.warm_start(steps)
    assert controller.faults["update_raised"] > 0
    assert not controller.is_quarantined
    assert controller.take_faults() == ()
    assert not controller.plan(view_of(0)).is_off
    late = Controller(Own(), clock=None)
    for one in steps:
        late.observe(one)
    late.warm_start(steps)
    assert late.is_quarantined  # as it was before


def test_what_cannot_have_come_about_is_refused() -> None:
    one = plain_step(0).observation
    with pytest.raises(ObservationError, match="accepted"):
        Controller("goodput").warm_start([replace(one, accepted=(5, 5, 5))])


# ---- a file


def kept(folder: Path, steps: list[Observation]) -> WarmStart:
    made = WarmStart(folder, SETTING)
    made.recall()
    for one in steps:
        made.note(one)
    made.save()
    return made


def test_the_next_run_finds_the_steps_of_this_one_under_other_names(tmp_path: Path) -> None:
    steps = observed()
    kept(tmp_path, steps)
    found = WarmStart(tmp_path, SETTING).recall()
    assert [one.view.step for one in found] == list(range(-len(steps), 0))
    names = {request.id for one in found for request in one.view.requests}
    before = {request.id for one in steps for request in one.view.requests}
    assert len(names) == len(before) > 1
    assert names.isdisjoint(before)
    for one, then in zip(found, steps, strict=True):
        requests = tuple(
            replace(request, id=was.id)
            for request, was in zip(one.view.requests, then.view.requests, strict=True)
        )
        view = replace(one.view, step=then.view.step, requests=requests)
        assert replace(one, view=view) == then


def test_a_short_run_adds_to_what_is_known(tmp_path: Path) -> None:
    steps = observed()
    kept(tmp_path, steps)
    kept(tmp_path, steps[2:4])
    found = WarmStart(tmp_path, SETTING).recall()
    assert len(found) == len(steps) + 2
    assert found[2].timing == found[-2].timing
    assert found[-2].view.requests
    names = [
        {request.id for one in part for request in one.view.requests}
        for part in (found[:-2], found[-2:])
    ]
    assert names[0].isdisjoint(names[1])  # the same request in two runs is two
    assert {path.name for path in tmp_path.iterdir()} == {WarmStart(tmp_path, SETTING).path.name}


def test_two_runs_at_a_time_are_both_kept(tmp_path: Path) -> None:
    first, second = WarmStart(tmp_path, SETTING), WarmStart(tmp_path, SETTING)
    for number in range(4):
        (first if number % 2 else second).note(plain_step(number).observation)
    second.save()
    first.save()
    first.save()  # there is nothing more
    first.note(plain_step(7).observation)
    first.save()
    found = [one.timing for one in WarmStart(tmp_path, SETTING).recall()]
    assert found == [plain_step(number).observation.timing for number in (0, 2, 1, 3, 7)]


def test_many_that_end_at_once_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None writes what it read before another wrote."""
    runs = [WarmStart(tmp_path, SETTING) for _ in range(4)]
    for number, one in enumerate(runs):
        one.note(plain_step(number).observation)
    together = threading.Barrier(len(runs), timeout=1.0)

    def write_late(path: Path, content: bytes) -> None:
        with suppress(threading.BrokenBarrierError):
            together.wait()  # until all have read, if they may
        write_whole(path, content)

    monkeypatch.setattr("sdcontrol.traces.warm_start.write_whole", write_late)
    in_threads(*[one.save for one in runs])
    assert len(WarmStart(tmp_path, SETTING).recall()) == len(runs)


def in_threads(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_is_noted_while_it_is_saved_is_kept_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, one = WarmStart(tmp_path, SETTING), plain_step(0).observation
    made.note(one)
    is_full = [True, False]

    def write_slowly(path: Path, content: bytes) -> None:
        in_threads(lambda: made.note(one))
        if is_full.pop(0):
            raise OSError(28, "No space left on device", str(path))
        write_whole(path, content)

    monkeypatch.setattr("sdcontrol.traces.warm_start.write_whole", write_slowly)
    with capture_logs() as logs:
        made.save()
    assert [said["event"] for said in logs] == ["warm_start_not_kept"]
    made.save()
    assert len(made.recall()) == 2
    monkeypatch.undo()
    made.save()
    assert len(made.recall()) == 3


def test_no_words_of_faults_are_kept(tmp_path: Path) -> None:
    """They may name requests, or quote what a policy was given."""
    path = kept(tmp_path, [replace(plain_step(0).observation, faults=("plan_raised: Jane",))]).path
    assert b"Jane" not in path.read_bytes()
    (found,) = WarmStart(tmp_path, SETTING).recall()
    assert found.faults == ()


def test_only_the_last_steps_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [plain_step(number).observation for number in range(12)]
    monkeypatch.setattr(last_steps, "MOST_STEPS", 5)
    kept(tmp_path, steps)
    assert [one.timing for one in WarmStart(tmp_path, SETTING).recall()] == [
        one.timing for one in steps[-5:]
    ]
    monkeypatch.setattr(last_steps, "MOST_ROWS", 6)  # of three requests each
    kept(tmp_path, steps[:1])
    found = WarmStart(tmp_path, SETTING).recall()
    assert [one.timing for one in found] == [steps[-1].timing, steps[0].timing]


def test_another_setting_has_another_file(tmp_path: Path) -> None:
    kept(tmp_path, observed())
    assert WarmStart(tmp_path, {**SETTING, "threads": 4}).recall() == []
    assert len(WarmStart(tmp_path, SETTING).recall()) > 0


def test_a_run_without_steps_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = kept(tmp_path, observed()).path
    before = path.read_bytes()
    kept(tmp_path, [])
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign", "forged"])
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(tmp_path: Path, damage: str) -> None:
    path = kept(tmp_path, observed()).path
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 3] ^= 0x10
    if damage == "foreign":  # of another setting, under this one's name
        other = WarmStart(tmp_path, {"other": 1})
        other.note(plain_step(0).observation)
        other.save()
        content = bytearray(other.path.read_bytes())
    if damage == "forged":  # more accepted than was drafted
        one = plain_step(0).observation
        content = bytearray(kept(tmp_path, [replace(one, accepted=(5, 5, 5))]).path.read_bytes())
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b""}.get(damage, content))
    with capture_logs() as logs:
        assert WarmStart(tmp_path, SETTING).recall() == []
    assert [one["event"] for one in logs] == ["warm_start_not_read"]
    assert str(path) in logs[0]["reason"]
    kept_steps = observed()[:3]
    kept(tmp_path, kept_steps)
    assert len(WarmStart(tmp_path, SETTING).recall()) == 3


def test_where_there_can_be_no_folder_it_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file"), "~nobody-of-that-name/x", "no\0path"):
        with pytest.raises(ConfigError, match=r"warm_start=.*; give a folder"):
            WarmStart(folder, SETTING)


def test_a_folder_stays_where_it_is_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = WarmStart("kept", SETTING)
    made.note(plain_step(0).observation)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    made.save()
    assert made.path.parent == tmp_path / "kept"
    assert len(WarmStart(tmp_path / "kept", SETTING).recall()) == 1


def test_a_file_that_may_not_be_read_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kept(tmp_path, observed()[:3])

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(made.path))

    monkeypatch.setattr("sdcontrol.traces.parts.pq.ParquetFile", refused)
    monkeypatch.setattr(os, "stat", refused)  # a folder that may not be entered
    with capture_logs() as logs:
        assert made.recall() == []
    assert [one["event"] for one in logs] == ["warm_start_not_read"]
    assert "Permission denied" in logs[0]["reason"]


@pytest.mark.parametrize("reason", [None, "\udcff"])
def test_what_no_column_takes_is_said_and_not_raised(tmp_path: Path, reason: str) -> None:
    made, one = WarmStart(tmp_path, SETTING), plain_step(0).observation
    made.note(replace(one, plan=replace(one.plan, reason=reason)))
    with capture_logs() as logs:
        made.save()
    assert [one["event"] for one in logs] == ["warm_start_not_kept"]


def test_where_nothing_can_be_written_it_is_said_and_the_run_has_ended_all_the_same(
    tmp_path: Path,
) -> None:
    made = WarmStart(tmp_path / "kept", SETTING)
    made.note(plain_step(0).observation)
    (tmp_path / "kept").rmdir()
    (tmp_path / "kept").write_text("a file now")
    with capture_logs() as logs:
        made.save()
    assert [one["event"] for one in logs] == ["warm_start_not_kept"]
    assert str(made.path) in logs[0]["path"]


# ---- a decoder


def decoded(folder: Path, **options: object) -> tuple[int, list[int]]:
    """How many steps a decoder's controller knew at first, and what it wrote."""
    settings: dict[str, object] = {"drafters": ["ngram"], "kv_tokens": 1024, **options}
    model = settings.pop("model", None) or tiny_model()
    with SpeculativeDecoder(model, warm_start=folder, **settings) as decoder:  # type: ignore[arg-type]
        known: int = getattr(decoder.planner, "num_observed", -1)
        tokens = [
            token
            for event in decoder.stream([random_prompt(8, 0)], max_new_tokens=12)
            for token in event.tokens
        ]
        return known, tokens


def test_the_next_decoder_knows_what_this_one_saw(tmp_path: Path) -> None:
    first, text = decoded(tmp_path)
    second, again = decoded(tmp_path)
    third, _ = decoded(tmp_path)
    assert first == 0 < second < third
    assert text == again


def test_of_other_drafters_or_verification_nothing_is_known(tmp_path: Path) -> None:
    decoded(tmp_path)
    assert decoded(tmp_path, drafters=["ngram", noised(tiny_model())])[0] == 0
    assert decoded(tmp_path, verification="rejection")[0] == 0
    assert len(list(tmp_path.iterdir())) == 3


def test_of_another_checkpoint_of_the_same_shape_nothing_is_known(tmp_path: Path) -> None:
    decoded(tmp_path)
    tuned = tiny_model()
    with torch.no_grad():
        list(tuned.parameters())[-2].mul_(1.01)
    assert decoded(tmp_path, model=tuned)[0] == 0
    assert decoded(tmp_path)[0] > 0
    draft = noised(tiny_model())
    decoded(tmp_path, drafters=[draft])
    assert decoded(tmp_path, drafters=[draft])[0] > 0
    assert decoded(tmp_path, drafters=[noised(draft)])[0] == 0
    assert decoded(tmp_path, drafters=[DraftModelDrafter(draft)])[0] > 0
    assert decoded(tmp_path, drafters=[DraftModelDrafter(noised(noised(draft)))])[0] == 0


@pytest.mark.parametrize(
    "weights", [torch.empty(0), torch.empty(3, device="meta"), torch.ones(4).to_sparse()]
)
def test_weights_that_cannot_be_read_are_counted_all_the_same(weights: torch.Tensor) -> None:
    assert _middle(weights)[0] == weights.numel()


def test_a_planner_that_is_no_controller_has_no_warm_start(tmp_path: Path) -> None:
    class Off:
        def plan(self, view: BatchView) -> object:
            raise NotImplementedError

        refine = observe = plan

    with pytest.raises(ConfigError, match="Off is none; leave warm_start out"):
        decoded(tmp_path / "kept", policy=Off(), record=tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []


def test_a_controller_that_has_begun_is_told_nothing(tmp_path: Path) -> None:
    controller = Controller("goodput")
    assert decoded(tmp_path, policy=controller)[0] == 0
    steps = controller.num_observed
    assert decoded(tmp_path, policy=controller)[0] == steps  # which it saw itself
    assert decoded(tmp_path)[0] == controller.num_observed == 2 * steps


def test_estimators_that_fail_go_without(tmp_path: Path) -> None:
    class Failing(AcceptanceEstimator):
        def update(self, observation: Observation) -> None:
            raise RuntimeError("no")

    _, text = decoded(tmp_path)
    with capture_logs() as logs:
        _, again = decoded(tmp_path, policy=Controller("goodput", acceptance=Failing()))
    assert text == again
    (said,) = [one for one in logs if one["event"] == "warm_start_not_learnt"]
    assert said["reason"] == "RuntimeError('no')"


def test_a_recording_says_what_was_known_before(tmp_path: Path) -> None:
    known, _ = decoded(tmp_path / "kept"), decoded(tmp_path / "kept")
    steps, _ = decoded(tmp_path / "kept", record=tmp_path / "trace")
    facts = Trace(tmp_path / "trace").header.controller
    assert known[0] == 0
    assert facts is not None
    assert facts.steps_before == steps > 0
    with pytest.raises(TraceError, match=f"had observed {steps} steps before"):
        replay_exactly(tmp_path / "trace")


def test_what_is_not_closed_is_kept_when_the_process_ends(tmp_path: Path) -> None:
    script = (
        "from sdcontrol import SpeculativeDecoder\n"
        "from tests.engine_support import random_prompt, tiny_model\n"
        f"decoder = SpeculativeDecoder(tiny_model(), kv_tokens=1024, warm_start={str(tmp_path)!r})\n"
        "list(decoder.stream([random_prompt(8, 0)], max_new_tokens=12))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".parquet"
