"""Probes: what they cost is bounded, and they are made where they are worth it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

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
)
from sdcontrol.estimators.price import step_seconds
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.probing import Probing
from sdcontrol.policies.reading import read
from sdcontrol.policies.tries import PROBES, Probe, with_probe
from tests.plan_instances import DrawnCost, observation_of


def probe_costs(
    batch: int, rates: dict[str, float], steps: int, hazard: Callable[[int], float]
) -> tuple[list[float], float]:
    """By step, the seconds that probes cost, less what their tokens save; and those of a plain step.

    `rates` are seconds per round of each arm, whose acceptance is believed to be `hazard(step)`.
    """
    cost = DrawnCost("linear", 1.0, 0.001, 1, 0.0, {arm: (s, 0.0, 0.0) for arm, s in rates.items()})
    policy = Goodput()
    spent = []
    for step in range(steps):
        requests = tuple(RequestView(str(r), 500, 9, 99, 0.0, tuple(rates)) for r in range(batch))
        view = BatchView(step, requests, 10_000)
        rows = np.cumprod(np.full((batch, 6), hazard(step)), axis=1)
        plan = policy.plan(view, Belief(dict.fromkeys(rates, rows), cost))
        seconds, plain = (step_seconds(view, one, cost) for one in (plan, Plan.off(view)))
        tokens = batch + sum(rows[0, : choice.num_draft_tokens].sum() for choice in plan.choices)
        spent.append(seconds - plain * tokens / batch)
        assert len(set(plan.choices)) <= (2 if plan.choices.count(Choice.off()) == batch - 1 else 1)
        policy.update(observation_of(view, plan, seconds))
    return spent, step_seconds(view, Plan.off(view), cost)


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("rates", [{"a": 0.5}, {"a": 1.0, "b": 0.2}, {"a": 0.05, "b": 0.4}])
def test_probes_never_cost_more_than_their_share_of_the_time(
    batch: int, rates: dict[str, float]
) -> None:
    """Where drafting never pays: at most 0.75 steps are borrowed, and from step 300 on no more than
    1 % of all time was spent; nor is the allowance left to lie."""
    spent, plain = probe_costs(batch, rates, 2000, lambda step: 0.02)
    total = np.cumsum(spent)
    passed = plain * np.arange(1, 2001) + total
    assert (total[300:] <= 0.01 * passed[300:]).all()
    assert (total <= 0.01 * passed + 0.75 * plain).all()
    assert total[-1] >= 0.001 * passed[-1]  # tokens that probes bring are counted


def tried_at(scale: float, pause: float | None = None) -> list[tuple[Choice, ...]]:
    """Choices of a lone request, of whose plain steps each takes `scale` seconds, but for one of `pause`."""
    rounds = {"a": (0.3 * scale, 0.0, 0.0), "b": (0.8 * scale, 0.0, 0.0)}
    cost, policy, made = DrawnCost("linear", scale, 0.01 * scale, 1, 0.0, rounds), Goodput(), []
    for step in range(400):
        view = BatchView(step, (RequestView("r", 500, 9, 99, 0.0, tuple(rounds)),), 10_000)
        rows = np.full((1, 1), 0.2)
        plan = policy.plan(view, Belief(dict.fromkeys(rounds, rows), cost))
        is_paused = pause is not None and step == 100
        seconds = pause if is_paused else step_seconds(view, plan, cost)
        policy.update(observation_of(view, plan, seconds))
        made.append(plan.choices)
    return made


def test_arms_are_tried_as_often_however_slow_the_machine_or_whatever_the_unit() -> None:
    """Steps of over a minute were taken for pauses: nothing was tried."""
    tries, slow = (
        sum(choice.drafter is not None for (choice,) in tried_at(scale)) for scale in (1.0, 1000.0)
    )
    assert 3 < tries < 40
    assert abs(slow - tries) <= 1  # the very first step may have been a pause


def test_a_pause_earns_no_tries() -> None:
    assert tried_at(1.0, pause=3600.0) == tried_at(1.0, pause=float("nan"))


def first_tries(hazards: dict[str, float], rounds: dict[str, float], steps: int) -> dict[str, int]:
    """Of a lone request: the step in which each arm was first drafted with."""
    cost = DrawnCost("linear", 1.0, 0.05, 1, 0.0, {arm: (s, 0.0, 0.0) for arm, s in rounds.items()})
    policy, tried = Goodput(), dict[str, int]()
    for step in range(steps):
        hints = {"ngram": Hint(max_draft_tokens=6, match_tokens=16)}
        request = RequestView("r", 5000, 9, 999, 0.0, tuple(hazards), hints)
        view = BatchView(step, (request,), 10_000)
        rows = {arm: np.cumprod(np.full((1, 6), hazard), axis=1) for arm, hazard in hazards.items()}
        plan = policy.plan(view, Belief(rows, cost))
        choice = plan.choices[0]
        if choice.drafter is not None:
            tried.setdefault(choice.drafter, step)
        policy.update(observation_of(view, plan, step_seconds(view, plan, cost)))
    return tried


@pytest.mark.parametrize(
    ("token_seconds", "round_seconds", "expected"), [(0.001, 0.1, {0, 8}), (0.2, 0.01, {0, 1})]
)
def test_all_try_at_once_where_rounds_are_what_costs(
    token_seconds: float, round_seconds: float, expected: set[int]
) -> None:
    """Those are shared, and what all accept counts. A first use is of one request; so is what
    costs as much for everyone."""
    hazard = 0.06
    cost = DrawnCost(
        "linear", 1.0, token_seconds, 1, 0.0, {"draft_model": (round_seconds, 0.0, 0.0)}
    )
    policy, users = Goodput(), list[int]()
    for step in range(2000):
        requests = tuple(RequestView(str(r), 500, 9, 99, 0.0, ("draft_model",)) for r in range(8))
        view = BatchView(step, requests, 10_000)
        rows = np.cumprod(np.full((8, 6), hazard), axis=1)
        plan = policy.plan(view, Belief({"draft_model": rows}, cost))
        users.append(sum(choice.drafter is not None for choice in plan.choices))
        policy.update(observation_of(view, plan, step_seconds(view, plan, cost)))
    tries = [n for n in users if n]
    assert tries[0] == 1
    assert set(users[users.index(1) + 1 :]) == expected


def test_what_may_well_pay_is_tried_within_the_first_steps() -> None:
    """Off for now, though little more acceptance would make it pay."""
    tried = first_tries({"draft_model": 0.2}, {"draft_model": 0.25}, 20)
    assert tried["draft_model"] <= 5


def test_a_good_plan_is_not_interrupted_by_what_could_hardly_beat_it() -> None:
    """Copies: 6 tokens a step by look-up, of which a model's six rounds would make a slow one."""
    hazards = {"ngram": 0.97, "draft_model": 0.65, "sparse_kv": 0.85}
    rounds = {"ngram": 0.0, "draft_model": 0.2, "sparse_kv": 1.0}
    assert set(first_tries(hazards, rounds, 60)) == {"ngram"}


