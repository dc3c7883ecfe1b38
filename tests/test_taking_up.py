"""All take up a drafter together that none of them would begin with."""

import itertools
from dataclasses import replace

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

ARM, ARMS = "draft_model", ("ngram", "draft_model")
STEPS = itertools.count(0, 8)
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
        made.append(RequestView(name, context, generated, remaining, 0.0, ARMS, {ARM: hint}))
    return BatchView(step, tuple(made), 10_000)


def belief(
    requests: int,
    *,
    accepted: float = 0.7,
    round_seconds: float = 0.4,
    looked_up: float = 0.0,
    per_kv_token: float = 0.0,
) -> Belief:
    """One draft token; a plain step of four takes 1.04 s, catching up with a prompt 0.8."""
    rounds = {"ngram": (0.0, 0.0, 0.0), ARM: (round_seconds, 0.0, per_kv_token)}
    cost = DrawnCost("linear", 1.0, 0.01, 1, 0.0, rounds, per_catch_up_token=0.001)
    rates = {"ngram": looked_up, ARM: accepted}
    return Belief({arm: np.full((requests, 1), rate) for arm, rate in rates.items()}, cost)


def proven() -> Stretches:
    """After enough tokens that came of drafts after a catch-up."""
    stretches = Stretches()
    choices, view = (Choice.of(ARM, 1),), view_of([(0, 400)])
    for _ in range(8):
        ones, timing = (1,), Timing({ARM: 1.0}, 1.0)
        stretches.update(Observation(view, Plan(choices), ones, ones, ones, (2,), timing))
    stretches.most_drafts = 4  # so that what they take is known
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
    """After enough looks at these."""
    view, believed, stretches = view_of(requests), belief(len(requests), **told), proven()
    taking_up = TakingUp(stretches)
    look_at(taking_up, view, believed, times=3)
    assert taking_up.arm == ""  # one step says little
    look_at(taking_up, view, believed)
    return taking_up, view, believed, stretches


def look_at(taking_up: TakingUp, view: BatchView, believed: Belief, times: int = 1) -> None:
    """In so many steps, the next ones that are looked at."""
    for _ in range(times):
        now = replace(view, step=next(STEPS))
        taking_up.looks(now, 1.0)
        taking_up.priced(now, problem_of(now, believed, taking_up.stretches))


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
    # The rate of all over 4 / 1.04: 1.17; 1.025 and 1.018; a round of 0.6 s 1.034, of 0.65 s 1.005.
    [
        (0.7, 0.4, True),
        (0.485, 0.4, True),
        (0.475, 0.4, False),
        (0.7, 0.6, True),
        (0.7, 0.65, False),
    ],
)
def test_it_has_to_be_better_by_two_hundredths(
    accepted: float, round_seconds: float, begins: bool
) -> None:
    told = {"accepted": accepted, "round_seconds": round_seconds}
    assert bool(taken_up([NEW, OLD, OLD, OLD], **told)[0].arm) == begins


@pytest.mark.parametrize(("most_drafts", "begins"), [(1, True), (2, False)])
def test_draft_tokens_are_hoped_to_take_less_until_a_step_had_many(
    most_drafts: int, begins: bool
) -> None:
    """1.018 with 0.01 s for each of four; half of that is 2 % of the step."""
    taking_up = TakingUp(proven())
    taking_up.stretches.most_drafts = most_drafts
    look_at(taking_up, view_of([NEW, OLD, OLD, OLD]), belief(4, accepted=0.475), times=4)
    assert bool(taking_up.arm) == begins


def test_drafts_that_do_not_come_spare_no_more_than_tokens_are_hoped_to_take() -> None:
    view, taking_up = view_of([NEW, OLD, OLD, OLD]), TakingUp(proven())
    taking_up.stretches.most_drafts = 0
    problem = problem_of(view, belief(4), taking_up.stretches)
    spared = problem._replace(reading=problem.reading - 0.009)  # nine in ten, of 0.01 s a token
    hoped = taking_up._with_hoped_tokens(spared)
    assert (np.diff(hoped.verify) + hoped.reading.min() > 0.0).all()


