"""How long the goodput policy plans, and how good its plans are.

    python -m benchmarks.policies [--json FILE]

Time: 8 positions, 4 arms (two of one family, one free), batches of 8, 64 and 256 with drawn
survival and contexts, verification linear, in stairs and flat up to a ridge. Of each batch and
shape 20 problems take turns, so that caches hold no single one: there every search starts from
nothing. Then whole steps of a `Controller` with its online estimators, `plan` and `observe`, whose
searches start from the last plan, as in a decode. Quality: the ratio to brute force
for up to 5 requests, and to a multi-start local search at 64; see tests/test_goodput.py, whose
instances these are. Absolute times of a shared machine say little: look at the 10th percentile too.
"""

import argparse
import importlib.util
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import numpy as np

from sdcontrol.controller import Controller
from sdcontrol.core import (
    BatchView,
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
from sdcontrol.policies.reading import read

ARMS = ("ngram", "sparse_kv:512", "sparse_kv:2048", "draft_model")
SHAPES = ("linear", "stairs", "ridge")


def plan_times(instances: ModuleType, batch: int, shape: str, repeats: int) -> dict[str, object]:
    """Microseconds of `plan` over drawn problems."""
    generator = np.random.default_rng(batch)
    problems = [instances.drawn_instance(generator, batch, 8, ARMS, shape) for _ in range(20)]
    policy = Goodput()
    microseconds = []
    for turn in range(repeats + 2):
        for view, belief in problems:
            started = time.perf_counter()
            policy.plan(view, belief)
            if turn >= 2:
                microseconds.append(1e6 * (time.perf_counter() - started))
    low, median, high = np.percentile(microseconds, [10, 50, 99])
    return {
        "batch": batch,
        "shape": shape,
        "p10_us": round(float(low), 1),
        "median_us": round(float(median), 1),
        "p99_us": round(float(high), 1),
    }


def step_times(batch: int, steps: int) -> dict[str, object]:
    """Microseconds of a controller's `plan` and `observe` over a synthetic decode."""
    generator = np.random.default_rng(batch)
    controller = Controller("goodput")
    rates = generator.uniform(0.4, 0.9, batch)
    plans, observes = [], []
    for step in range(steps):
        view = decode_view(generator, batch, step)
        started = time.perf_counter()
        plan = controller.plan(view)
        planned = time.perf_counter()
        observation = outcome(generator, view, plan, rates)
        closed = time.perf_counter()
        controller.observe(observation)
        observes.append(1e6 * (time.perf_counter() - closed))
        plans.append(1e6 * (planned - started))
    warm = steps // 4
    rows = {"plan": np.array(plans[warm:]), "observe": np.array(observes[warm:])}
    rows["both"] = rows["plan"] + rows["observe"]
    times: dict[str, object] = {"batch": batch}
    for name, microseconds in rows.items():
        median, high = np.percentile(microseconds, [50, 90])
        times[f"{name}_median_us"] = round(float(median), 1)
        times[f"{name}_p90_us"] = round(float(high), 1)
    return times


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
    generator: np.random.Generator, view: BatchView, plan: Plan, rates: FloatArray
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
    timing = Timing(drafting, verify, 3e-4, 2e-4)
    shadow = {
        "ngram": tuple(
            None if choice.drafter == "ngram" else min(int(run), n)
            for choice, run, n in zip(plan.choices, runs, emitted, strict=True)
        )
    }
    return Observation(view, plan, lengths, lengths, accepted, emitted, timing, None, None, shadow)


def brute_force_ratios(instances: ModuleType, count: int) -> dict[str, object]:
    """Goodput of the plan over the best of all plans, on small instances."""
    generator = np.random.default_rng(1)
    ratios = []
    for i in range(count):
        batch = int(generator.integers(1, 6))
        arms = ("a", "b", "c") if i % 2 else ("ngram", "sparse_kv:512", "draft_model")
        depth = 4 if batch < 5 or i % 10 == 0 else 3
        view, belief = instances.drawn_instance(generator, batch, depth, arms, SHAPES[i % 3])
        found = instances.goodput_of(view, Goodput().plan(view, belief), belief)
        ratios.append(found / instances.best_by_brute_force(view, belief))
    return {"instances": count, "least": min(ratios), "mean": float(np.mean(ratios))}


def local_search_ratios(instances: ModuleType, count: int) -> dict[str, object]:
    """Rate of the plan over that of a multi-start local search, at 64 requests."""
    generator = np.random.default_rng(2)
    ratios = []
    for i in range(count):
        view, belief = instances.drawn_instance(generator, 64, 8, ARMS, SHAPES[i % 3])
        problem = read(view, belief, 64)
        ratios.append(maximise(problem).rate / instances.multi_start(problem, generator))
    return {"instances": count, "least": min(ratios), "mean": float(np.mean(ratios))}


def main() -> int:
    """Print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    instances = _instances()
    times = [
        plan_times(instances, batch, shape, arguments.repeats)
        for batch in (8, 64, 256)
        for shape in SHAPES
    ]
    for row in times:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    steps = [step_times(batch, 50 * arguments.repeats // 5) for batch in (1, 8, 64, 256)]
    for row in steps:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    quality = {
        "brute force": brute_force_ratios(instances, 150),
        "local search at 64": local_search_ratios(instances, 9),
    }
    for name, row in quality.items():
        print(f"{name}: " + "  ".join(f"{key} {value:.6g}" for key, value in row.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_record(times, steps, quality), indent=2) + "\n")
    return 0


def _record(
    times: list[dict[str, object]],
    steps: list[dict[str, object]],
    quality: dict[str, dict[str, object]],
) -> object:
    return {
        "command": "python -m benchmarks.policies",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "plan": times,
        "step": steps,
        "quality": quality,
    }


def _instances() -> ModuleType:
    """The instances and judges of the tests, loaded from their file."""
    path = Path(__file__).parents[1] / "tests" / "test_goodput.py"
    spec = importlib.util.spec_from_file_location("goodput_instances", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
