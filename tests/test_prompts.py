"""Tokens beside prompts: what they are worth where prompts set the pace, and where they do not."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated_regret import MACHINES, workload_of
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Belief, Observation, Plan, RequestView, Timing
from sdcontrol.policies.checks import ToyCost
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.prompts import Prompts
from sdcontrol.policies.reading import read, without_prefill
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes, NoisyTimes
from sdcontrol.traces.workload import SimulatedRequest, Workload
from tests.plan_instances import observation_of, small_instance


def told(prompts: "Prompts | Goodput", *, beside_prompt: bool, steps: int) -> None:
    requests = (RequestView("a", 100, 20, 100),)
    for step in range(steps):
        view = BatchView(step, requests, 1000, prefill_tokens=512 * beside_prompt)
        prompts.update(observation_of(view, Plan.off(view), 0.01))


class KvCost(ToyCost):
    """An empty step takes a second; `share` of it more for the keys and values of all requests."""

    def __init__(self, share: float) -> None:
        self.share = share

    def verify_seconds(self, num_tokens, kv_tokens, num_requests):  # type: ignore[no-untyped-def]
        read = self.share * (np.asarray(kv_tokens) > 0.0)
        return np.asarray(1.0 + read + 1e-6 * np.asarray(num_tokens))

    def overhead_seconds(self) -> float:
        return 0.0


def instance(
    *, others_wait: bool, prefill_tokens: int = 512, cost: ToyCost | None = None
) -> tuple[BatchView, Belief]:
    view, belief = small_instance(np.random.default_rng(4), 1)
    if cost is not None:
        belief = Belief(belief.survival, cost)
    return replace(view, prefill_tokens=prefill_tokens, others_wait=others_wait), belief


def rates(
    prompts: Prompts, *, others_wait: bool, cost: ToyCost | None = None
) -> tuple[float, float]:
    """The price of a second beside a prompt, and the rate of the best plan without it."""
    view, belief = instance(others_wait=others_wait, cost=cost)
    problem = read(view, belief, (64.0, 64.0, 1.0, 0.0))
    assert problem is not None
    price = prompts.rate(view, problem, belief.cost)
    assert price is not None
    return price, maximise(without_prefill(problem, view, belief.cost)).rate


def test_a_second_is_worth_what_decoding_brings_without_the_prompt() -> None:
    prompts = Prompts()
    told(prompts, beside_prompt=True, steps=40)  # a prompt now and then
    for others_wait in (True, False):
        price, alone = rates(prompts, others_wait=others_wait)
        assert price == alone
    view, belief = instance(others_wait=True, prefill_tokens=0)
    problem = read(view, belief, (64.0, 64.0, 1.0, 0.0))
    assert problem is not None
    assert prompts.rate(view, problem, belief.cost) is None


def test_where_prompts_set_the_pace_a_second_is_worth_more_until_they_do_not() -> None:
    """Only while requests wait: one long prompt beside which others decode is no such case."""
    prompts = Prompts()
    told(prompts, beside_prompt=True, steps=400)
    price, alone = rates(prompts, others_wait=True)
    assert alone < price <= 25.0 * alone
    price, alone = rates(prompts, others_wait=False)
    assert price == alone
    told(prompts, beside_prompt=False, steps=40)
    price, alone = rates(prompts, others_wait=True)
    assert price == alone


@pytest.mark.parametrize(("share", "times"), [(1e-4, 25.0), (0.25, 5.0), (1.0, 2.0), (19.0, 1.05)])
def test_where_prompts_set_the_pace_a_second_is_worth_what_requests_add_to_a_step(
    share: float, times: float
) -> None:
    """Which a prompt does not pay: nearly nothing beside short contexts, most of it beside long ones."""
    prompts = Prompts()
    told(prompts, beside_prompt=True, steps=400)
    price, alone = rates(prompts, others_wait=True, cost=KvCost(share))
    assert price == pytest.approx(times * alone, rel=0.03)


def test_steps_without_requests_say_nothing() -> None:
    prompts = Prompts()
    view = BatchView(0, (), 1000, prefill_tokens=512)
    for _ in range(400):
        prompts.update(Observation(view, Plan(()), (), (), (), (), Timing({}, 0.01)))
    price, alone = rates(prompts, others_wait=True)
    assert price == alone


@pytest.mark.parametrize("kind", ["free", "code"])
def test_where_prompts_set_the_pace_no_tokens_are_computed_in_vain(kind: str) -> None:
    """Simulated, seeds fixed: 64 at a time, four steps in five beside a prompt; off is best there.

    With the price of other steps the rate is at 0.963 to 0.979 of it.
    """
    drawn = [replace(r, prompt_tokens=1000) for r in list(workload_of(kind, 64, 0))[:212]]
    settings = SimulationSettings(
        max_batch_size=64, max_prefill_tokens=512, kv_tokens=1 << 20, prefix_sharing=False
    )
    off, goodput = (seconds_of(policy, drawn, settings, "large") for policy in ("off", "goodput"))
    assert off / goodput > 0.983


@pytest.mark.parametrize("kind", ["code", "mixed"])
def test_where_prompts_set_the_pace_long_contexts_are_drafted_for(kind: str) -> None:
    """Simulated, seeds fixed: whoever ends sooner leaves less to read in every step.

    The mean of three texts, which are at 0.976 to 0.999 of the best fixed setting; where tokens that come sooner
    count for nothing at 0.973 to 0.979.
    """
    settings = SimulationSettings(
        max_batch_size=64, max_prefill_tokens=2048, kv_tokens=1 << 20, prefix_sharing=False
    )
    ratios = []
    for seed in range(3):
        drawn = [replace(r, prompt_tokens=6000) for r in list(workload_of(kind, 64, seed))[:212]]
        fixed, goodput = (
            seconds_of(policy, drawn, settings, "gpu") for policy in ("static:ngram:2", "goodput")
        )
        ratios.append(fixed / goodput)
    assert sum(ratios) / len(ratios) > 0.985


def seconds_of(
    policy: str, drawn: list[SimulatedRequest], settings: SimulationSettings, machine: str
) -> float:
    """Of all steps."""
    times = NoisyTimes(CostTimes(MACHINES[machine]), relative_noise=0.05, seed=1)
    simulation = Simulation(
        Workload.of("drawn", drawn), Controller(policy, clock=None), times, settings
    )
    seconds = 0.0
    while simulation.has_work:
        seconds += simulation.step().timing.total_seconds
    return seconds
