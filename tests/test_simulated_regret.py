"""The promise, simulated: no fixed setting would have been much faster, from the first step on.

Seeds are fixed, so a failure is a change of decisions. The whole grid is `benchmarks.simulated_regret`.
"""

import numpy as np
import pytest

from benchmarks.simulated_regret import MACHINES, measure, runs_of
from sdcontrol.controller import Controller
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes
from sdcontrol.traces.workload import SimulatedRequest, Workload


@pytest.mark.parametrize(
    ("machine", "batch", "kind"),
    [
        ("large", 1, "copy"),  # memory-bound: long drafts pay
        ("large", 4, "free"),
        ("large", 16, "free"),  # compute-bound: nothing pays
        ("large", 16, "mixed"),  # compute-bound, and yet some requests' drafts pay
        ("small", 4, "code"),
        ("gpu", 4, "free"),
        ("gpu", 16, "mixed"),
    ],
)
def test_no_fixed_setting_is_much_faster_learning_included(
    machine: str, batch: int, kind: str
) -> None:
    found = measure(machine, batch, kind, seed=0)
    assert float(str(found["goodput_over_best_fixed"])) > 0.96
    assert float(str(found["goodput_over_off"])) > 0.97


def lone_rate(policy: str, *, is_hinted: bool) -> float:
    """Tokens per second of requests that decode alone after crowds, whom n-grams serve far better.

    The controller takes 1.7 % of a lone step, so that it puts off what it can. The first two are not
    counted: in those a draft model is not known yet.
    """
    rng = np.random.default_rng(0)
    requests = []
    for turn in range(6):
        for name, rate, at in (*[(f"crowd {i}", 0.9, 0) for i in range(8)], ("lone", 0.05, 50)):
            looked_up, guessed = (runs_of(rng.random(64) < p, 48) for p in (rate, 0.6))
            found = np.full(48, 8, np.uint8)
            look_up = ArmOutcomes(looked_up)
            if is_hinted:
                look_up = ArmOutcomes(looked_up, found, max_draft_tokens=2 * found)
            arms = {"ngram": look_up, "draft_model": ArmOutcomes(guessed)}
            requests.append(SimulatedRequest(f"{turn} {name}", 100.0 * turn + at, 64, 48, arms))
    times = CostTimes(MACHINES["large"], controller_seconds=8e-4)
    settings = SimulationSettings(max_batch_size=8, prefix_sharing=False)
    simulation = Simulation(
        Workload.of("crowds", requests), Controller(policy, clock=None), times, settings
    )
    tokens, seconds = 0, 0.0
    while simulation.has_work:
        step = simulation.step()
        names = [request.id for request in step.view.requests]
        if len(names) == 1 and names[0].endswith("lone") and int(names[0].split()[0]) > 1:
            tokens += sum(step.emitted)
            seconds += step.timing.total_seconds
    return tokens / seconds


@pytest.mark.parametrize("is_hinted", [False, True])
def test_a_lone_request_after_a_crowd_is_soon_told_from_it(is_hinted: bool) -> None:
    """What a crowd had accepted neither holds a plan up for steps on end nor drowns what is seen now."""
    best = lone_rate("static:draft_model:2", is_hinted=is_hinted)
    ours = lone_rate("goodput", is_hinted=is_hinted)
    assert ours > 0.85 * best
