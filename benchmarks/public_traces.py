"""Every policy on recorded arrivals and texts, with the published step times of an H100: simulated.

    python -m benchmarks.public_traces [--workloads edit chat ...] [--processes 2] [--json]

Step times are TurboSpec's coefficients of an 8B model on one H100 (`anchors/`); its EAGLE head prices
`draft_model`; a round of `sparse_kv` is the target's own forward reading 512 KV tokens per request.
Policies begin knowing neither costs nor acceptance, and their own time is not charged; figures
`_with_controller` charge its median on this machine to every step. Load is set by how many requests
would be in flight without drafts: 2, 12, and a queue that keeps the batch at its limit of 64.

What is compared depends on the load. Where the machine keeps up, throughput is that of the arrivals
whatever is done, and a policy shows in the pace of each request: mean time per output token (TPOT).
Where it does not, the queue keeps the batch full and throughput is what differs. The other figures
stand beside the one compared, output tokens per busy second among them: it rewards a policy for
letting requests pile up, since larger batches share their steps. A rival that runs one drafter is
tried with each, and counts with its best in each cell; so does static, in hindsight.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from benchmarks.measuring import write_results
from benchmarks.public_data import DATA, PROCESSES, WORKLOADS, workload
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Confidence, Observation, Plan
from sdcontrol.policies.oracle import Oracle
from sdcontrol.traces.replay_result import ReplayResult
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.simulated_drafts import Foreknowledge
from sdcontrol.traces.slo import SLO
from sdcontrol.traces.step_times import CostTimes, LinearCost, LinearDrafter
from sdcontrol.traces.workload import Workload

LOADS = {"low": (2, 1.0, 80), "middle": (12, 1.0, 160), "high": (64, 4.0, 400)}
"""In flight without drafts, times the rate that this takes, and how many are simulated."""
COMPARED = {"low": "mean_tpot_ms", "middle": "mean_tpot_ms", "high": "tokens_per_second"}
LIMITS = SLO(ttft_seconds=2.0, tpot_seconds=0.02)
SETTINGS = SimulationSettings(max_batch_size=64, max_prefill_tokens=2048, kv_tokens=450_000)
FIXED = (
    *(f"static:ngram:{tokens}" for tokens in (1, 2, 4, 8, 16)),
    *(f"static:draft_model:{tokens}" for tokens in (1, 2, 4, 8)),
    *(f"static:sparse_kv:512:{tokens}" for tokens in (2, 4, 8)),
)
RIVALS = (
    "concurrency_schedule",
    "smartspec",
    "ema_steps",
    "throughput_aware",
    "budget_argmax",
    "heuristic",
)
POLICIES = (
    "goodput",
    "roofline",
    "off",
    *FIXED,
    *(f"{rival}:{drafter}" for rival in RIVALS for drafter in ("ngram", "draft_model")),
    "oracle",
)
_CATCH_UP_MS = 4.387e-5  # "per_scheduled_token" of the drafter
_ROUNDS = 4  # over which a draft's constant part is spread


def h100_cost() -> LinearCost:
    """Published straight lines, in seconds."""
    path = DATA / "anchors" / "turbospec_h100_latency.json"
    known = json.loads(path.read_text("utf-8"))
    target, head = known["llama_3_1_8b_1xh100"], known["eagle_drafter_for_8b"]
    round_constant = head["per_draft_token"] + head["constant"] / _ROUNDS
    return HeadCost(
        constant_seconds=1e-3 * target["constant"],
        per_token_seconds=1e-3 * target["per_batched_token"],
        per_kv_token_seconds=1e-3 * target["per_kv_token"],
        per_request_seconds=1e-3 * target["per_request"],
        drafters={
            "draft_model": LinearDrafter(
                1e-3 * round_constant, 1e-3 * head["per_request"], 1e-3 * head["per_kv_token"]
            ),
            "sparse_kv": LinearDrafter(
                1e-3 * target["constant"],
                1e-3 * (target["per_batched_token"] + target["per_request"]),
                1e-3 * target["per_kv_token"],
            ),
        },
    )


class HeadCost(LinearCost):
    """A head reads the prompt beside the target; what it lacks takes it next to nothing."""

    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        """Published for each token that is scheduled, in milliseconds."""
        return 1e-3 * _CATCH_UP_MS * num_tokens if family == "draft_model" else 0.0


class Timed:
    """A controller, and the seconds that each of its steps took on this machine."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.policy = controller.policy
        self.drafts = getattr(controller, "drafts", True)
        self.learns = getattr(controller, "learns", True)
        self.seconds: list[float] = []

    def plan(self, view: BatchView) -> Plan:
        """Plan; a step begins."""
        started = time.perf_counter()
        plan = self._controller.plan(view)
        self.seconds.append(time.perf_counter() - started)
        return plan

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """Refine."""
        started = time.perf_counter()
        refined = self._controller.refine(view, plan, confidence)
        self.seconds[-1] += time.perf_counter() - started
        return refined

    def observe(self, observation: Observation) -> None:
        """Learn."""
        started = time.perf_counter()
        self._controller.observe(observation)
        if observation.emitted:
            self.seconds[-1] += time.perf_counter() - started


