"""How long the goodput policy plans, and how good its plans are.

    python -m benchmarks.policies [--json FILE]

Time: 8 positions, 4 arms (two of one family, one free), batches of 8, 64 and 256 with drawn
survival and contexts, verification linear, in stairs and flat up to a ridge. Of each batch and
shape 20 problems take turns, so that caches hold no single one. Quality: the ratio to brute force
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
    quality = {
        "brute force": brute_force_ratios(instances, 150),
        "local search at 64": local_search_ratios(instances, 9),
    }
    for name, row in quality.items():
        print(f"{name}: " + "  ".join(f"{key} {value:.6g}" for key, value in row.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_record(times, quality), indent=2) + "\n")
    return 0


def _record(times: list[dict[str, object]], quality: dict[str, dict[str, object]]) -> object:
    return {
        "command": "python -m benchmarks.policies",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "plan": times,
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
