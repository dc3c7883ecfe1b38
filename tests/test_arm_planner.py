"""What an arm's controller knows when a block begins: all, nothing, or the last steps of earlier blocks."""

from dataclasses import replace

import numpy as np
import pytest

from sdcontrol.controller import Controller
from sdcontrol.core import Observation, Planner
from sdcontrol.engine.bundled import load_bundled, load_bundled_tokenizer
from sdcontrol.errors import ConfigError
from sdcontrol.experiments.arm_planner import ArmPlanner
from sdcontrol.experiments.config import Beginning
from sdcontrol.experiments.live import LiveRunner, Models
from sdcontrol.last_steps import LastSteps, last_of, renamed, told_before
from tests.ab_support import experiment
from tests.simulate_support import drawn_workload, finished

BEGINNINGS: tuple[Beginning, ...] = ("kept", "cold", "warm")
ARMS = [{"name": name, "policy": "goodput", "controller": name} for name in BEGINNINGS]


def planner_of(begins: Beginning) -> ArmPlanner[Controller]:
    return ArmPlanner(begins, lambda: Controller("goodput", clock=None), lambda made: made)


def run(planner: ArmPlanner[Controller], seed: int) -> tuple[Controller, int, list[Observation]]:
    """A block: its controller, how many steps that knew, and what came of the block's own."""
    controller = planner.begin(seed)
    planner.tell()
    known, seen = controller.num_observed, list[Observation]()
    learn = controller.observe

    def observe(one: Observation) -> None:
        seen.append(one)
        planner.note(one)
        learn(one)

    controller.observe = observe  # type: ignore[method-assign]
    finished(drawn_workload(seed, 8), controller)
    controller.observe = learn  # type: ignore[method-assign]
    planner.end(len(seen))
    return controller, known, seen


# ---- the steps


def steps_of(seed: int) -> list[Observation]:
    return run(planner_of("cold"), seed)[2]


def test_the_last_steps_of_two_runs_share_no_request() -> None:
    one, two = LastSteps(), LastSteps()
    for step in steps_of(0):
        one.note(step)
        two.note(step)
    both = two.after(one.after([], "monday"), "tuesday")
    assert len(both) == 2 * len(one)
    names = [
        {r.id for step in part for r in step.view.requests}
        for part in (both[: len(one)], both[len(one) :])
    ]
    assert not names[0] & names[1]
    assert len(names[0]) == len(names[1]) == 8


def test_a_request_keeps_one_name_through_its_run() -> None:
    steps = steps_of(0)
    names: dict[str, set[str]] = {}
    for before, now in zip(steps, renamed(steps, "run"), strict=True):
        assert replace(now.view, requests=before.view.requests) == before.view
        for old, new in zip(before.view.requests, now.view.requests, strict=True):
            names.setdefault(old.id, set()).add(new.id)
    assert all(len(found) == 1 for found in names.values())


def test_what_is_told_ends_before_the_first_step() -> None:
    steps = steps_of(0)
    assert [one.view.step for one in told_before(steps)] == list(range(-len(steps), 0))
    assert told_before([]) == []


@pytest.mark.parametrize(("most_steps", "most_rows"), [(5, 10_000), (10_000, 20), (1, 1)])
def test_the_last_of_many_are_those_that_fit(
    monkeypatch: pytest.MonkeyPatch, most_steps: int, most_rows: int
) -> None:
    monkeypatch.setattr("sdcontrol.last_steps.MOST_STEPS", most_steps)
    monkeypatch.setattr("sdcontrol.last_steps.MOST_ROWS", most_rows)
    steps, seen = steps_of(0), LastSteps()
    for one in steps:
        seen.note(one)
    kept = last_of(steps)
    assert kept == steps[-len(kept) :]
    assert len(seen) == len(kept)  # noted one by one or taken at once
    rows = [len(one.view.requests) for one in kept]
    assert len(kept) == 1 or (len(kept) <= most_steps and sum(rows) <= most_rows)
    one_more = len(steps[-len(kept) - 1].view.requests)
    assert len(kept) == most_steps or sum(rows) + one_more > most_rows


# ---- the controllers


def test_a_kept_controller_goes_on() -> None:
    planner = planner_of("kept")
    runs = [run(planner, seed) for seed in range(3)]
    assert len({id(controller) for controller, _, _ in runs}) == 1
    assert [known for _, known, _ in runs] == [0, len(runs[0][2]), len(runs[0][2] + runs[1][2])]
    assert planner.num_steps == len(runs[2][2])


def test_a_cold_controller_knows_nothing_in_every_block() -> None:
    planner = planner_of("cold")
    first, again = run(planner, 0), run(planner, 0)
    assert first[0] is not again[0]
    assert again[1] == 0
    assert again[2] == first[2]  # the same block again is the same decisions, step by step
    assert planner.begin(1).num_observed == planner.num_steps == 0