def test_whatever_seems_hopeless_is_tried_at_last() -> None:
    """When the allowance is full; a family never drafted with is first."""
    hazards = {"draft_model": 0.02, "sparse_kv": 0.02}
    tried = first_tries(hazards, {"draft_model": 0.2, "sparse_kv": 1.0}, 1000)
    assert set(tried) == set(hazards)


@pytest.mark.parametrize("seconds", [0.6, 1.2])
def test_what_could_bring_nothing_is_only_rechecked(seconds: float) -> None:
    """Rounds that take longer than all of their tokens could save: under half of what others may cost."""
    spent, plain = probe_costs(3, {"draft_model": seconds}, 1000, lambda step: 0.05)
    assert 0.0 < sum(spent) < 0.003 * 1000 * plain


def test_an_unlucky_start_is_thought_over_within_its_first_hundred_steps() -> None:
    """A lone request whose drafter costs a tenth of a step is given several probes."""
    spent, _ = probe_costs(1, {"draft_model": 0.1}, 100, lambda step: 0.05)
    assert sum(seconds > 0.0 for seconds in spent) >= 5


def test_no_probes_without_a_share_and_none_for_arms_seen_in_shadow() -> None:
    cost = DrawnCost("linear", 1.0, 0.001, 1, 0.0, {"draft_model": (0.5, 0.0, 0.0)})
    request = RequestView("r", 500, 9, 99, 0.0, ("draft_model",))
    view = BatchView(0, (request,) * 3, 10_000)
    belief = Belief({"draft_model": np.cumprod(np.full((3, 6), 0.05), axis=1)}, cost)
    silent, shadowed = Goodput(probe_share=0.0), Goodput()
    for _ in range(1000):
        seen = observation_of(view, Plan.off(view), 1.0)
        silent.update(seen)
        assert silent.plan(view, belief).is_off
        shadow = {"draft_model": (1, None, 0)}
        shadowed.update(
            Observation(
                seen.view,
                seen.plan,
                seen.drafted,
                seen.proposed,
                seen.accepted,
                seen.emitted,
                seen.timing,
                shadow=shadow,
            )
        )
        assert shadowed.plan(view, belief).is_off


