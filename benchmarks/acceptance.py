"""How well is acceptance believed, where the truth is known? `python -m benchmarks.acceptance`.

    python -m benchmarks.acceptance [--seeds N] [--json]                    about 45 seconds

Requests of 40 tokens come in turns; each has hazards of its own, drawn by one of `WORLDS`, and drafts six
tokens in every step. After each step the believed survival of every position is compared with the true
one: the divergence is what believing costs in log loss, 0 where the belief is the truth. Young requests
are those in their first four steps, which is all that most short ones have. The first turn, after its first
step, is what an estimator that knows nothing begins with; it and the seven after it are not counted else.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.measuring import write_results
from sdcontrol.core import (
    BatchView,
    Choice,
    FloatArray,
    Observation,
    Plan,
    RequestView,
    Timing,
)
from sdcontrol.estimators.acceptance import AcceptanceEstimator

__all__ = ["WORLDS", "divergences", "main"]

ARM = "draft_model"
TURNS = 32
FIRST_TURNS = 8  # counted neither as young nor as old
TOKENS = 40
DRAFT = 6
YOUNG_STEPS = 4
BATCHES = (1, 8, 32)
AGES = ("young", "old", "first")
KINDS = ((0.12, 0.3), (0.9, 0.93), (0.5, 0.65, 0.7), (0.9, 0.93))

Hazards = Callable[[int], FloatArray]
"""The hazards of a request in its n-th step."""
World = Callable[[np.random.Generator, int], Hazards]
"""A new request, drawn in a turn."""


def _steady(rates: Sequence[float]) -> Hazards:
    """The last rate holds beyond."""
    hazards = np.array([rates[min(j, len(rates) - 1)] for j in range(DRAFT)])
    return lambda step: hazards


def _spread(rates: Sequence[float], deviation: float) -> Hazards:
    odds = np.array(rates) / (1.0 - np.array(rates)) * np.exp(deviation)
    return _steady((odds / (1.0 + odds)).tolist())


def _switching(rng: np.random.Generator, turn: int) -> Hazards:
    change, before, after = rng.integers(5, 25), *rng.choice([0.2, 0.85], 2)
    rates = np.full(DRAFT, before), np.full(DRAFT, after)
    return lambda step: rates[int(step >= change)]


WORLDS: dict[str, World] = {
    "alike": lambda rng, turn: _steady([0.7]),
    "spread out": lambda rng, turn: _spread([0.65], rng.normal()),
    "of two kinds": lambda rng, turn: _steady([float(rng.choice([0.15, 0.92]))]),
    "of two kinds, rising": lambda rng, turn: _steady(KINDS[int(rng.random() >= 0.4)]),
    "one kind per turn": lambda rng, turn: _steady(KINDS[turn % len(KINDS)]),
    "saturating": lambda rng, turn: _spread([0.7, 0.55, 0.5, 0.45, 0.4, 0.4], 0.5 * rng.normal()),
    "changing": _switching,
}


def divergences(world: World, batch: int, seed: int) -> tuple[float, float, float]:
    """Mean divergence, in nats per position, of young requests, of older ones, and of those of the first turn."""
    rng, estimator = np.random.default_rng(seed), AcceptanceEstimator()
    step, young, old, first = 0, [], [], []
    for turn in range(TURNS):
        requests = [world(rng, turn) for _ in range(batch)]
        emitted, age = np.zeros(batch, np.int64), 0
        while (emitted < TOKENS).any():
            live = np.flatnonzero(emitted < TOKENS)
            hazards = np.array([requests[r](age) for r in live])
            view = _view([f"{turn} {r}" for r in live], step)
            believed = estimator.survival(view, DRAFT)[ARM]
            cost = _divergence(np.cumprod(hazards, axis=1), believed)
            if turn >= FIRST_TURNS:
                (young if age < YOUNG_STEPS else old).append(cost)
            elif step and not turn:
                first.append(cost)
            is_right = np.logical_and.accumulate(rng.random(hazards.shape) < hazards, axis=1)
            accepted = is_right.sum(axis=1)
            estimator.update(_observation(view, accepted.tolist()))
            emitted[live] += accepted + 1
            step, age = step + 1, age + 1
    return float(np.mean(young)), float(np.mean(old)), float(np.mean(first))


def _divergence(truth: FloatArray, believed: FloatArray) -> float:
    belief = np.clip(believed, 1e-4, 1.0 - 1e-4)
    right = truth * np.log(truth / belief)
    wrong = (1.0 - truth) * np.log((1.0 - truth) / (1.0 - belief))
    return float((right + wrong).mean())


def _view(names: Sequence[str], step: int) -> BatchView:
    requests = tuple([RequestView(name, 100, step, 10_000, 0.0, (ARM,)) for name in names])
    return BatchView(step, requests, 1 << 20)


def _observation(view: BatchView, accepted: Sequence[int]) -> Observation:
    drafts = (DRAFT,) * len(accepted)
    emitted = tuple([count + 1 for count in accepted])
    plan = Plan((Choice.of(ARM, DRAFT),) * len(accepted))
    return Observation(view, plan, drafts, drafts, tuple(accepted), emitted, Timing())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=16, help="of each world (default: 16)")
    parser.add_argument("--json", action="store_true", help="write the results file")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    for name, world in WORLDS.items():
        for batch in BATCHES:
            runs = np.array([divergences(world, batch, s) for s in range(options.seeds)])
            errors = runs.std(axis=0) / max(len(runs) - 1, 1) ** 0.5
            row: dict[str, object] = {"world": name, "batch": batch}
            for age, mean, error in zip(AGES, runs.mean(axis=0), errors, strict=True):
                row |= {age: float(mean), f"{age}_se": float(error)}
            rows.append(row)
            young, old, first = (row[age] for age in AGES)
            words = f"young {young:.3f}  older {old:.3f}  in the first turn {first:.3f}"
            print(f"{name:22s} batch {batch:<2d} {words}", flush=True)
    if options.json:
        command = f"python -m benchmarks.acceptance --seeds {options.seeds} --json"
        print(write_results("acceptance", command, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
