"""All take up a drafter together that none of them would begin with."""

import numpy as np
import pytest

from sdcontrol.core import BatchView, Belief, Choice, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.problem import Problem
from sdcontrol.policies.reading import read
from sdcontrol.policies.stretches import Stretches
from sdcontrol.policies.taking_up import TakingUp
from tests.plan_instances import DrawnCost

ARM = "draft_model"
OLD, NEW = (190, 10), (0, 200)  # tokens generated, and to go: of 200, after a prompt of 800


def view_of(
    requests: list[tuple[int, int]], step: int = 32, caught_up: int = 0, prefix: str = ""
) -> BatchView:
    """Of which the first `caught_up` have, and others never did."""
    made = []
    for r, (generated, remaining) in enumerate(requests):
        context = 800 + generated
        hint = Hint(catch_up_tokens=0 if r < caught_up else context)
        name = f"{prefix}{r}"
        made.append(RequestView(name, context, generated, remaining, 0.0, (ARM,), {ARM: hint}))
    return BatchView(step, tuple(made), 10_000)


def belief(requests: int, *, accepted: float = 0.7, round_seconds: float = 0.4) -> Belief:
    """One draft token; a plain step of four takes 1.04 s, catching up with a prompt 0.8."""
    rounds = {ARM: (round_seconds, 0.0, 0.0)}
    cost = DrawnCost("linear", 1.0, 0.01, 1, 0.0, rounds, per_catch_up_token=0.001)
    return Belief({ARM: np.full((requests, 1), accepted)}, cost)


def proven() -> Stretches:
    """After enough tokens that came of drafts after a catch-up."""
    stretches = Stretches()
    choices, view = (Choice.of(ARM, 1),), view_of([(0, 400)])
    for _ in range(8):
        ones, timing = (1,), Timing({ARM: 1.0}, 1.0)
        stretches.update(Observation(view, Plan(choices), ones, ones, ones, (2,), timing))
    return stretches


def problem_of(view: BatchView, believed: Belief, stretches: Stretches) -> Problem:
    problem = read(view, believed, stretches.horizon)
    assert problem is not None
    return problem


def drafting(problem: Problem) -> list[int]:
    return maximise(problem).length.tolist()


def taken_up(
    requests: list[tuple[int, int]], **told: float
) -> tuple[TakingUp, BatchView, Belief, Stretches]:
    """After a look at these."""
    view, believed, stretches = view_of(requests), belief(len(requests), **told), proven()
    taking_up = TakingUp(stretches)
    assert taking_up.looks(view, 1.0)
    taking_up.priced(view, problem_of(view, believed, stretches))
    return taking_up, view, believed, stretches


def test_whoever_comes_begins_where_all_would_be_faster() -> None:
    """By hand: four at 0.7 make 6.8 tokens in 1.08 + 0.4 + 4 * 0.8 * 1.7 / 180 = 1.51 s, none 4 in 1.04."""
    taking_up, view, believed, stretches = taken_up([NEW, OLD, OLD, OLD])
    problem = problem_of(view, believed, stretches)
    assert drafting(problem) == [0, 0, 0, 0]  # 4.7 tokens in 1.05 + 0.4 + ... are fewer a second
    assert taking_up.arm == ARM
    assert drafting(taking_up.priced(view, problem)) == [1, 0, 0, 0]
    assert drafting(problem) == [0, 0, 0, 0]  # the one that it was asked about is as it was


@pytest.mark.parametrize(
    ("accepted", "round_seconds", "begins"),
    # The rate of all over 4 / 1.04: 1.17; 1.060 and 1.043; a round of 0.6 s 1.03.
    [(0.7, 0.4, True), (0.535, 0.4, True), (0.51, 0.4, False), (0.7, 0.6, False)],
)
def test_it_has_to_be_better_by_a_twentieth(
    accepted: float, round_seconds: float, begins: bool
) -> None:
    told = {"accepted": accepted, "round_seconds": round_seconds}
    assert bool(taken_up([NEW, OLD, OLD, OLD], **told)[0].arm) == begins


def test_it_is_not_asked_where_there_is_no_steady_state_or_no_need() -> None:
    all_of_them = [NEW, OLD, OLD, OLD]
    taking_up = TakingUp(proven())
    assert taking_up.looks(view_of(all_of_them), 1.0)
    assert not taking_up.looks(view_of(all_of_them), 0.2)  # a batch that nothing follows
    assert not taking_up.looks(view_of(all_of_them, step=33), 1.0)
    assert not taking_up.looks(view_of(all_of_them, caught_up=3), 1.0)
    assert not TakingUp(Stretches()).looks(view_of(all_of_them), 1.0)  # nothing is known of it


def test_it_ends_with_the_last_one_that_was_there() -> None:
    taking_up, view, believed, stretches = taken_up([NEW, OLD, OLD, OLD])
    for prefix, arm in (("", ARM), ("next ", "")):
        view = view_of([NEW] * 4, step=64, prefix=prefix)
        taking_up.priced(view, problem_of(view, believed, stretches))
        assert taking_up.arm == arm


def test_it_ends_where_it_turns_out_to_bring_nothing() -> None:
    """Fewer are accepted than was believed; and next time more is asked of it."""
    taking_up, view, believed, stretches = taken_up([NEW, OLD, OLD, OLD])
    fewer = belief(4, accepted=0.2)
    taking_up.priced(view, problem_of(view, fewer, stretches))
    assert taking_up.arm == ""
    some = belief(4, accepted=0.535)
    taking_up.priced(view, problem_of(view, some, stretches))
    assert taking_up.arm == ""  # 6 % would have been enough before
    taking_up.priced(view, problem_of(view, believed, stretches))
    assert taking_up.arm == ARM


def test_requests_may_leave_and_arms_may_go_meanwhile() -> None:
    taking_up, _, _, stretches = taken_up([NEW, OLD, OLD, OLD])
    fewer = view_of([NEW, OLD], step=33)
    problem = problem_of(fewer, belief(2), stretches)
    priced = taking_up.priced(fewer, problem)
    assert priced.rounds[0, 1] == pytest.approx(0.2)  # each of two
    assert (priced.rounds[:, 2:] == problem.rounds[:, 2:]).all()
    other = problem._replace(arms=("ngram",))
    assert taking_up.priced(fewer, other) is other


def test_a_plan_says_so() -> None:
    policy, view, off = Goodput(0.0), view_of([NEW, OLD, OLD, OLD]), (0,) * 4
    policy.stretches, policy.taking_up = (known := proven()), TakingUp(known)
    timing = Timing({}, 1.04)
    policy.update(Observation(view, Plan.off(view), off, off, off, (1,) * 4, timing))
    plan = policy.plan(view, belief(4))
    assert "draft_model is taken up by all" not in plan.reason  # so far nobody was followed
    policy.worth = None
    plan = policy.plan(view, belief(4))
    assert "draft_model is taken up by all" in plan.reason
    assert [choice.drafter for choice in plan.choices] == [ARM, None, None, None]