def test_it_is_not_asked_where_there_is_no_steady_state_or_no_need() -> None:
    all_of_them = [NEW, OLD, OLD, OLD]
    taking_up = TakingUp(proven())
    assert taking_up.looks(view_of(all_of_them), 1.0)
    assert not taking_up.looks(view_of(all_of_them), 0.2)  # a batch that nothing follows
    assert not taking_up.looks(view_of(all_of_them, step=33), 1.0)
    assert not taking_up.looks(view_of(all_of_them, caught_up=3), 1.0)
    assert not TakingUp(Stretches()).looks(view_of(all_of_them), 1.0)  # nothing is known of it


@pytest.mark.parametrize("per_kv_token", [1e-5, 1e-3])
def test_short_contexts_beside_a_long_one_pay_for_their_rounds(per_kv_token: float) -> None:
    """Half of what an average request adds to a round, less what it reads less than that one, were gains: a step
    was believed to be quicker with drafts of three short ones, or to take no time, which is no plan.
    """
    told = {"accepted": 0.05, "round_seconds": 0.2, "per_kv_token": per_kv_token}
    view, believed = view_of([(100_000, 200), NEW, NEW, NEW]), belief(4, **told)
    taking_up = TakingUp(proven())
    look_at(taking_up, view, believed, times=8)
    assert taking_up.arm == ""


def test_runs_of_looked_up_text_are_averaged_out() -> None:
    """A draft model would bring 2.5 % in every other step, and nothing beside look-ups in the others."""
    view, taking_up = view_of([NEW, OLD, OLD, OLD]), TakingUp(proven())
    for _ in range(20):
        look_at(taking_up, view, belief(4, accepted=0.485, looked_up=0.9))
        look_at(taking_up, view, belief(4, accepted=0.485))
    assert taking_up.arm == ""


def test_it_ends_with_the_last_one_that_was_there() -> None:
    taking_up, _, believed, _ = taken_up([NEW, OLD, OLD, OLD])
    for prefix, arm in (("", ARM), ("next ", "")):
        look_at(taking_up, view_of([NEW] * 4, step=64, prefix=prefix), believed)
        assert taking_up.arm == arm


def test_it_ends_where_names_are_used_again_and_prompts_are_computed_in_every_step() -> None:
    """At the latest when the one with most to go, 200 tokens, must have gone: 26 looks."""
    taking_up, _, believed, _ = taken_up([NEW, OLD, OLD, OLD])
    view = replace(view_of([NEW] * 4), prefill_tokens=8)
    look_at(taking_up, view, believed, times=25)
    assert taking_up.arm == ARM
    look_at(taking_up, view, believed)
    assert taking_up.arm == ""


def test_rounds_are_hoped_to_take_less_for_many_until_many_shared_one() -> None:
    """A request more is believed to add 0.1 s to 0.4 s, and hoped to add half of that."""
    taking_up, view, believed, stretches = taken_up([NEW, OLD, OLD, OLD])
    problem = problem_of(view, believed, stretches)
    steeper = problem.rounds + np.array([[0.0], [1.0], [0.0]]) * [0.0, 0.0, 0.1, 0.2, 0.3, 0.4]
    steep = problem._replace(rounds=steeper)
    assert taking_up.priced(view, steep).rounds[1, 4] == pytest.approx(0.4 + 0.15)
    timing = Timing({ARM: 0.7}, 1.0)
    for users, price in ((1, 0.55), (2, 0.7)):
        choices = (Choice.of(ARM, 1),) * users + (Choice(None, 0),) * (4 - users)
        drafted = (1,) * users + (0,) * (4 - users)
        emitted = tuple(1 + n for n in drafted)
        stretches.update(
            Observation(view, Plan(choices), drafted, drafted, drafted, emitted, timing)
        )
        assert taking_up.priced(view, steep).rounds[1, 4] == pytest.approx(price)


