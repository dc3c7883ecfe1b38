"""One compiled call answers what the steps one by one answer."""

from dataclasses import replace

import numpy as np
import pytest

from sdcontrol.columns import columns_of
from sdcontrol.controller import Controller
from sdcontrol.core import (
    BatchView,
    Belief,
    Choice,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
    family_of,
)
from sdcontrol.errors import PlanError
from sdcontrol.policies.at_once import answer_at_once, refine_at_once
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.problem import Answer, Problem
from sdcontrol.policies.prompts import Prompts
from sdcontrol.policies.reading import least_seconds, read, read_drafted
from sdcontrol.policies.weighing import SAME, Pace, tokens_of, weigh_all

ARMS = ("draft_model", "ngram", "sparse_kv:128", "ngram:b", "sparse_kv:64")
HORIZON = (64.0, 64.0, 1.0, 0.01)


def drawn_view(rng: np.random.Generator, step: int, batch: int) -> BatchView:
    """Requests with menus and hints of their own, some that may not draft at all."""
    requests = []
    for r in range(batch):
        menu = tuple(arm for arm in ARMS if rng.random() < 0.8) if rng.random() < 0.5 else ARMS
        hints = {
            "ngram": Hint(int(rng.integers(0, 20)), int(rng.integers(0, 30))),
            "draft_model": Hint(None, None, None, int(rng.integers(0, 50))),
            "sparse_kv:64": Hint(confidence=float(rng.random())),
        }
        told = {arm: hint for arm, hint in hints.items() if rng.random() < 0.7}
        left = int(rng.choice([1, 2, 5, 500]))
        requests.append(
            RequestView(str(r), int(rng.integers(8, 4000)), step, left, 0.0, menu, told)
        )
    return BatchView(step, tuple(requests), int(rng.choice([0, 3, 40, 10000])))


def drawn_pace(step: int, batch: int) -> Pace:
    """Requests that came at any time, and are replaced or not; now and then nothing is known."""
    rng = np.random.default_rng((step, batch))
    if rng.random() < 0.3:
        return SAME
    came, left = rng.integers(0, step + 1, batch), 500 + rng.integers(0, 4 * step + 1, batch)
    facts = float(step), rng.uniform(1.0, 5.0), rng.uniform(0.0, 6.0), rng.uniform(0.0, 0.9)
    last = rng.uniform(1.0, 5.0), rng.uniform(0.5, 1.0)
    kept = {family: rng.uniform(0.0, 1.0) for family in ("ngram", "draft_model")}
    return Pace(came.astype(np.float64), left.astype(np.float64), (*facts, *last), kept)


def weighed(problem: Problem, view: BatchView, belief: Belief, pace: Pace) -> Problem:
    least = least_seconds(problem, view, belief.cost)
    return weigh_all(problem, least, columns_of(view).remaining_tokens, pace)


def one_by_one(problem: Problem, view: BatchView, belief: Belief, pace: Pace) -> Answer:
    answer = maximise(weighed(problem, view, belief, pace))
    return answer._replace(gain=tokens_of(problem, answer))


def outcome(rng: np.random.Generator, controller: Controller, view: BatchView) -> Observation:
    """The controller's plan, accepted and timed at random."""
    plan = controller.plan(view)
    lengths = tuple(choice.num_draft_tokens for choice in plan.choices)
    accepted = tuple(int(rng.integers(0, n + 1)) for n in lengths)
    emitted = tuple(n + 1 for n in accepted)
    drafting = {
        family_of(c.drafter): float(rng.uniform(1e-3, 4e-3)) for c in plan.choices if c.drafter
    }
    timing = Timing(drafting, float(rng.uniform(5e-3, 2e-2)), 1e-4, 1e-4)
    return Observation(view, plan, lengths, lengths, accepted, emitted, timing)


