"""Other lengths than the best ones, now and then: what tokens cost is found out, at a bounded price."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated_regret import Machine
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Belief, Choice, FloatArray, Observation, Plan, RequestView
from sdcontrol.lessons import Lessons
from sdcontrol.outcomes import DEPTH, ArmOutcomes
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.lengths import Lengths, only
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.problem import Problem
from sdcontrol.policies.tries import LENGTHS, try_of
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes, NoisyTimes
from sdcontrol.traces.workload import SimulatedRequest, Workload
from sdcontrol.waiting import Seen, Waiting
from tests.plan_instances import DrawnCost, observation_of

BATCH = 32


class Tiles(Machine):
    """Tokens cost next to nothing up to the next multiple of 64, as on a GPU."""

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        tiles = np.ceil(np.asarray(num_tokens) / 64)
        return super().verify_seconds(num_tokens, kv_tokens, num_requests) + 6e-4 * tiles


TILES = CostTimes(Tiles(6.5e-3, 2e-6, 10**6, 0.0, 4e-8, 4e-4, {"ngram": (1e-4, 2e-6)}))


def rate_of(policy: str | Mapping[str, object], seed: int, *, controller_seconds: float) -> float:
    """Tokens per second of time without noise, while all requests of a batch decode."""
    times = CostTimes(TILES.cost, controller_seconds=controller_seconds)
    noisy = NoisyTimes(times, relative_noise=0.02, seed=seed)
    rng, length = np.random.default_rng(seed), 512
    requests = []
    for number in range(BATCH):
        hits = rng.random(length + DEPTH) < 0.74
        runs = [int(np.argmin([*hits[i : i + DEPTH], False])) for i in range(length)]
        outcomes = {"ngram": ArmOutcomes(np.array(runs, np.uint8))}
        requests.append(SimulatedRequest(str(number), 0.0, 257, length, outcomes))
    settings = SimulationSettings(max_batch_size=BATCH, max_prefill_tokens=10**5)
    simulation = Simulation(
        Workload.of("alike", requests), Controller(policy, clock=None), noisy, settings
    )
    tokens = seconds = 0.0
    while len((step := simulation.step()).view.requests) in (0, BATCH):
        if step.view.requests:
            tokens += sum(step.emitted)
            cost, view = TILES.cost, step.view
            kv_tokens = sum(request.context_tokens for request in view.requests)
            verified = BATCH + sum(step.proposed)
            seconds += float(cost.verify_seconds(verified, kv_tokens, BATCH))
            seconds += cost.overhead_seconds()
    return tokens / seconds


@pytest.mark.parametrize("controller_seconds", [0.0, 5e-4])
def test_requests_that_are_alike_do_not_keep_a_wrong_price_up(controller_seconds: float) -> None:
    """Simulated, 2 % of noise a step, the first steps included. All get as many tokens in every step,
    so that the price of a further one is never seen: without other lengths half of these runs are at
    0.75 to 0.77 of seven drafts for all (some 0.89 where learning is put off), and their mean is 0.82."""
    best = [rate_of("static:ngram:7", seed, controller_seconds=0.0) for seed in range(6)]
    policy = {"kind": "goodput", "waits_for_slowest": False}
    found = [rate_of(policy, seed, controller_seconds=controller_seconds) for seed in range(6)]
    ratios = np.array(found) / best
    assert ratios.min() >= 0.87
    assert ratios.mean() >= 0.9


def alike(step: int, lengths: list[int]) -> Observation:
    """A step in which each request had that many tokens verified beside its own."""
    names = map(str, range(len(lengths)))
    requests = tuple([RequestView(name, 500, 9, 99, 0.0, ("ngram",)) for name in names])
    view = BatchView(step, requests, 10_000)
    return observation_of(view, Plan(tuple(Choice.of("ngram", n) for n in lengths)), 1.0)


def problem_of(hazard: float, token_seconds: float, batch: int = 4) -> Problem:
    """Two arms, the second with rounds, of which the first one's tokens are likelier."""
    gains = [
        np.concatenate([[0.0], np.cumsum(np.cumprod(np.full(8, h)))]) for h in (hazard, hazard / 2)
    ]
    rounds = np.zeros((3, batch + 2))
    rounds[1, 1:] = 0.01
    return Problem(
        ("ngram", "draft_model"),
        np.repeat(np.array(gains)[:, None, :], batch, axis=1),
        np.full((2, batch), 8),
        np.arange(2),
        1.0 + token_seconds * np.arange(8 * batch + 1.0),
        rounds,
        np.zeros((2, batch)),
        np.zeros((2, batch)),
        np.zeros(3, np.int64),
    )