def test_it_ends_where_it_turns_out_to_bring_nothing() -> None:
    """Fewer are accepted than was believed; and next time more is asked of it."""
    taking_up, view, believed, _ = taken_up([NEW, OLD, OLD, OLD])
    fewer = belief(4, accepted=0.2)
    look_at(taking_up, view, fewer, times=3)
    assert taking_up.arm == ARM
    look_at(taking_up, view, fewer)
    assert taking_up.arm == ""
    look_at(taking_up, view, belief(4, accepted=0.5), times=8)
    assert taking_up.arm == ""  # 3.5 % would have been enough before
    look_at(taking_up, view, believed, times=4)
    assert taking_up.arm == ARM


@pytest.mark.parametrize(("accepted", "arm"), [(0.7, ARM), (0.2, "")])
def test_no_more_is_asked_of_it_where_most_go_on_by_themselves(accepted: float, arm: str) -> None:
    """Then nobody has caught up again, as where batches come all at once: 3.5 % are enough as before."""
    taking_up, _, _, _ = taken_up([NEW, OLD, OLD, OLD])
    later = view_of([NEW] * 4, caught_up=4, prefix="next ")
    look_at(taking_up, later, belief(4, accepted=accepted))
    assert taking_up.arm == ""
    look_at(taking_up, view_of([NEW, OLD, OLD, OLD]), belief(4, accepted=0.5), times=8)
    assert taking_up.arm == arm


def test_where_all_have_caught_up_nothing_says_that_it_brings_nothing() -> None:
    taking_up, _, _, _ = taken_up([NEW, OLD, OLD, OLD])
    look_at(taking_up, view_of([NEW, OLD, OLD, OLD], caught_up=4), belief(4, accepted=0.2), times=8)
    assert taking_up.arm == ARM


def test_requests_may_leave_and_arms_may_go_meanwhile() -> None:
    taking_up, _, _, stretches = taken_up([NEW, OLD, OLD, OLD])
    fewer = view_of([NEW, OLD], step=33)
    problem = problem_of(fewer, belief(2), stretches)
    priced = taking_up.priced(fewer, problem)
    assert priced.rounds[1, 1] == pytest.approx(0.2)  # each of two
    assert (priced.rounds[:, 2:] == problem.rounds[:, 2:]).all()
    other = problem._replace(arms=("ngram", "other_model"))
    assert taking_up.priced(fewer, other) is other


def test_a_plan_says_so() -> None:
    policy, view, off = Goodput(0.0), view_of([NEW, OLD, OLD, OLD]), (0,) * 4
    policy.stretches, policy.taking_up = (known := proven()), TakingUp(known)
    timing = Timing({}, 1.04)
    policy.update(Observation(view, Plan.off(view), off, off, off, (1,) * 4, timing))
    for _ in range(4):
        plan = policy.plan(replace(view, step=next(STEPS)), belief(4))
    assert "draft_model is taken up by all" not in plan.reason  # so far nobody was followed
    policy.worth = None
    for _ in range(4):
        plan = policy.plan(replace(view, step=next(STEPS)), belief(4))
    assert "draft_model is taken up by all" in plan.reason
    assert [choice.drafter for choice in plan.choices] == [ARM, None, None, None]


def test_a_step_that_is_planned_again_counts_once() -> None:
    """With its last plan: those that went before leave nothing."""
    policy, view, others = Goodput(0.0), view_of([NEW, OLD, OLD, OLD]), belief(4, accepted=0.3)
    policy.stretches, policy.worth = proven(), None
    policy.taking_up = TakingUp(policy.stretches)
    for _ in range(3):
        step = next(STEPS)
        for believed in (others, belief(4), others, belief(4)):
            plan = policy.plan(replace(view, step=step), believed)
            assert not policy.taking_up.arm
    step = next(STEPS)
    for believed, arm in ((belief(4), ARM), (others, ""), (belief(4), ARM)):
        plan = policy.plan(replace(view, step=step), believed)
        assert policy.taking_up.arm == arm
        assert ("is taken up by all" in plan.reason) == bool(arm)
