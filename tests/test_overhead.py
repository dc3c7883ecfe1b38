"""What steps cost beside their forwards, told apart where drafts make the device wait."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Belief, Observation, Plan, RequestView, Timing
from sdcontrol.estimators import hardware, shapes
from sdcontrol.estimators.cost import OnlineCost
from sdcontrol.estimators.overhead import LearntOverhead, Overheads
from sdcontrol.estimators.price import overheads_of, step_seconds
from sdcontrol.estimators.roofline import Calibration, Forward, RooflineCost
from sdcontrol.estimators.uninformed import UninformedCost
from sdcontrol.policies.at_once import answer_at_once
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.problem import Problem
from sdcontrol.policies.reading import read, to_choices
from tests.plan_instances import DrawnCost, all_plans, goodput_of, small_instance

HORIZON = (64.0, 64.0, 1.0, 0.0)
H200, REACHED = hardware.by_name("H200"), Calibration(0.88, 0.65, 6e-6, 2e-8)


@dataclass(frozen=True)
class Waiting(DrawnCost):
    """A device that waits for the host as soon as anybody drafts."""

    more: float = 0.3

    def overheads(self) -> Overheads:
        seconds = self.overhead_seconds()
        return Overheads(seconds, seconds + self.more)


def waiting(belief: Belief, more: float) -> Belief:
    cost = belief.cost
    assert isinstance(cost, DrawnCost)
    return Belief(belief.survival, Waiting(**vars(cost), more=more))


def test_drafts_that_make_the_device_wait_are_planned_where_they_pay_for_it() -> None:
    """Against brute force, at 0.995 of the optimum each; off in some where it was not before."""
    generator = np.random.default_rng(71)
    ratios, num_stopped = [], 0
    for turn in range(80):
        view, belief = small_instance(generator, turn)
        slower = waiting(belief, float(generator.uniform(0.05, 1.0)))
        before, after = planned(view, belief), planned(view, slower)
        gains, seconds = all_plans(view, slower)
        ratios.append(goodput_of(view, after, slower) / (gains / seconds).max())
        num_stopped += after.is_off and not before.is_off
    assert max(ratios) < 1.0 + 1e-9
    assert min(ratios) >= 0.995
    assert num_stopped > 10


@pytest.mark.parametrize("rate", [0.45, 0.5, 0.55, 0.6, 0.7])
@pytest.mark.parametrize("batch", [6, 16, 48])
def test_no_length_for_all_is_better_than_what_is_planned(batch: int, rate: float) -> None:
    """As an 8B and a 1B model on a GPU: rounds that all share, so that nobody goes on alone."""
    cost = Hidden(
        RooflineCost(
            Forward(shapes.by_name("llama-3.1-8b"), H200, calibration=REACHED),
            {"draft_model": Forward(shapes.by_name("llama-3.2-1b"), H200, calibration=REACHED)},
        ),
        0.5e-3 + 30e-6 * batch,
    )
    requests = tuple(
        RequestView(str(r), 512, 5, 100, drafters=("draft_model",)) for r in range(batch)
    )
    view = BatchView(0, requests, 10_000)
    belief = Belief({"draft_model": np.tile(np.cumprod(np.full(16, rate)), (batch, 1))}, cost)
    uniform = [goodput_of(view, Plan.uniform(view, "draft_model", n), belief) for n in range(17)]
    assert goodput_of(view, planned(view, belief), belief) > 0.9999 * max(uniform)


@dataclass(frozen=True)
class Hidden:
    """A cost whose steps take nothing beside forwards as long as nobody drafts."""

    cost: RooflineCost
    drafting: float

    def __getattr__(self, name: str) -> object:
        return getattr(self.cost, name)

    def overhead_seconds(self) -> float:
        return self.drafting

    def overheads(self) -> Overheads:
        return Overheads(0.0, self.drafting)


def planned(view: BatchView, belief: Belief) -> Plan:
    problem = read(view, belief, HORIZON)
    if problem is None:
        return Plan.off(view)
    return Plan(to_choices(problem.arms, problem.lengths, maximise(problem)))


def test_a_cost_that_does_not_tell_them_apart_has_one_for_both() -> None:
    cost = UninformedCost()
    assert overheads_of(cost) == (cost.overhead_seconds(),) * 2


# Learning


def learnt(*steps: tuple[float, bool], forward: float = 0.01, batch: int = 8) -> LearntOverhead:
    """Of steps that all were launched ahead where nobody drafted."""
    overhead = LearntOverhead()
    overhead.is_hidden = True
    for seconds, drafts in steps:
        overhead.update(seconds, forward, batch, drafts=drafts, is_ahead=not drafts)
    return overhead


PLAIN, DRAFTING = (1e-4, False), (4e-3, True)


def test_kinds_are_told_apart_once_both_were_seen_a_few_times() -> None:
    assert learnt(*[PLAIN] * 9).by_kind is None
    assert learnt(*[PLAIN] * 9, *[DRAFTING] * 2).by_kind is None
    by_kind = learnt(*[PLAIN] * 9, *[DRAFTING] * 3).by_kind
    assert by_kind == pytest.approx((1e-4, 4e-3), rel=0.02)


def test_without_hidden_steps_there_is_one_overhead() -> None:
    overhead = LearntOverhead()
    for seconds, drafts in [PLAIN, DRAFTING] * 9:
        overhead.update(seconds, 0.01, 8, drafts=drafts)
    assert overhead.by_kind is None
    assert overhead.typical in (1e-4, 4e-3)


def test_one_odd_step_of_a_kind_says_nothing() -> None:
    steps = [*[PLAIN] * 9, *[(3e-4, True)] * 5]
    assert learnt(*steps, (1.0, True)).by_kind is None


def test_small_differences_are_none() -> None:
    """Of 3 % of a forward, or where drafting takes less."""
    assert learnt(*[PLAIN] * 9, *[(4e-4, True)] * 9).by_kind is None
    assert learnt(*[DRAFTING] * 9, *[(1e-2, False)] * 9).by_kind is None


def test_what_was_learnt_at_a_large_batch_is_less_at_a_small_one_and_is_forgotten() -> None:
    """Else one slow hour would keep drafts off for good."""
    overhead = learnt(*[(1e-4, False)] * 9, *[(8e-3, True)] * 9, batch=256)
    assert overhead.by_kind is not None
    large = overhead.by_kind.drafting - overhead.by_kind.plain
    overhead.update(1e-5, 1e-3, 4, drafts=False)
    assert overhead.by_kind is not None
    assert overhead.by_kind.drafting - overhead.by_kind.plain < large / 20
    for _ in range(600):
        overhead.update(1e-5, 1e-3, 4, drafts=False)
    assert overhead.by_kind is None


def test_hidden_steps_cost_nothing_until_they_were_seen_to() -> None:
    """Those that were not launched ahead are not hidden, and say nothing."""
    overhead = LearntOverhead()
    overhead.is_hidden = True
    for _ in range(5):
        overhead.update(4e-3, 0.01, 8, drafts=True)
    assert overhead.by_kind == pytest.approx((0.0, 4e-3))
    assert overhead.share == pytest.approx(0.4)
    overhead.update(3e-3, 0.01, 8, drafts=False)
    assert overhead.by_kind is not None
    for _ in range(5):
        overhead.update(3e-3, 0.01, 8, drafts=False)
        overhead.update(4e-3, 0.01, 8, drafts=True)
    assert overhead.by_kind.plain == 0.0
    for _ in range(5):
        overhead.update(2e-3, 0.01, 8, drafts=False, is_ahead=True)
    assert overhead.by_kind is not None
    assert overhead.by_kind.plain == pytest.approx(2e-3)
    for _ in range(400):
        overhead.update(4e-3, 0.01, 8, drafts=True)
    assert overhead.by_kind is not None
    assert overhead.by_kind.plain < 3e-4, "what was seen long ago may be otherwise now"


def test_a_controller_that_was_told_tries_steps_that_are_hidden() -> None:
    """All it has seen are steps with drafts, which take half as long again beside as their forwards."""
    seen = []
    for is_told in (False, True):
        controller = Controller("goodput", clock=None)
        if is_told:
            controller.goes_ahead()
        for step in range(40):
            controller.observe(observed(step, 2, 1.5e-2))
        seen.append(controller.plan(observed(200, 2, 0.0).view).is_off)
    assert seen == [False, True]


def observed(step: int, length: int, overhead: float) -> Observation:
    """Eight requests in a forward of 10 ms; half of all drafts are accepted."""
    requests = tuple(
        RequestView(str(row), 500, step, 10_000, drafters=("ngram",)) for row in range(8)
    )
    view = BatchView(step, requests, 1 << 20)
    plan = Plan.uniform(view, "ngram", length)
    drafted, accepted = (length,) * 8, (length // 2,) * 8
    timing = Timing({"ngram": 1e-5} if length else {}, 1e-2, 1e-5, overhead)
    return Observation(
        view, plan, drafted, drafted, accepted, tuple(n + 1 for n in accepted), timing
    )


def taught(more: float) -> Controller:
    """Plain steps and steps with four drafts in turn; those cost `more` seconds beside."""
    controller = Controller("goodput", clock=None)
    controller.goes_ahead()
    for step in range(120):
        length = 4 * (step % 2)
        controller.observe(observed(step, length, 1e-4 + more * (length > 0)))
    return controller


@pytest.mark.parametrize("more", [0.0, 0.1])
def test_a_controller_learns_that_drafts_make_the_device_wait(more: float) -> None:
    """Three tokens for the time of one are worth having, but not for eleven times that."""
    controller = taught(more)
    view = observed(200, 4, 0.0).view
    belief = controller.belief(view)
    assert isinstance(belief.cost, OnlineCost)
    plain, drafting = belief.cost.overheads()
    assert drafting - plain == pytest.approx(more, rel=0.05)
    plan = controller.plan(view)
    assert plan.is_off == (more > 0)
    problem, answered = read(view, belief, HORIZON), answer_at_once(view, belief, HORIZON)
    assert problem is not None
    assert answered is not None
    assert answered.prices[:2] == pytest.approx((problem.verify[0], problem.verify[-1]), rel=1e-9)
    assert problem.verify[1] - problem.verify[0] == pytest.approx(more, abs=5e-3)
    drafts = Plan.uniform(view, "ngram", 4)
    apart = step_seconds(view, drafts, belief.cost) - step_seconds(
        view, Plan.off(view), belief.cost
    )
    assert apart == pytest.approx(more, abs=1e-2)


def test_a_prompt_beside_leaves_the_difference_as_it_is() -> None:
    from sdcontrol.policies.reading import without_prefill

    controller = taught(0.1)
    view = replace(observed(200, 4, 0.0).view, prefill_tokens=300)
    belief = controller.belief(view)
    beside, alone = (
        read(view, belief, HORIZON),
        read(replace(view, prefill_tokens=0), belief, HORIZON),
    )
    assert beside is not None
    assert alone is not None
    without: Problem = without_prefill(beside, view, belief.cost)
    np.testing.assert_allclose(without.verify, alone.verify)
