"""How long the goodput policy plans, and how good its plans are.

    python -m benchmarks.policies [--repeats 60] [--instances 3000]

Time: 8 positions, 4 arms (two of one family, one free), batches of 1 to 256 with drawn survival and
contexts, verification linear, in stairs and flat up to a ridge. Of each batch and shape 20 problems
take turns, so that caches hold no single one; so do batches and shapes, since what else this machine does
lasts for seconds. The cost is that of the instances, whose calls
take a sixth of a plan of 8 requests. Then whole steps of a `Controller`, up to 16 positions, with its online estimators,
with nothing between them, and with a forward of 24 MB of weights between plan and observation, which
leaves nothing of the controller in the caches. Learning may wait for up to eight steps: see the means.
Quality: the ratio to brute force for up to 5 requests, and to a multi-start local search at 64; the
instances are those of the tests. Absolute times of a shared machine say little: see the 10th
percentile too.
"""

import argparse
import sys
import time

import numpy as np

from benchmarks.measuring import write_results
from sdcontrol.controller import Controller
from sdcontrol.core import (
    BatchView,
    Belief,
    FloatArray,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
    family_of,
)
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.reading import read, to_choices
from tests.plan_instances import (
    ARMS,
    HORIZON,
    SHAPES,
    all_plans,
    drawn_instance,
    multi_start,
    small_instance,
    worth,
)

_BATCH_SIZES = (1, 8, 64, 256)
_PROBLEMS = 20  # of each batch and shape
_PASSES = 5  # through them in a turn, after one that is not counted