def test_a_warm_controller_knows_what_one_that_saw_the_earlier_blocks_does() -> None:
    planner, seen = planner_of("warm"), list[Observation]()
    for seed in range(2):
        _, known, steps = run(planner, seed)
        assert known == len(seen)
        seen += renamed(steps, f"block-{seed}")  # whose requests are others
    told = planner.begin(2)
    planner.tell()
    assert told.num_observed == len(seen)
    assert planner.num_steps == 0
    saw = Controller("goodput", clock=None)
    for one in seen:
        saw.observe(one)
    last = seen[-1].view
    requests = [replace(r, id=f"new-{place}") for place, r in enumerate(last.requests)]
    view = replace(last, step=0, requests=tuple(requests))
    beliefs = [one.belief(view).survival for one in (told, saw, Controller("goodput", clock=None))]
    arms = view.requests[0].drafters
    assert all(np.array_equal(beliefs[0][arm], beliefs[1][arm]) for arm in arms)
    assert any(not np.allclose(beliefs[0][arm], beliefs[2][arm], rtol=0.1) for arm in arms)


def test_what_is_wrong_with_a_policy_is_said_before_anything_runs() -> None:
    def make() -> Controller:
        raise ConfigError("no such file")

    with pytest.raises(ConfigError, match="no such file"):
        ArmPlanner("cold", make, lambda made: made)


def test_a_block_that_runs_twice_is_told_nothing_of_itself() -> None:
    """Else the baseline's second run knows its requests' very texts, and later blocks count that one twice."""
    planner = planner_of("warm")
    runs = [run(planner, seed) for seed in (0, 0, 1, 1, 2)]
    first, second = len(runs[1][2]), len(runs[3][2])
    assert [known for _, known, _ in runs] == [0, 0, first, first, first + second]
    assert runs[0][2] == runs[1][2]  # told the same, it decides the same, step by step
    assert runs[2][2] == runs[3][2]


@pytest.mark.parametrize("begins", ["cold", "warm"])
def test_of_a_run_that_failed_nothing_is_known(begins: Beginning) -> None:
    planner = planner_of(begins)
    failed = planner.begin(0)
    for one in steps_of(0)[:4]:
        planner.note(one)
        failed.observe(one)
    controller, known, steps = run(planner, 0)
    assert controller is not failed
    assert known == 0
    assert run(planner, 1)[1] == (len(steps) if begins == "warm" else 0)


# ---- in a comparison


def bundled_models() -> Models:
    tokenizer = load_bundled_tokenizer()
    models = load_bundled("target"), load_bundled("draft")
    return Models(*models, lambda text: tokenizer(text)["input_ids"])


def test_live_arms_begin_as_they_say() -> None:
    """A block's controller is new or not, told what its engine is, then of earlier blocks; steps count on if it is kept."""
    workload = {
        "kinds": {"copy": 1},
        "num_tokens": 8,
        "arrivals": {"kind": "closed", "concurrency": 1},
    }
    arms = [{**arm, "drafters": ["ngram", "draft_model"]} for arm in ARMS]
    plan = experiment(arms=arms, workload=workload)
    made: dict[str, list[Controller]] = {name: [] for name in BEGINNINGS}
    steps: dict[str, list[int]] = {name: [] for name in BEGINNINGS}

    def watched(name: str, controller: Planner) -> Planner:
        assert isinstance(controller, Controller)
        learn = controller.observe

        def observe(one: Observation) -> None:
            steps[name].append(one.view.step)
            learn(one)

        made[name].append(controller)
        controller.observe = observe  # type: ignore[method-assign]
        return controller

    runner = LiveRunner(plan, bundled_models(), wrap=watched)
    blocks = [
        [runner.run_block(name, block, start_seconds=0.0)[1] for name in BEGINNINGS]
        for block in range(2)
    ]
    assert all(text == texts[0] for texts in blocks for text in texts)
    assert blocks[0] != blocks[1]
    assert [len(made[name]) for name in BEGINNINGS] == [1, 2, 2]
    assert all(one.machine is not None for controllers in made.values() for one in controllers)
    assert steps["kept"] == [*range(len(steps["kept"]))]
    assert [part[0] for part in parts(steps["cold"])] == [0, 0]
    first, told, second = parts(steps["warm"])
    assert (first[0], told, second[0]) == (0, [*range(-len(first), 0)], 0)


def parts(steps: list[int]) -> list[list[int]]:
    """Cut where a step does not follow the one before, or is the first of a run."""
    found: list[list[int]] = []
    for step in steps:
        if not found or not step or step != found[-1][-1] + 1:
            found.append([])
        found[-1].append(step)
    return found