def test_looks_become_rarer_while_nothing_is_tried_and_the_controllers_time_weighs() -> None:
    """Every sixteenth step at first, later every 64th; again every sixteenth after a probe."""
    probing = Probing(0.01, 3)
    requests = (RequestView("r", 500, 9, 99, 0.0, ("draft_model",)),)
    looked = []
    for step in range(801):
        view = BatchView(step, requests, 10_000)
        if probing.looks(view):
            looked.append(step)
        reason = "goodput; probes draft_model for at most 0.01 s" if step == 600 else ""
        seen = observation_of(view, Plan(Plan.off(view).choices, reason), 1.0)
        timing = replace(seen.timing, controller_seconds=0.05)
        probing.update(replace(seen, timing=timing))
    gaps = dict(zip(looked[1:], np.diff(looked), strict=True))
    assert {gap for step, gap in gaps.items() if 64 <= step < 128} == {16}
    assert {gap for step, gap in gaps.items() if 384 < step <= 600} == {64}
    assert {gap for step, gap in gaps.items() if 660 < step <= 720} == {16}


@pytest.mark.parametrize(("tokens", "most"), [((4, 12), None), ((50, 300), None), ((100, 300), 1)])
def test_a_try_of_a_free_arm_by_all_keeps_everybodys_limit(
    tokens: tuple[int, int], most: int | None
) -> None:
    """A free arm that nobody scores in shadow is tried by all at once; some have a token or two to go."""
    generator, controller = np.random.default_rng(1), Controller()
    left = generator.integers(*tokens, 4).tolist()
    hints = {"ngram": Hint(max_draft_tokens=most)} if most else {}
    rates, tries = {"ngram": 0.6, "model": 0.8, None: 0.0}, 0
    for step in range(1500):
        requests = tuple(
            RequestView(f"{r}", 300, 0, n, 0.0, ("ngram", "model"), hints)
            for r, n in enumerate(left)
        )
        view = BatchView(step, requests, 10**6)
        plan = controller.plan(view)
        assert not controller.faults
        used = [c.num_draft_tokens for c in plan.choices if c.drafter == "ngram"]
        assert max(used, default=0) <= (most or 16)
        tries += "probes ngram" in plan.reason and len(used) > 1
        drafted = tuple(choice.num_draft_tokens for choice in plan.choices)
        hit = [
            generator.random(n) < rates[c.drafter]
            for n, c in zip(drafted, plan.choices, strict=True)
        ]
        accepted = tuple(int(np.append(h, False).argmin()) for h in hit)
        emitted = tuple(n + 1 for n in accepted)
        rounds = max((c.num_draft_tokens for c in plan.choices if c.drafter == "model"), default=0)
        timing = Timing(
            {"model": 1e-3 * rounds} if rounds else {}, 1e-2 + 2e-4 * (4 + sum(drafted))
        )
        controller.observe(Observation(view, plan, drafted, drafted, accepted, emitted, timing))
        left = [
            n - e if n > e else int(generator.integers(*tokens))
            for n, e in zip(left, emitted, strict=True)
        ]
    assert tries


@pytest.mark.parametrize(("drafted", "left"), [(1, 1), (2, 0), (3, 0)])
def test_a_try_by_all_leaves_the_others_what_kv_slots_are_left(drafted: int, left: int) -> None:
    """Of three slots the two that try take one each; else the plan is impossible, which is a fault."""
    menus = (("ngram", "model"), ("ngram", "model"), ("ngram",))
    requests = tuple(RequestView(str(r), 300, 0, 99, drafters=menu) for r, menu in enumerate(menus))
    view = BatchView(0, requests, 3)
    rounds = {"ngram": (0.0, 0.0, 0.0), "model": (1e-3, 0.0, 0.0)}
    survival = {arm: np.full((3, 4), 0.5) for arm in ("ngram", "model")}
    cost = DrawnCost("linear", 0.01, 1e-4, 1, 0.0, rounds)
    problem = read(view, Belief(survival, cost), (1.0, 1.0, 1.0, 0.0))
    assert problem is not None
    plan = Plan((Choice.off(), Choice.of("ngram", 1), Choice.of("ngram", drafted)))
    probe = Probe(0, 1, 1e-3, 1e-3, 1e-3, by_all=True)
    tried = with_probe(plan, PROBES, problem, problem.arms.index("model"), probe)
    tried.check(view)
    assert [c.num_draft_tokens for c in tried.choices] == [1, 1, left]
    assert [c.drafter for c in tried.choices[:2]] == ["model", "model"]