def timed_arrivals(requests: Workload, in_flight: int, excess: float, cost: LinearCost) -> Workload:
    """Arrivals as recorded, `excess` times as fast as keeps so many in flight without drafts.

    In balance a request takes as much machine time as passes between two arrivals:
    its prompt's tokens, and its share of a step for each of its own.
    """
    kept = list(requests)
    prompt = statistics.fmean(request.prompt_tokens for request in kept)
    output = statistics.fmean(request.output_tokens for request in kept)
    step = float(cost.verify_seconds(in_flight, in_flight * (prompt + output / 2), in_flight))
    wanted = 1.0 / (prompt * cost.per_token_seconds + output * step / in_flight)
    recorded = (len(kept) - 1) / kept[-1].arrival_seconds
    return requests.faster(excess * wanted / recorded)


def simulated(policy: str, requests: Workload, cost: LinearCost) -> tuple[ReplayResult, float]:
    """The result, and the median seconds that the controller took for a step."""
    known = Foreknowledge()
    planner = Timed(Controller(_spec(policy, known), clock=None))
    times = CostTimes(cost)
    simulation = Simulation(requests, planner, times, SETTINGS, foreknowledge=known)
    while simulation.has_work:
        simulation.step()
    result = simulation.measurements.result(policy=policy, workload=requests.name, slo=LIMITS)
    return result, statistics.median(planner.seconds)


def _spec(policy: str, known: Foreknowledge) -> object:
    if policy == "oracle":
        return Oracle(known)
    kind, _, drafter = policy.partition(":")
    return {"kind": kind, "drafter": drafter} if kind in RIVALS else policy


def cell(name: str, load: str, policies: Sequence[str], scale: float) -> dict[str, object]:
    """Every policy on one workload at one load."""
    in_flight, excess, num_requests = LOADS[load]
    cost = h100_cost()
    num_requests = round(scale * num_requests)
    requests = timed_arrivals(workload(name, num_requests), in_flight, excess, cost)
    runs = {policy: _facts(*simulated(policy, requests, cost)) for policy in policies}
    return {
        "workload": name,
        "load": load,
        "requests": num_requests,
        "compared": COMPARED[load],
        **comparison(runs),
        "runs": runs,
    }


