"""Each rival follows its own rule: checked against the rule worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from sdcontrol import policies
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Belief, Observation, Plan, RequestView, Timing
from sdcontrol.engine.loop import Engine
from sdcontrol.errors import ConfigError
from sdcontrol.policies.checks import ToyCost, check_policy
from sdcontrol.policies.rivals.budget_argmax import BudgetArgmax
from sdcontrol.policies.rivals.ema_steps import EmaSteps, _moved
from sdcontrol.policies.rivals.heuristic import Heuristic
from sdcontrol.policies.rivals.smartspec import SmartSpec
from sdcontrol.policies.rivals.throughput_aware import ThroughputAware, _next
from tests.engine_support import run_checked, tiny_model

ARM = "draft_model"


def view_of(batch: int, remaining: int = 1000, arms: tuple[str, ...] = (ARM,)) -> BatchView:
    requests = tuple(RequestView(str(r), 500, 7, remaining, drafters=arms) for r in range(batch))
    return BatchView(0, requests, free_kv_tokens=10_000)


def belief_of(batch: int, cost: object = None) -> Belief:
    return Belief({ARM: np.full((batch, 8), 0.5)}, cost or ToyCost())  # type: ignore[arg-type]


def observed(
    view: BatchView,
    plan: Plan,
    accepted: tuple[int, ...],
    seconds: float = 0.01,
    confidence: tuple[tuple[float, ...], ...] | None = None,
) -> Observation:
    lengths = tuple(choice.num_draft_tokens for choice in plan.choices)
    return Observation(
        view=view,
        plan=plan,
        drafted=lengths,
        proposed=lengths,
        accepted=accepted,
        emitted=tuple(n + 1 for n in accepted),
        timing=Timing(verify_seconds=seconds),
        confidence=confidence,
    )


def lengths(plan: Plan) -> list[int]:
    return [choice.num_draft_tokens for choice in plan.choices]


@pytest.mark.parametrize(("batch", "tokens"), [(1, 6), (2, 6), (3, 2), (8, 2), (9, 0)])
def test_concurrency_schedule_reads_its_table(batch: int, tokens: int) -> None:
    policy = policies.build({"kind": "concurrency_schedule", "schedule": {8: 2, 2: 6}})
    assert lengths(policy.plan(view_of(batch), belief_of(batch))) == [tokens] * batch


def test_a_schedule_of_impossible_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch sizes"):
        policies.build({"kind": "concurrency_schedule", "schedule": {0: 4}})


def test_heuristic_adds_two_when_all_were_accepted_and_else_takes_one() -> None:
    policy = Heuristic(ARM, initial_tokens=5, max_tokens=8)
    view, belief = view_of(2), belief_of(2)
    assert lengths(policy.plan(view, belief)) == [5, 5]
    policy.update(observed(view, policy.plan(view, belief), (5, 4)))
    assert lengths(policy.plan(view, belief)) == [7, 4]
    policy.update(observed(view, policy.plan(view, belief), (7, 0)))
    assert lengths(policy.plan(view, belief)) == [8, 3]
    for _ in range(9):
        policy.update(observed(view, policy.plan(view, belief), (0, 0)))
    assert lengths(policy.plan(view, belief)) == [1, 1]


def test_smartspec_moves_its_rate_by_15_percent_to_the_share_accepted_so_far() -> None:
    """Of the drafts that were reached: three after a rejection say nothing of themselves."""
    policy = SmartSpec(ARM, max_tokens=8)
    view = view_of(2)
    policy.update(observed(view, Plan.uniform(view, ARM, 4), (4, 0)))
    first = 0.85 * 0.7 + 0.15 * 4 / 5
    assert policy._acceptance == pytest.approx(first)
    policy.update(observed(view, Plan.off(view), (0, 0)))
    assert policy._acceptance == pytest.approx(first)
    policy.update(observed(view, Plan.uniform(view, ARM, 2), (0, 1)))
    assert policy._acceptance == pytest.approx(0.85 * first + 0.15 * 5 / 8)


class PerRound(ToyCost):
    """A step of 1 and what each drafting round takes; tokens are free."""

    def __init__(self, round_seconds: float) -> None:
        self.round_seconds = round_seconds

    def verify_seconds(self, num_tokens, kv_tokens, num_requests):  # type: ignore[no-untyped-def]
        return np.ones_like(np.asarray(num_tokens, dtype=float))

    def draft_seconds(self, family, num_requests, kv_tokens):  # type: ignore[no-untyped-def]
        return np.asarray(self.round_seconds)

    def overhead_seconds(self) -> float:
        return 0.0


def test_smartspec_decides_every_20_steps_by_goodput_with_a_bonus_for_off() -> None:
    """Step time 1 + 0.3 k: with everything rejected it turns off, and only after 20 steps."""
    policy = SmartSpec(ARM, max_tokens=4)
    view, belief = view_of(1), belief_of(1, PerRound(0.3))
    first = lengths(policy.plan(view, belief))
    assert first[0] > 0
    for _ in range(20):
        plan = policy.plan(view, belief)
        assert lengths(plan) == first
        policy.update(observed(view, plan, (0,)))
    assert lengths(policy.plan(view, belief)) == [0]


def test_smartspec_finds_the_length_of_its_own_formula() -> None:
    """Step 1 + 0.1 k, a = 0.83: the first descent of (1 - a^(k+1)) / (1 - a) / step."""
    policy = SmartSpec(ARM, max_tokens=8)
    policy._acceptance = a = 0.83
    value = [(1 - a ** (k + 1)) / (1 - a) / (1 + 0.1 * k) for k in range(9)]
    value[0] *= 1.1
    expected = next(k for k in range(8) if value[k + 1] < value[k])
    assert lengths(policy.plan(view_of(1), belief_of(1, PerRound(0.1)))) == [expected]
    assert 1 < expected < 8


def test_smartspec_counts_a_token_of_those_that_cannot_draft() -> None:
    """A round of half a step pays for one request alone, and not where three others wait for it."""
    policy = SmartSpec(ARM, max_tokens=1)
    able, others = view_of(1), view_of(3, arms=())
    named = tuple(replace(one, id=f"other-{one.id}") for one in others.requests)
    view = replace(able, requests=(*able.requests, *named))
    assert policy.plan(able, belief_of(1, PerRound(0.5))).choices[0].num_draft_tokens == 1
    assert policy.plan(view, belief_of(4, PerRound(0.5))).is_off


def test_smartspec_that_nobody_could_follow_decides_in_the_next_step() -> None:
    policy = SmartSpec(ARM, max_tokens=4)
    belief = belief_of(1, PerRound(0.1))
    alone = view_of(1, remaining=1)
    plan = policy.plan(alone, belief)
    policy.update(observed(alone, plan, (0,)))
    assert not policy.plan(view_of(1), belief).is_off


@pytest.mark.parametrize("speed", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_smartspec_drafts_where_that_pays_however_fast_the_machine_is(
    speed: float, batch: int
) -> None:
    """Nobody told it of the machine: drafts of four are worth twice what their time costs."""
    controller, truth = Controller({"kind": "smartspec", "drafter": ARM}, clock=None), ToyCost()
    generator, goodputs = np.random.default_rng(1), {}
    view = view_of(batch)
    for step in range(120):
        view = replace(view, step=step)
        plan = controller.plan(view)
        k = max(lengths(plan))
        verify = float(truth.verify_seconds(batch * (1 + k), 500 * batch, batch)) / speed
        drafting = (
            {ARM: k * float(truth.draft_seconds(ARM, batch, 500 * batch)) / speed} if k else {}
        )
        runs = generator.geometric(0.2, batch) - 1  # accepted with 0.8
        accepted = tuple(int(min(run, k)) for run in runs)
        one = observed(view, plan, accepted)
        controller.observe(replace(one, timing=Timing(drafting, verify, 0.0, 1e-4 / speed)))
        goodputs[step] = k
    later = [goodputs[step] for step in range(40, 120)]
    assert min(later) >= 2


def test_smartspec_learns_nothing_by_planning() -> None:
    """A plan of another view in between changes no later one."""
    plain, asked = SmartSpec(ARM, max_tokens=8), SmartSpec(ARM, max_tokens=8)
    view, belief = view_of(2), belief_of(2)
    asked.plan(view_of(40), belief_of(40))
    for _ in range(45):
        plan, other = plain.plan(view, belief), asked.plan(view, belief)
        assert plan == other
        k = lengths(plan)[0]
        for policy in (plain, asked):
            policy.update(observed(view, plan, (k // 2,) * 2))


def test_ema_steps_waits_10_batches_and_then_looks_every_5() -> None:
    policy = EmaSteps(ARM, {64: (1, 2, 3, 4, 5)}, initial_tokens=3)
    view, belief = view_of(2), belief_of(2)
    seen = []
    for _ in range(20):
        seen.append(lengths(policy.plan(view, belief))[0])
        policy.update(observed(view, Plan.uniform(view, ARM, seen[-1]), (0, 0)))
    assert seen == [3] * 15 + [1] * 5


@pytest.mark.parametrize(
    ("mean", "before", "after"),
    [(2.6, 3, 4), (2.4, 3, 3), (1.4, 3, 3), (1.2, 3, 2), (4.9, 3, 5), (0.0, 5, 1)],
)
def test_ema_steps_rounds_with_hysteresis_downwards(mean: float, before: int, after: int) -> None:
    """round(ema) + 1 upwards; a shorter length only 0.25 below where it would have been left."""
    assert _moved((1, 2, 3, 4, 5), before, mean) == after


def all_accepted(
    policy: EmaSteps | ThroughputAware, batch: int, steps: int, share: float = 1.0
) -> list[int]:
    """The lengths of so many steps in which that share of every draft is accepted."""
    seen = []
    view, belief = view_of(batch), belief_of(batch)
    for _ in range(steps):
        plan = policy.plan(view, belief)
        seen.append(max(lengths(plan)))
        accepted = tuple(int(share * n) for n in lengths(plan))
        policy.update(observed(view, plan, accepted))
    return seen


def test_ema_steps_learns_for_every_row_of_batch_sizes_apart() -> None:
    """What small batches accept moves nothing for large ones, which have their own warm-up."""
    policy = EmaSteps(ARM, {2: (1, 3, 5), 64: (1, 3, 5)}, initial_tokens=3)
    assert all_accepted(policy, 1, 21)[-1] == 5
    assert all_accepted(policy, 8, 16, share=0.0) == [3] * 15 + [1]
    assert all_accepted(policy, 1, 1) == [5]


def test_ema_steps_without_drafts_looks_again_after_5_batches() -> None:
    """Off is no dead end, be it for a beginning or since nothing was accepted."""
    policy = EmaSteps(ARM, {64: (0, 1, 3)}, initial_tokens=0)
    seen = all_accepted(policy, 4, 40)
    assert seen[:15] == [0] * 15
    assert seen[-1] == 3
    seen = all_accepted(policy, 4, 80, share=0.0)
    assert seen.count(0) > 30
    assert seen.count(1) > 10
    assert set(seen[-20:]) == {0, 1}


def test_ema_steps_keeps_to_the_candidates_of_the_batch_size() -> None:
    policy = EmaSteps(ARM, {2: (1, 5), 64: (2,)}, initial_tokens=4)
    assert lengths(policy.plan(view_of(1), belief_of(1))) == [5]
    assert lengths(policy.plan(view_of(8), belief_of(8))) == [2] * 8
    assert lengths(policy.plan(view_of(99), belief_of(99))) == [2] * 99


def test_throughput_aware_waits_for_20_batches_and_then_looks_every_5() -> None:
    """Tokens are free up to a ridge: all are wanted as soon as every position was seen often enough."""
    policy = ThroughputAware(ARM, {64: (1, 3, 5, 7)}, initial_tokens=3, context_tokens=128)
    assert all_accepted(policy, 2, 50) == [3] * 20 + [7] * 30


def test_throughput_aware_takes_the_best_score_of_its_table() -> None:
    """Worked out by hand: 1 of 3 drafts accepted everywhere, at 1 s up to 4 tokens and 0.4 s for each more."""
    policy = ThroughputAware(ARM, {64: (1, 3, 5, 7)}, initial_tokens=3, context_tokens=128)
    cost, view = FreeRounds(), view_of(2)
    for _ in range(20):
        plan = policy.plan(view, belief_of(2, cost))
        assert lengths(plan) == [3, 3]
        policy.update(observed(view, plan, (3, 0)))
    scores = policy._scores(view, ARM, (1, 3, 5, 7), belief_of(2, cost))
    seconds = [float(cost.verify_seconds(2.0 * (1 + k), 0.0, 2)) for k in (1, 3, 5, 7)]
    expected = [2.0 * (1 + 0.5 * k) for k in (1, 3, 5, 7)]
    overhead = cost.overhead_seconds()
    assert scores == pytest.approx(
        [n / (s + overhead) for n, s in zip(expected, seconds, strict=True)]
    )
    assert lengths(policy.plan(view, belief_of(2, cost))) == [1, 1]


def test_throughput_aware_stays_unless_another_length_is_a_tenth_better() -> None:
    policy = ThroughputAware(ARM, {64: (2, 3)}, initial_tokens=2, context_tokens=128)
    view, belief = view_of(1), belief_of(1, FreeRounds())
    for step in range(40):  # 3 tokens a step, and 4 if it drafted one more: all of it is accepted
        plan = policy.plan(view, belief)
        assert lengths(plan) == [2 if step < 20 else 3]
        policy.update(observed(view, plan, (lengths(plan)[0],)))
    few = ThroughputAware(ARM, {64: (2, 3)}, initial_tokens=2, context_tokens=128)
    for turn in range(40):  # a tenth of all drafts: 1.3 tokens a step instead of 1.2
        plan = few.plan(view, belief)
        assert lengths(plan) == [2]
        few.update(observed(view, plan, (2 * (turn % 10 == 0),)))


def test_throughput_aware_forgets_longer_drafts_when_it_drafts_less() -> None:
    policy = ThroughputAware(ARM, {64: (1, 3)}, initial_tokens=3, context_tokens=128)
    view, belief = view_of(4), belief_of(4, FreeRounds())
    for _ in range(21):
        plan = policy.plan(view, belief)
        policy.update(observed(view, plan, (0,) * 4))
    assert lengths(plan) == [1] * 4
    assert [len(shares) for shares in policy._shares] == [20, 0, 0]


def test_throughput_aware_keeps_to_the_candidates_of_the_batch_size() -> None:
    """At once, by the best score; where nothing is known, by the one in the middle."""
    rows = {2: (1, 3), 64: (5, 6, 7)}
    policy = ThroughputAware(ARM, rows, initial_tokens=3, context_tokens=128)
    assert lengths(policy.plan(view_of(1), belief_of(1))) == [3]
    assert lengths(policy.plan(view_of(8), belief_of(8))) == [6] * 8
    assert lengths(policy.plan(view_of(99), belief_of(99))) == [6] * 99
    assert all_accepted(policy, 1, 1) == [3]
    assert lengths(policy.plan(view_of(8), belief_of(8))) == [7] * 8


@pytest.mark.parametrize(
    ("shares", "after"),
    [
        ([], 0.0),
        ([0.8], 0.8),
        ([0.8, 0.4], 0.2),
        ([0.9, 0.5, 0.1], 0.1 / 3),
        ([0.0, 0.0], 0.0),
        ([0.4, 0.5], 0.5),  # never more than the last
    ],
)
def test_positions_that_nobody_drafted_follow_as_a_geometric_series(
    shares: list[float], after: float
) -> None:
    assert _next(shares) == pytest.approx(after)


class PerToken(ToyCost):
    """A step of 1 + 0.4 per token beyond the fourth."""

    def verify_seconds(self, num_tokens, kv_tokens, num_requests):  # type: ignore[no-untyped-def]
        return np.asarray(1.0 + 0.4 * np.maximum(np.asarray(num_tokens) - 4.0, 0.0))


class FreeRounds(PerToken):
    """Drafting takes no time."""

    def draft_seconds(self, family, num_requests, kv_tokens):  # type: ignore[no-untyped-def]
        return np.zeros_like(np.asarray(num_requests, dtype=float))


def budget_argmax(num_draft_tokens: int) -> BudgetArgmax:
    """One that has seen enough, and all of it was accepted as it had expected."""
    policy = BudgetArgmax(ARM, num_draft_tokens, context_tokens=100, num_requests=4)
    policy._num_steps = 1000
    return policy


def test_budget_argmax_always_drafts_in_full_and_submits_the_likeliest_slots() -> None:
    policy = budget_argmax(3)
    view, belief = view_of(2), belief_of(2, FreeRounds())
    plan = policy.plan(view, belief)
    assert lengths(plan) == [3, 3]
    confidence = ((0.9, 0.9, 0.9), (0.3, 0.3, 0.3))
    # survival .9 .81 .73 and .3 .09 .03: slots beyond the fourth token cost more than they bring
    expected = np.array([2.0, 2.9, 3.71, 4.44, 4.74]) / np.array([1.0, 1.0, 1.0, 1.4, 1.8])
    assert int(expected.argmax()) == 2
    assert lengths(policy.refine(view, plan, confidence, belief)) == [2, 0]


def test_budget_argmax_counts_the_time_that_drafting_took() -> None:
    """After rounds of 0.5 each a token for 0.4 more pays, which beside a step of 1 alone does not."""

    class Rounds(PerToken):
        def draft_seconds(self, family, num_requests, kv_tokens):  # type: ignore[no-untyped-def]
            return np.asarray(0.5)

    policy, view = budget_argmax(3), view_of(2)
    confidence = ((0.9, 0.9, 0.9), (0.3, 0.3, 0.3))
    belief = belief_of(2, Rounds())
    # survival .9 .81 .73 .3: 4.44 tokens in 2.9 s, 3.71 in 2.5
    plan = policy.plan(view, belief)
    assert lengths(policy.refine(view, plan, confidence, belief)) == [3, 0]


def test_budget_argmax_counts_the_tokens_of_a_prompt_beside() -> None:
    """With two prompt tokens the fourth token is reached before any draft."""
    policy, view = budget_argmax(3), replace(view_of(2), prefill_tokens=2)
    belief = belief_of(2, FreeRounds())
    plan = policy.plan(view, belief)
    confidence = ((0.5, 0.5, 0.5), (0.3, 0.3, 0.3))
    assert lengths(policy.refine(view, plan, confidence, belief)) == [0, 0]


def test_budget_argmax_verifies_in_full_until_it_has_seen_enough() -> None:
    """A drafter that is sure of nothing, and right in nine cases of ten, is not given up unseen."""
    generator = np.random.default_rng(3)
    policy = BudgetArgmax(ARM, num_draft_tokens=2, context_tokens=100, num_requests=4)
    view, belief = view_of(8), belief_of(8, PerToken())
    confidence, seen = ((1e-4, 1e-4),) * 8, []
    for _ in range(80):
        plan = policy.plan(view, belief)
        kept = policy.refine(view, plan, confidence, belief)
        seen.append(sum(lengths(kept)))
        runs = generator.geometric(0.1, 8) - 1
        accepted = tuple(int(min(run, n)) for run, n in zip(runs, lengths(kept), strict=True))
        one = observed(view, plan, accepted, confidence=confidence)
        policy.update(replace(one, proposed=tuple(lengths(kept))))
    assert seen[:50] == [16] * 50
    assert policy._survival(confidence[0], 2)[0] == pytest.approx(0.9, abs=0.07)


def test_budget_argmax_verifies_no_more_n_gram_drafts_than_pay() -> None:
    """Beyond four tokens a step costs more than any draft token brings."""
    policy = policies.build({"kind": "budget_argmax", "drafter": "ngram", "num_draft_tokens": 8})
    policy._num_steps = 1000  # type: ignore[attr-defined]
    observations = []

    class Kept(Controller):
        def observe(self, observation: Observation) -> None:
            observations.append(observation)
            super().observe(observation)

    controller = Kept(policy, cost=PerToken())
    with Engine(tiny_model("Llama", seed=41), drafters=["ngram"], planner=controller) as engine:
        engine.submit([5, 6, 7, 8] * 6, max_new_tokens=40)
        run_checked(engine)
    lengths = [(o.drafted[0], o.proposed[0]) for o in observations if sum(o.drafted)]
    assert max(drafted for drafted, _ in lengths) == 8
    assert {proposed for drafted, proposed in lengths if drafted == 8} <= {0, 1, 2, 3}
    assert max(proposed for _, proposed in lengths) == 3


def test_budget_argmax_prices_steps_by_token_count_alone() -> None:
    """Contexts of 10 and of 100,000 tokens give the same plan."""

    class PerKv(PerToken):
        def verify_seconds(self, num_tokens, kv_tokens, num_requests):  # type: ignore[no-untyped-def]
            return super().verify_seconds(num_tokens, 0.0, 1) + 0.01 * np.asarray(kv_tokens)

    policy = budget_argmax(3)
    confidence = ((0.9, 0.7, 0.6), (0.8, 0.5, 0.3))
    plans = []
    for context in (10, 100_000):
        requests = tuple(RequestView(str(r), context, 1, 99, drafters=(ARM,)) for r in range(2))
        view = BatchView(0, requests, 1000)
        belief = belief_of(2, PerKv())
        plans.append(policy.refine(view, policy.plan(view, belief), confidence, belief).choices)
    assert plans[0] == plans[1]


def test_budget_argmax_learns_what_confidence_is_worth() -> None:
    """Drafts of confidence 0.9 that are accepted in 30 % of cases end at a rate of 0.2 to 0.4."""
    generator = np.random.default_rng(5)
    policy = BudgetArgmax(ARM, num_draft_tokens=1, context_tokens=100, num_requests=4)
    view = view_of(4)
    plan = Plan.uniform(view, ARM, 1)
    assert policy._survival((0.9,), 1)[0] == pytest.approx(0.9)
    for _ in range(200):
        accepted = tuple(int(generator.random() < 0.3) for _ in range(4))
        policy.update(observed(view, plan, accepted, confidence=((0.9,),) * 4))
    assert 0.2 < policy._survival((0.9,), 1)[0] < 0.4


@pytest.mark.parametrize(
    "name", ["concurrency_schedule", "smartspec", "ema_steps", "throughput_aware", "heuristic"]
)
def test_a_rival_without_a_named_drafter_takes_the_first_that_is_offered(name: str) -> None:
    view = view_of(2, arms=(ARM, "ngram"))
    plan = policies.build(name).plan(view, belief_of(2))
    assert {choice.drafter for choice in plan.choices} == {ARM}
    named = policies.build({"kind": name, "drafter": "ngram"}).plan(view, belief_of(2))
    assert {choice.drafter for choice in named.choices} <= {"ngram", None}


@pytest.mark.parametrize("name", ["concurrency_schedule", "ema_steps"])
def test_a_rule_that_looks_at_no_belief_does_not_pay_for_one(name: str) -> None:
    """Else comparisons would charge it for estimates that are ours."""
    assert not Controller(name, clock=None).learns
    check_policy(policies.build(name))  # that no belief changes its plans is part of it