@pytest.mark.parametrize("interval", [16, 32, 64, 128])
def test_more_and_fewer_take_turns_and_lose_no_more_than_is_allowed(interval: int) -> None:
    """However rare looks are."""
    lengths, problem = Lengths(), problem_of(0.7, 0.05)
    for step in range(64):
        lengths.update(alike(step, [3] * 4))
    answer = maximise(problem)
    best = int(answer.length.sum())
    sums = []
    for step in range(0, 32 * interval, interval):
        plan = lengths.others(step, Plan.off(alike(0, [3] * 4).view), problem, answer, 1.0)
        assert plan is not None
        tried = try_of(plan)
        assert tried is not None
        assert (tried.mark, tried.arm) == (LENGTHS, "")
        assert 0.0 <= tried.seconds <= 0.1 * answer.seconds
        sums.append(sum(choice.num_draft_tokens for choice in plan.choices))
    assert 8 <= sum(n > best for n in sums) <= 24
    assert all(n != best for n in sums)
    assert lengths.others(1, Plan.off(alike(0, [3]).view), problem, answer, 1.0) is None
    assert lengths.others(0, Plan.off(alike(0, [3]).view), problem, answer, 0.0) is None


def test_lengths_that_vary_by_themselves_are_left_alone() -> None:
    lengths, problem = Lengths(), problem_of(0.7, 0.05)
    answer = maximise(problem)
    plan = Plan.off(alike(0, [3] * 4).view)
    for step in range(200):
        lengths.update(alike(step, [1 + step % 4] * 4))
    assert lengths.others(0, plan, problem, answer, 1.0) is None
    for step in range(200):
        lengths.update(alike(step, [3] * 4))
    assert lengths.others(0, plan, problem, answer, 1.0) is not None


def test_a_lone_request_goes_without_drafts_twice() -> None:
    lengths, problem = Lengths(), problem_of(0.4, 0.05, batch=1)
    answer, plan = maximise(problem), Plan.off(alike(0, [3]).view, "why")
    for _ in range(2):
        tried = lengths.without(plan, problem, answer, 1.0)
        assert tried is not None
        assert tried.choices == (Choice.off(),)
        price = try_of(tried)
        assert price is not None
        assert price.mark == LENGTHS
        assert price.seconds == pytest.approx(1.0 - 1.0 / answer.rate, rel=0.01)
        lengths.update(alike(0, [0]))
    assert lengths.without(plan, problem, answer, 1.0) is None


def test_what_a_lone_request_would_lose_without_drafts_is_bounded() -> None:
    plan, few = Plan.off(alike(0, [3]).view), problem_of(0.4, 0.05, batch=1)
    assert Lengths().without(plan, few, maximise(few), 0.05) is None  # more than is allowed
    many = problem_of(0.9, 0.05, batch=1)  # over twice as fast with drafts
    assert maximise(many).rate > 2.0
    assert Lengths().without(plan, many, maximise(many), 1.0) is None
    several = problem_of(0.4, 0.05, batch=2)
    assert Lengths().without(plan, several, maximise(several), 1.0) is None
    none = only(few, set())
    assert Lengths().without(plan, none, maximise(none), 1.0) is None


class Lone(Machine):
    """Tokens cost from the first one on, and a lone one a third of what it would along that line."""

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        saved = 0.01 * (np.asarray(num_tokens) == 1.0)
        return super().verify_seconds(num_tokens, kv_tokens, num_requests) - saved