def _facts(result: ReplayResult, planner_seconds: float) -> dict[str, float]:
    times, series = result.times, result.series
    batch = sum(point.request_seconds for point in series) / result.busy_seconds
    charged = result.busy_seconds + result.num_steps * planner_seconds
    return {
        "tokens_per_busy_second": round(result.tokens_per_busy_second, 1),
        "tokens_per_busy_second_with_controller": round(result.output_tokens / charged, 1),
        "tokens_per_second": round(result.tokens_per_second, 1),
        "mean_tpot_ms": round(1e3 * float(np.mean(times["tpot_seconds"])), 3),
        "p99_tpot_ms": round(1e3 * float(np.quantile(times["tpot_seconds"], 0.99)), 3),
        "median_ttft_ms": round(1e3 * float(np.median(times["ttft_seconds"])), 1),
        "mean_end_to_end_ms": round(1e3 * float(np.mean(times["end_to_end_seconds"])), 1),
        "slo_requests_per_second": round(result.goodput_requests_per_second, 3),
        "share_within_slo": round(result.requests_within_slo / max(result.num_requests, 1), 3),
        "mean_batch": round(batch, 1),
        "wasted_per_output_token": round(result.wasted_draft_tokens / result.output_tokens, 3),
        "refused": result.num_refused,
        "planner_us_median": round(1e6 * planner_seconds, 1),
    }


def comparison(runs: Mapping[str, Mapping[str, float]]) -> dict[str, object]:
    """`goodput` beside the best fixed setting, the best adaptive rival and the oracle.

    Ratios are above 1 where `goodput` is better.
    """
    if "goodput" not in runs:
        return {}
    groups = {
        "fixed": [p for p in runs if p == "off" or p.startswith("static")],
        "rival": [p for p in runs if p.partition(":")[0] in RIVALS],
        "oracle": [p for p in runs if p == "oracle"],
    }
    return {
        f"to_best_{group}": {
            figure: _ratio(runs, policies, figure, sign)
            for figure, sign in (
                ("tokens_per_busy_second", 1),
                ("tokens_per_busy_second_with_controller", 1),
                ("tokens_per_second", 1),
                ("mean_tpot_ms", -1),
                ("mean_end_to_end_ms", -1),
                ("slo_requests_per_second", 1),
            )
        }
        for group, policies in groups.items()
        if policies
    }


def _ratio(
    runs: Mapping[str, Mapping[str, float]], policies: Sequence[str], figure: str, sign: int
) -> dict[str, object]:
    best = max(policies, key=lambda policy: sign * runs[policy][figure])
    ours, theirs = runs["goodput"][figure], runs[best][figure]
    if sign < 0:
        ours, theirs = theirs, ours
    return {"ratio": round(ours / theirs, 3) if theirs else None, "best": best}


def main() -> int:
    """Simulate, print, and write the results where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="write results/public_traces.json")
    options = parser.parse_args()
    if not DATA.exists():
        print(f"no public data in {DATA}; set SDCONTROL_DATA to their folder", file=sys.stderr)
        return 1
    # The last load is the longest: it begins first.
    pairs = [(name, load) for load in reversed(options.loads) for name in options.workloads]
    with ProcessPoolExecutor(options.processes) as pool:
        run = partial(cell, policies=options.policies, scale=options.scale)
        cells = []
        for found in pool.map(run, *zip(*pairs, strict=True)):
            print(_line(found), flush=True)
            cells.append(found)
    if options.json:
        facts = {
            "what": "simulated",
            "cost": "TurboSpec, llama_3_1_8b_1xh100 and eagle_drafter_for_8b",
            "settings": SETTINGS.model_dump(mode="json"),
            "slo": LIMITS.model_dump(mode="json"),
            "acceptance": {arm: p.model_dump(mode="json") for arm, p in PROCESSES.items()},
        }
        print(write_results("public_traces", _command(), [facts, *cells]))
    return 0


def _command() -> str:
    return " ".join(["python -m benchmarks.public_traces", *sys.argv[1:]])


def _line(found: Mapping[str, object]) -> str:
    compared, ratios = str(found["compared"]), []
    for group in ("fixed", "rival", "oracle"):
        figures = found.get(f"to_best_{group}")
        if isinstance(figures, dict):
            main, busy = figures[compared], figures["tokens_per_busy_second"]
            ratios.append(f"{group} {main['ratio']} ({main['best']}; busy {busy['ratio']})")
    return f"{found['workload']:>10} {found['load']:>6} {compared:>17}: " + ", ".join(ratios)


if __name__ == "__main__":
    sys.exit(main())