def plan_times(repeats: int) -> dict[tuple[int, str], dict[str, object]]:
    """Microseconds of `plan` over drawn problems, by batch and shape, which take turns."""
    policy, problems = Goodput(), dict[tuple[int, str], list[tuple[BatchView, Belief]]]()
    for batch in _BATCH_SIZES:
        for shape in SHAPES:
            generator = np.random.default_rng(batch)
            drawn = [drawn_instance(generator, batch, 8, ARMS, shape) for _ in range(_PROBLEMS)]
            problems[batch, shape] = drawn
    microseconds: dict[tuple[int, str], list[float]] = {key: [] for key in problems}
    for _ in range(max(repeats // _PASSES, 1)):
        for key, drawn in problems.items():
            for number in range(_PASSES + 1):
                for view, belief in drawn:
                    started = time.perf_counter()
                    policy.plan(view, belief)
                    if number:  # the first time the loops are fetched
                        microseconds[key].append(1e6 * (time.perf_counter() - started))
    return {
        (batch, shape): {"time": "plan", "batch": batch, "shape": shape, **_spread(times)}
        for (batch, shape), times in microseconds.items()
    }


def _spread(microseconds: list[float]) -> dict[str, object]:
    low, median, high = np.percentile(microseconds, [10, 50, 99])
    return {
        "p10_us": round(float(low), 1),
        "median_us": round(float(median), 1),
        "p99_us": round(float(high), 1),
    }


def step_times(batch: int, steps: int, *, is_cold: bool) -> dict[str, object]:
    """Microseconds of a controller's `plan` and `observe` over a synthetic decode."""
    generator = np.random.default_rng(batch)
    controller = Controller("goodput")
    rates = generator.uniform(0.4, 0.9, batch)
    weights = generator.normal(size=(24, 256, 1024)).astype(np.float32)
    plans, observes = [0.0], [0.0]
    for step in range(steps):
        view = decode_view(generator, batch, step)
        started = time.perf_counter()
        plan = controller.plan(view)
        plans.append(time.perf_counter() - started)
        observation = outcome(generator, view, plan, rates, plans[-1] + observes[-1])
        if is_cold:
            forward(weights)
        closed = time.perf_counter()
        controller.observe(observation)
        observes.append(time.perf_counter() - closed)
    warm = steps // 4
    rows = {"plan": 1e6 * np.array(plans[warm:]), "observe": 1e6 * np.array(observes[warm:])}
    rows["both"] = rows["plan"] + rows["observe"]
    times: dict[str, object] = {
        "time": f"plan and observe{', a forward between' if is_cold else ''}",
        "batch": batch,
    }
    for name, microseconds in rows.items():
        median, high = np.percentile(microseconds, [50, 90])
        times[f"{name}_median_us"] = round(float(median), 1)
        times[f"{name}_mean_us"] = round(float(microseconds.mean()), 1)
        times[f"{name}_p90_us"] = round(float(high), 1)
    return times


def forward(weights: FloatArray) -> None:
    """Something like a small model's: reads all weights, `[layers, width, hidden]`."""
    hidden = np.ones((8, weights.shape[1]), np.float32)
    for matrix in weights:
        hidden = np.maximum(hidden @ matrix, 0.0) @ matrix.T
        hidden /= np.abs(hidden).max() + 1.0


def decode_view(generator: np.random.Generator, batch: int, step: int) -> BatchView:
    """Requests whose context grows, with hints of an n-gram look-up and of a lagging cache."""
    matches = generator.geometric(0.2, batch).tolist()
    requests = tuple(
        RequestView(
            id=str(r),
            context_tokens=3000 + 17 * r + 2 * step,
            generated_tokens=2 * step,
            remaining_tokens=4096,
            drafters=ARMS,
            hints={
                "ngram": Hint(max_draft_tokens=32 * (match > 1), match_tokens=match),
                "draft_model": Hint(catch_up_tokens=(7 * r + step) % 40),
            },
        )
        for r, match in enumerate(matches)
    )
    return BatchView(step, requests, 1 << 20)


def outcome(
    generator: np.random.Generator,
    view: BatchView,
    plan: Plan,
    rates: FloatArray,
    controller_seconds: float,
) -> Observation:
    """Draft tokens accepted at the requests' rates, in steps of a small model."""
    lengths = tuple(choice.num_draft_tokens for choice in plan.choices)
    runs = generator.geometric(1.0 - rates) - 1
    accepted = tuple(min(n, int(run)) for n, run in zip(lengths, runs, strict=True))
    deepest: dict[str, int] = {}
    for choice in plan.choices:
        if choice.drafter is not None:
            family = family_of(choice.drafter)
            deepest[family] = max(deepest.get(family, 0), choice.num_draft_tokens)
    rounds = {"ngram": 1e-6, "sparse_kv": 4e-3, "draft_model": 1e-3}
    noise = float(generator.normal(1.0, 0.05))
    verify = noise * (5e-3 + 1e-4 * (len(lengths) + sum(lengths)))
    drafting = {family: noise * rounds[family] * n for family, n in deepest.items()}
    emitted = tuple(n + 1 for n in accepted)
    timing = Timing(drafting, verify, controller_seconds, 2e-4)
    shadow = {
        "ngram": tuple(
            None if choice.drafter == "ngram" else min(int(run), n)
            for choice, run, n in zip(plan.choices, runs, emitted, strict=True)
        )
    }
    return Observation(view, plan, lengths, lengths, accepted, emitted, timing, None, None, shadow)


def brute_force_ratios(count: int) -> list[dict[str, object]]:
    """Of the best plan, what ours is worth: tokens per second, and at a given rate."""
    generator = np.random.default_rng(777)
    ratios, given = [], []
    for turn in range(count):
        view, belief = small_instance(generator, turn)
        problem = read(view, belief, HORIZON)
        gains, seconds = all_plans(view, belief)
        best = float((gains / seconds).max())
        rate = best * (0.7, 1.0, 1.5)[turn % 3]
        values = gains - rate * seconds
        if problem is None:
            continue
        answer, at_rate = maximise(problem), maximise(problem, rate)
        gain, spent = worth(view, Plan(to_choices(problem.arms, problem.lengths, answer)), belief)
        ratios.append(gain / spent / best)
        gain, spent = worth(view, Plan(to_choices(problem.arms, problem.lengths, at_rate)), belief)
        lost = float(values.max()) - (gain - rate * spent)
        given.append(1.0 - lost / float(gains[values.argmax()]))
    return [_quality("brute force", ratios), _quality("brute force at a given rate", given)]


def local_search_ratios(count: int) -> dict[str, object]:
    """Rate of the plan over that of a multi-start local search, at 64 requests."""
    generator = np.random.default_rng(2)
    ratios = []
    for turn in range(count):
        view, belief = drawn_instance(generator, 64, 8, ARMS, SHAPES[turn % 3])
        problem = read(view, belief, HORIZON)
        assert problem is not None
        ratios.append(maximise(problem).rate / multi_start(problem, generator))
    return _quality("local search at 64 requests", ratios)


def _quality(beside: str, ratios: list[float]) -> dict[str, object]:
    return {
        "beside": beside,
        "instances": len(ratios),
        "least": float(min(ratios)),
        "mean": float(np.mean(ratios)),
        "below 0.995": sum(bool(ratio < 0.995) for ratio in ratios),
    }


def main() -> int:
    """Print what was measured, and write it to `benchmarks/results/policies.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--instances", type=int, default=3000)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    times = plan_times(arguments.repeats)
    for batch in _BATCH_SIZES:
        rows += [times[batch, shape] for shape in SHAPES]
        for is_cold in (False, True):
            rows.append(step_times(batch, 5 * arguments.repeats, is_cold=is_cold))
    rows += [*brute_force_ratios(arguments.instances), local_search_ratios(60)]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    command = f"python -m benchmarks.policies --repeats {arguments.repeats}"
    print(write_results("policies", f"{command} --instances {arguments.instances}", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