@pytest.mark.parametrize("seed", range(4))
def test_a_request_that_is_alone_for_the_first_time_finds_that_its_token_is_cheap(
    seed: int,
) -> None:
    """Simulated, 2 % of noise, after a batch of eight: with drafts 1.6 tokens in 30 ms, without one in 15.
    Two of these four find it in time by themselves; of the others none of the first dozen steps is plain."""
    rng = np.random.default_rng(seed)
    machine = Lone(19e-3, 6e-3, 10**6, 0.0, 4e-8, 4e-4, {"ngram": (1e-4, 2e-6)})
    times = NoisyTimes(CostTimes(machine), relative_noise=0.02, seed=seed)
    requests = []
    for number, length in enumerate([60] * 8 + [300]):
        hits = rng.random(length + DEPTH) < 0.6
        runs = [int(np.argmin([*hits[i : i + DEPTH], False])) for i in range(length)]
        outcomes = {"ngram": ArmOutcomes(np.array(runs, np.uint8))}
        requests.append(SimulatedRequest(str(number), 30.0 * (number == 8), 257, length, outcomes))
    settings = SimulationSettings(max_batch_size=8, max_prefill_tokens=10**5)
    controller = Controller("goodput", clock=None)
    simulation = Simulation(Workload.of("then alone", requests), controller, times, settings)
    steps = []
    while simulation.has_work:
        step = simulation.step()
        if [request.id for request in step.view.requests] == ["8"]:
            steps.append(step)
    assert sum(step.plan.is_off for step in steps[:12]) >= 2
    assert sum(step.plan.is_off for step in steps[12:40]) >= 24


@pytest.mark.parametrize("batch", [1, 4])
def test_an_arm_that_is_not_in_use_is_not_what_is_tried(batch: int) -> None:
    """Those have probes, which pay for their rounds as measured."""
    problem = problem_of(0.7, 0.05, batch)
    cheap = maximise(only(problem, {1}), 0.3 * maximise(problem).rate)
    assert set(cheap.arm[cheap.length > 0].tolist()) == {1}
    assert not maximise(only(problem, set())).length.any()


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_without_a_share_nothing_else_is_tried_and_refining_leaves_a_try_alone(
    share: float,
) -> None:
    cost = DrawnCost("linear", 1.0, 0.02, 1, 0.0, {"draft_model": (0.01, 0.0, 0.0)})
    policy, tries = Goodput(probe_share=share), 0
    requests = tuple(RequestView(str(r), 500, 9, 99, 0.0, ("draft_model",)) for r in range(4))
    for step in range(300):
        view = BatchView(step, requests, 10_000)
        rows = np.cumprod(np.full((4, 8), 0.7), axis=1)
        belief = Belief({"draft_model": rows}, cost)
        plan = policy.plan(view, belief)
        if LENGTHS in plan.reason:
            tries += 1
            assert not policy.may_repeat(plan)
            unsure = tuple((0.01,) * choice.num_draft_tokens for choice in plan.choices)
            none = Belief({"draft_model": np.full_like(rows, 0.01)}, cost)
            assert policy.refine(view, plan, unsure, none) is plan
        policy.update(observation_of(view, plan, 1.0))
    assert tries >= 4 if share else tries == 0


def test_what_a_try_took_is_learnt_though_steps_after_it_are_others() -> None:
    """Where learning is put off, the price of a typical step is learnt else."""
    learnt: list[Observation] = []

    class Cost(Tiles):
        def update(self, observation: Observation) -> None:
            learnt.append(observation)

    waiting = Waiting(8)
    lessons = Lessons(
        Controller("off").acceptance, Cost(1.0, 0.0, 1, 0.0, 0.0, 0.0, {}), 8, may_rest=False
    )
    for step in range(120):
        seen = alike(step, [2, 2] if step != 101 else [6, 6])
        seen = replace(seen, timing=replace(seen.timing, controller_seconds=0.1))
        is_try = step == 101
        lessons.take(waiting.observe(Seen(seen, is_try), may_rest=False, error=0.0))
    assert next(one.view.step for one in learnt if one.view.step >= 101) == 101
    assert len([one for one in learnt if one.view.step > 40]) < 20