@pytest.mark.parametrize("edges", [(), (8, 16, 32, 64, 128)])
@pytest.mark.parametrize("batch", [1, 2, 5, 17])
def test_one_call_answers_what_the_steps_one_by_one_answer(
    batch: int, edges: tuple[int, ...]
) -> None:
    rng, num_answered = np.random.default_rng(batch), 0
    controller = Controller("goodput", token_edges=edges, clock=None)
    for step in range(60):
        view = drawn_view(rng, step, batch)
        belief = controller.belief(view)
        pace = drawn_pace(step, batch)
        answered = answer_at_once(view, belief, HORIZON, pace)
        problem = read(view, belief, HORIZON)
        if answered is None:
            assert problem is None
            continue
        num_answered += 1
        assert problem is not None
        expected, answer = one_by_one(problem, view, belief, pace), answered.answer
        assert answered.arms == problem.arms
        assert answered.lengths == problem.lengths
        assert answer.arm.tolist() == expected.arm.tolist()
        assert answer.length.tolist() == expected.length.tolist()
        assert answer[2:] == pytest.approx(expected[2:], rel=1e-12)
        first, last, most = answered.prices
        assert first == pytest.approx(problem.verify[0], rel=1e-12)
        assert last == pytest.approx(problem.verify[-1], rel=1e-12)
        assert most == len(problem.verify) - 1
        controller.observe(outcome(rng, controller, view))
    assert num_answered > 40


@pytest.mark.parametrize("batch", [1, 3, 17])
def test_one_call_refines_as_the_steps_one_by_one_do(batch: int) -> None:
    """After some of a plan is drafted, with confidences that come with it or do not."""
    rng, num_shortened = np.random.default_rng(batch), 0
    controller = Controller("goodput", token_edges=(8, 16, 32, 64), clock=None)
    for step in range(60):
        view = drawn_view(rng, step, batch)
        plan = plan_of(rng, view)
        drafted = [int(rng.integers(0, c.num_draft_tokens + 1)) for c in plan.choices]
        confidence = tuple(tuple(rng.random(n).tolist()) for n in drafted)
        belief = controller.belief(view)
        survival = controller.acceptance.condition(view, plan, confidence, belief.survival)
        slowly = controller.acceptance.condition(view, plan, confidence, dict(belief.survival))
        for arm in slowly:
            np.testing.assert_allclose(survival[arm], slowly[arm], rtol=1e-12)
        given = Belief(survival, belief.cost)
        pace = drawn_pace(step, batch)
        lengths = refine_at_once(view, plan, drafted, given, pace)
        problem = read_drafted(view, plan, drafted, Belief(slowly, belief.cost))
        if plan.is_off or problem is None:
            assert lengths is None
        else:
            answer = maximise(weighed(problem, view, belief, pace))
            assert lengths == answer.length.tolist()
            num_shortened += lengths != [c.num_draft_tokens for c in plan.choices]
        controller.observe(outcome(rng, controller, view))
    assert num_shortened > 10


def plan_of(rng: np.random.Generator, view: BatchView) -> Plan:
    """What requests may use, at random lengths."""
    choices = []
    for request in view.requests:
        arm = rng.choice([*request.drafters, ""])
        most = min(request.remaining_tokens - 1, 6)
        length = int(rng.integers(0, most + 1)) if arm else 0
        choices.append(Choice.of(str(arm), length) if length else Choice.off())
    return Plan(tuple(choices))


def beside_prompt(view: BatchView, rng: np.random.Generator) -> BatchView:
    """The same beside a prompt, others waiting or not."""
    tokens, waiting = int(rng.integers(1, 400)), bool(rng.random() < 0.5)
    return replace(view, prefill_tokens=tokens, others_wait=waiting)


@pytest.mark.parametrize("steps_with_prompts", [0, 200])
@pytest.mark.parametrize("batch", [2, 17])
def test_one_call_answers_beside_a_prompt_what_the_steps_one_by_one_answer(
    batch: int, steps_with_prompts: int
) -> None:
    """The price of a second is that of the step without the prompt, or more where prompts set the pace."""
    rng, differ, num_answered = np.random.default_rng(batch), 0, 0
    controller = Controller("goodput", token_edges=(8, 16, 64), clock=None)
    prompts = Prompts()
    for step in range(steps_with_prompts):
        prompts.update(outcome(rng, controller, beside_prompt(drawn_view(rng, step, batch), rng)))
    for step in range(40):
        view = beside_prompt(drawn_view(rng, step, batch), rng)
        belief = controller.belief(view)
        problem = read(view, belief, HORIZON)
        answered = answer_at_once(view, belief, HORIZON, prompts=prompts)
        if problem is None:
            assert answered is None
            continue
        assert answered is not None
        expected = maximise(problem, prompts.rate(view, problem, belief.cost))
        assert answered.answer.length.tolist() == expected.length.tolist()
        assert answered.answer[2:] == pytest.approx(expected[2:], rel=1e-12)
        num_answered += 1
        differ += expected.length.tolist() != maximise(problem).length.tolist()
        controller.observe(outcome(rng, controller, view))
    assert num_answered > 30
    assert differ > 0


