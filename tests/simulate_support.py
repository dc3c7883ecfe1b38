"""What the tests of simulations share: random workloads, a planner that throws dice."""

from collections.abc import Sequence

import numpy as np

from sdcontrol.core import BatchView, Choice, Confidence, Observation, Plan, Planner
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes, LinearCost, LinearDrafter, StepTimes
from sdcontrol.traces.workload import SimulatedRequest, Workload

ARMS = ("ngram", "draft_model", "sparse_kv:64")
COST = LinearCost(
    5e-3,
    1e-5,
    1e-8,
    drafters={"draft_model": LinearDrafter(5e-4, 1e-6), "sparse_kv": LinearDrafter(2e-3, 1e-6)},
)
TIMES = CostTimes(COST, controller_seconds=1e-4)
SMALL = SimulationSettings(block_size=8, max_batch_size=4, max_prefill_tokens=24, kv_tokens=240)


class DicePlanner:
    """Plans whatever is possible, by dice; keeps what it is shown."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self.observations: list[Observation] = []

    def plan(self, view: BatchView) -> Plan:
        free, choices = view.free_kv_tokens, []
        for request in view.requests:
            arm = self._generator.choice([*request.drafters, ""])
            hint = request.hints.get(arm)
            most = min(request.remaining_tokens - 1, free, 16)
            if hint is not None and hint.max_draft_tokens is not None:
                most = min(most, hint.max_draft_tokens)
            length = int(self._generator.integers(0, max(most, 0) + 1)) if arm else 0
            choices.append(Choice.of(str(arm), length))
            free -= length
        return Plan(tuple(choices))

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """Drops what the drafter doubts."""
        choices = []
        for row, choice in enumerate(plan.choices):
            sure = confidence[row] if row < len(confidence) else ()
            doubted = next((n for n, value in enumerate(sure) if value < 0.3), None)
            length = choice.num_draft_tokens if doubted is None else doubted
            length = min(length, choice.num_draft_tokens)
            choices.append(Choice.of(choice.drafter, length) if choice.drafter else choice)
        return Plan(tuple(choices))

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)


def outcomes(hits: Sequence[bool], arm: str, *, with_confidence: bool = False) -> ArmOutcomes:
    """Runs of hits from every position, as a drafter without alternatives has them."""
    runs, run = [], 0
    for hit in reversed(hits):
        run = min(run + 1, 16) if hit else 0
        runs.append(run)
    accepted = np.array(runs[::-1], dtype=np.uint8)
    if arm == "ngram":
        is_found = np.array(hits)
        return ArmOutcomes(
            accepted,
            confidence=np.where(hits, 0.9, 0.2).astype(np.float32) if with_confidence else None,
            match_tokens=np.where(is_found, 3, 0).astype(np.uint8),
            max_draft_tokens=np.where(is_found, 32, 0).astype(np.uint8),
        )
    confidence = np.where(hits, 0.9, 0.2).astype(np.float32) if with_confidence else None
    return ArmOutcomes(accepted, confidence=confidence)


def drawn_request(number: int, generator: np.random.Generator, *, sure: bool) -> SimulatedRequest:
    """One request with all arms."""
    length = int(generator.integers(1, 40))
    most = length + int(generator.integers(0, 3))
    acceptance = {
        arm: outcomes((generator.random(length) < 0.7).tolist(), arm, with_confidence=sure)
        for arm in ARMS
    }
    prompt = int(generator.integers(1, 90))
    return SimulatedRequest(
        f"r{number}",
        float(generator.exponential(0.02)) * number,
        prompt,
        length,
        acceptance,
        max_output_tokens=most,
    )


def drawn_workload(seed: int, num_requests: int, *, sure: bool = False) -> Workload:
    """Requests of all lengths, some at the same time."""
    generator = np.random.default_rng(seed)
    return Workload.of(
        "drawn", [drawn_request(number, generator, sure=sure) for number in range(num_requests)]
    )


def finished(
    workload: Workload,
    planner: Planner,
    settings: SimulationSettings = SMALL,
    times: StepTimes = TIMES,
) -> Simulation:
    """The simulation at its end, its books checked on the way."""
    simulation = Simulation(workload, planner, times, settings)
    while simulation.has_work:
        simulation.step()
        simulation.check_integrity()
    return simulation
