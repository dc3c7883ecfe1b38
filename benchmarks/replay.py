"""How fast the what-if replay simulates, how much memory it takes, and whether processes scale.

    python -m benchmarks.replay [--json]

Drawn requests with three drafters and real lengths, published straight-line costs of an 8B model on
one H100. Speed: `goodput` with its online estimators at batch 64 on one core; the share of the
planner (`plan`, `refine`, `observe`) is measured apart. Memory: 100,000 requests under a static
policy, in a process of its own. Scaling: the same run in one process and in two at a time, taking
turns. Simulated tokens a minute are of this machine's clock; what they say is simulated.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from benchmarks.measuring import write_results
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Confidence, Observation, Plan
from sdcontrol.outcomes import DEPTH, ArmOutcomes
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes, LinearCost, LinearDrafter
from sdcontrol.traces.workload import SimulatedRequest, Workload

RATES = {"ngram": 0.55, "draft_model": 0.75, "sparse_kv:512": 0.85}
COST = LinearCost(
    constant_seconds=6.9387e-3,
    per_token_seconds=1.8438e-5,
    per_kv_token_seconds=4.859e-8,
    per_request_seconds=-4.331e-5,
    drafters={
        "draft_model": LinearDrafter(9e-4, 5.5e-6, 2.9e-9),
        "sparse_kv": LinearDrafter(6.5e-3, 1.8e-5, 4.859e-8),
    },
)


def requests(
    num_requests: int, output_tokens: int, prompt_tokens: int
) -> Iterator[SimulatedRequest]:
    """Drawn one by one; 64 sets of outcomes are shared, as texts of a recorded trace would be."""
    generator = np.random.default_rng(0)
    texts = [
        {arm: drawn_outcomes(generator, arm, rate, output_tokens) for arm, rate in RATES.items()}
        for _ in range(64)
    ]
    for number in range(num_requests):
        prompt = int(generator.integers(prompt_tokens // 2, 2 * prompt_tokens))
        acceptance = texts[number % len(texts)]
        yield SimulatedRequest(f"r{number}", 0.0, prompt, output_tokens, acceptance)


def drawn_outcomes(
    generator: np.random.Generator, arm: str, rate: float, output_tokens: int
) -> ArmOutcomes:
    """Runs of right tokens whose rate drifts along the text."""
    drift = 0.2 * np.sin(np.arange(output_tokens) / 30.0 + generator.uniform(0.0, 6.0))
    hits = generator.random(output_tokens) < np.clip(rate + drift, 0.05, 0.97)
    runs = np.zeros(output_tokens + 1, dtype=np.uint8)
    for place in range(output_tokens - 1, -1, -1):
        runs[place] = min(runs[place + 1] + 1, DEPTH) if hits[place] else 0
    accepted = runs[:-1]
    if arm != "ngram":
        return ArmOutcomes(accepted)
    found = generator.random(output_tokens) < 0.7
    matches = np.where(found, generator.integers(1, 17, output_tokens), 0).astype(np.uint8)
    return ArmOutcomes(
        np.where(found, accepted, 0).astype(np.uint8),
        match_tokens=matches,
        max_draft_tokens=np.where(found, 32, 0).astype(np.uint8),
    )


class Timed:
    """A controller, and the seconds spent in it."""

    drafts = learns = True

    def __init__(self, policy: str) -> None:
        self._controller = Controller(policy, clock=None)
        self.policy = self._controller.policy
        self.seconds = 0.0

    def plan(self, view: BatchView) -> Plan:
        """Plan, timed."""
        started = time.perf_counter()
        plan = self._controller.plan(view)
        self.seconds += time.perf_counter() - started
        return plan

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """Refine, timed."""
        started = time.perf_counter()
        refined = self._controller.refine(view, plan, confidence)
        self.seconds += time.perf_counter() - started
        return refined

    def observe(self, observation: Observation) -> None:
        """Learn, timed."""
        started = time.perf_counter()
        self._controller.observe(observation)
        self.seconds += time.perf_counter() - started


def speed(num_requests: int, policy: str = "goodput") -> dict[str, object]:
    """Simulated output tokens a minute at batch 64, and microseconds a step, after a warm-up."""
    planner = Timed(policy)
    workload = Workload("drawn", tuple(RATES), lambda: requests(num_requests, 400, 200), {})
    settings = SimulationSettings(max_batch_size=64, max_prefill_tokens=2048)
    simulation = Simulation(workload, planner, CostTimes(COST, controller_seconds=3e-4), settings)
    for _ in range(100):
        simulation.step()
    planner.seconds, tokens, own = 0.0, 0, []
    started = time.perf_counter()
    batch = 0
    while simulation.has_work:
        before, begun = planner.seconds, time.perf_counter()
        observation = simulation.step()
        own.append(time.perf_counter() - begun - (planner.seconds - before))
        tokens += sum(observation.emitted)
        batch += len(observation.emitted)
    seconds = time.perf_counter() - started
    low, median = np.percentile(own, [10, 50])
    return {
        "what": "speed",
        "policy": policy,
        "requests": num_requests,
        "steps": len(own),
        "mean_batch": round(batch / len(own), 1),
        "million_tokens_per_minute": round(60e-6 * tokens / seconds, 2),
        "step_us": round(1e6 * seconds / len(own), 1),
        "own_us_p10": round(1e6 * float(low), 1),
        "own_us_median": round(1e6 * float(median), 1),
        "planner_us_mean": round(1e6 * planner.seconds / len(own), 1),
    }


def memory(num_requests: int) -> dict[str, object]:
    """Peak resident memory of simulating so many requests that all arrive at once."""
    workload = Workload("drawn", tuple(RATES), lambda: requests(num_requests, 32, 64), {})
    settings = SimulationSettings(max_batch_size=256, max_prefill_tokens=1 << 14)
    planner = Controller("static:ngram:4", clock=None)
    simulation = Simulation(workload, planner, CostTimes(COST), settings)
    started = time.perf_counter()
    while simulation.has_work:
        simulation.step()
    result = simulation.measurements.result(policy="static:ngram:4", workload="drawn")
    result.to_json()
    return {
        "what": "memory",
        "requests": result.num_requests,
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "seconds": round(time.perf_counter() - started, 1),
    }


def scaling(num_requests: int, blocks: int) -> dict[str, object]:
    """Two runs one after another over two at a time, in worker processes that are warm."""
    ratios = []
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(speed, [8, 8]))
        for _ in range(blocks):
            started = time.perf_counter()
            for _ in range(2):
                pool.submit(speed, num_requests).result()
            middle = time.perf_counter()
            list(pool.map(speed, [num_requests] * 2))
            ratios.append((middle - started) / (time.perf_counter() - middle))
    return {
        "what": "scaling",
        "two_processes_over_one": [round(ratio, 2) for ratio in ratios],
        "median": round(float(np.median(ratios)), 2),
    }


def main() -> None:
    """Measure, print, and write the results where asked."""
    parser = argparse.ArgumentParser(description="speed and memory of the what-if replay")
    parser.add_argument("--requests", type=int, default=640, help="of the runs for speed")
    parser.add_argument("--many", type=int, default=100_000, help="of the run for memory")
    parser.add_argument("--blocks", type=int, default=5, help="of the runs for scaling")
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/replay.json")
    options = parser.parse_args()
    if options.only_memory:
        print(json.dumps(memory(options.many)))
        return
    results = [speed(options.requests)]
    print(results[-1], flush=True)
    command = [sys.executable, "-m", "benchmarks.replay", "--only-memory"]
    done = subprocess.run(
        [*command, "--many", str(options.many)], stdout=subprocess.PIPE, check=True
    )
    results.append(json.loads(done.stdout))
    print(results[-1], flush=True)
    results.append(scaling(options.requests // 4, options.blocks))
    print(results[-1])
    if options.json:
        print(write_results("replay", "python -m benchmarks.replay --json", results))


if __name__ == "__main__":
    main()