@pytest.mark.parametrize("steps_with_prompts", [0, 200])
def test_one_call_refines_beside_a_prompt_as_the_steps_one_by_one_do(
    steps_with_prompts: int,
) -> None:
    rng, num_shortened = np.random.default_rng(3), 0
    controller = Controller("goodput", clock=None)
    prompts = Prompts()
    for step in range(steps_with_prompts):
        prompts.update(outcome(rng, controller, beside_prompt(drawn_view(rng, step, 4), rng)))
    for step in range(60):
        view = beside_prompt(drawn_view(rng, step, 4), rng)
        plan = plan_of(rng, view)
        drafted = [int(rng.integers(0, c.num_draft_tokens + 1)) for c in plan.choices]
        confidence = tuple(tuple(rng.random(n).tolist()) for n in drafted)
        belief = controller.belief(view)
        survival = controller.acceptance.condition(view, plan, confidence, belief.survival)
        given = Belief(survival, belief.cost)
        lengths = refine_at_once(view, plan, drafted, given, prompts=prompts)
        problem = read_drafted(view, plan, drafted, given)
        if plan.is_off or problem is None:
            assert lengths is None
        else:
            expected = maximise(problem, prompts.rate(view, problem, belief.cost))
            assert lengths == expected.length.tolist()
            num_shortened += lengths != [c.num_draft_tokens for c in plan.choices]
        controller.observe(outcome(rng, controller, view))
    assert num_shortened > 10


def test_what_a_plan_believed_is_what_its_refinement_sees() -> None:
    """It is not computed again, and conditioning does not change it."""
    rng, controller = np.random.default_rng(5), Controller("goodput", clock=None)
    for step in range(20):
        controller.observe(outcome(rng, controller, drawn_view(rng, step, 6)))
    view = drawn_view(rng, 20, 6)
    fresh = controller.acceptance.survival(view, controller.max_draft_tokens)
    survival = controller.acceptance.believed(view, controller.max_draft_tokens)
    assert answer_at_once(view, Belief(survival, controller.cost), HORIZON) is not None
    plan = plan_of(rng, view)
    confidence = tuple(tuple(rng.random(c.num_draft_tokens).tolist()) for c in plan.choices)
    conditioned = controller.acceptance.condition(view, plan, confidence, survival)
    afresh = controller.acceptance.condition(view, plan, confidence, fresh)
    for arm in fresh:
        np.testing.assert_array_equal(survival[arm], fresh[arm])
        np.testing.assert_array_equal(conditioned[arm], afresh[arm])


def test_other_beliefs_are_left_to_the_steps_one_by_one() -> None:
    rng, controller = np.random.default_rng(0), Controller("goodput", clock=None)
    view = drawn_view(rng, 0, 3)
    belief = controller.belief(view)
    assert answer_at_once(view, belief, HORIZON) is not None
    assert answer_at_once(view, Belief(dict(belief.survival), belief.cost), HORIZON) is None


def test_a_policy_around_ours_may_show_it_other_views_than_the_belief_is_of() -> None:
    """Terms are read by row: what a view has not must not be looked for there."""
    rng, controller, ours = np.random.default_rng(0), Controller("goodput", clock=None), Goodput()
    for step in range(30):
        view = drawn_view(rng, step, 6)
        belief = controller.belief(view)
        looked_up = tuple(replace(one, drafters=("ngram",)) for one in view.requests)
        narrow = replace(view, requests=looked_up)
        plan = ours.plan(narrow, belief)
        plan.check(narrow)
        assert plan == Goodput().plan(narrow, Belief(dict(belief.survival), belief.cost))
        confidence = tuple((0.2,) * choice.num_draft_tokens for choice in plan.choices)
        given = controller.acceptance.condition(view, plan, confidence, belief.survival)
        drafted = [choice.num_draft_tokens for choice in plan.choices]
        told = Belief(given, belief.cost)
        assert refine_at_once(narrow, plan, drafted, told) is None
        ours.refine(narrow, plan, confidence, told).check(narrow)
        if view.free_kv_tokens:
            with pytest.raises(PlanError, match=r"6, 16.*for 2 requests"):
                ours.plan(replace(view, requests=view.requests[:2]), belief)
        controller.observe(outcome(rng, controller, view))
