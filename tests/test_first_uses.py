"""Few begin to catch up while it is not known what that takes."""

from collections.abc import Sequence

import pytest

from benchmarks import simulated_regret
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Choice, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.policies.first_uses import FirstUses, waits
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes
from tests.plan_instances import DrawnCost

ARM, ARMS = "draft_model", ("ngram", "draft_model")
_ROUNDS = {"ngram": (0.0, 0.0, 0.0), ARM: (0.4, 0.0, 0.0)}
COST = DrawnCost("linear", 1.0, 0.01, 1, 0.0, _ROUNDS, per_catch_up_token=0.003)


def view_of(lags: Sequence[int], arm: str = ARM) -> BatchView:
    """Contexts of 1,000 tokens, each of which takes 3 ms to catch up with, a step 1 s; the later, the more tokens to go."""
    requests = [
        RequestView(str(r), 1000, 10, 100 + r, 0.0, ARMS, {arm: Hint(catch_up_tokens=lag)})
        for r, lag in enumerate(lags)
    ]
    return BatchView(7, tuple(requests), 10_000)


def all_with(arm: str, batch: int) -> Plan:
    return Plan((Choice.of(arm, 2),) * batch, "all")


def beginners(first: FirstUses, lags: Sequence[int]) -> list[int]:
    """Who drafts in a step that all would draft in, which then is observed."""
    view = view_of(lags)
    plan = first.limited(view, all_with(ARM, len(lags)), COST)
    drafted = tuple(choice.num_draft_tokens for choice in plan.choices)
    ones = (1,) * len(lags)
    timing = Timing({ARM: 1.0}, 1.0)
    first.update(Observation(view, plan, drafted, drafted, ones, (2,) * len(lags), timing))
    return [r for r, tokens in enumerate(drafted) if tokens]


def test_as_many_tokens_begin_as_have_begun_and_then_all() -> None:
    """Those with most to go first; the plan says that others wait, and does not stand for another step."""
    first, lags = FirstUses(), [1000] * 16
    plan = first.limited(view_of(lags), all_with(ARM, 16), COST)
    assert waits(plan)
    assert plan.reason == "all; 15 wait until it is known what catching up takes"
    for expected in (1, 1, 2, 4):
        begun = beginners(first, lags)
        assert begun == list(range(len(lags) - expected, len(lags)))
        lags[-expected:] = [2] * expected  # caught up
        lags = lags[-expected:] + lags[:-expected]
        lags = [lag for lag in lags if lag > 2]
    assert beginners(first, lags) == list(range(len(lags)))


@pytest.mark.parametrize("lags", [[1000], [0] * 4, [2] * 4, [499] * 4, [500] * 2])
def test_who_is_alone_or_takes_little_waits_for_nobody(lags: list[int]) -> None:
    """By less than half of a context: it had caught up before. Three plain steps' time is little."""
    plan = all_with(ARM, len(lags))
    assert FirstUses().limited(view_of(lags), plan, COST) is plan


def test_look_ups_and_drafters_that_never_catch_up_are_not_looked_at_for_ever() -> None:
    """After 64 steps of drafting without."""
    first = FirstUses()
    for _ in range(64):
        assert beginners(first, [0, 0]) == [0, 1]
    assert beginners(first, [1000, 1000]) == [0, 1]


def test_drafters_of_a_family_are_known_together() -> None:
    """What their catch-ups take is priced together."""
    first = FirstUses()
    for _ in range(4):
        beginners(first, [1000])
    view = view_of([1000] * 8, "draft_model:other")
    plan = first.limited(view, all_with("draft_model:other", 8), COST)
    assert not waits(plan)


def test_a_batch_does_not_catch_up_on_an_assumption() -> None:
    """Simulated: all at once would take 14 steps' time, and bring nothing."""
    simulation = Simulation(
        simulated_regret.workload_of("free", 16, 2),
        Controller("goodput", clock=None),
        CostTimes(simulated_regret.MACHINES["large"]),
        SimulationSettings(max_batch_size=16, max_prefill_tokens=4096, prefix_sharing=False),
    )
    begun = []
    for _ in range(40):
        step = simulation.step()
        lags = [
            request.hints[ARM].catch_up_tokens
            for request, choice in zip(step.view.requests, step.plan.choices, strict=True)
            if choice.drafter == ARM
        ]
        begun.append(sum(lag > 100 for lag in lags))
    assert 1 <= sum(begun) <= 3
