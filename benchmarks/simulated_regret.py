"""Simulated regret: the goodput policy against every fixed setting, on made-up machines.

    python -m benchmarks.simulated_regret [--machines small,large,gpu] [--seeds N]     about 2 minutes

The what-if simulation decodes the same requests under every setting; step times carry 5 % of noise.
Three machines (a forward whose tokens cost from the first one on; one that is flat up to 16 tokens
and steep beyond; one that is flat up to 200), four batch sizes, four kinds of text. The policy knows
none of this: it starts from its defaults, and its learning is part of the time. Only steps with a full
batch and no prompt beside it count. Nothing here is measured on a machine, and the controller's own
time is left out: see `benchmarks.regret` for live figures.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring import write_results
from sdcontrol.controller import Controller
from sdcontrol.core import FloatArray, Observation
from sdcontrol.outcomes import DEPTH, ArmOutcomes
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes, NoisyTimes
from sdcontrol.traces.workload import SimulatedRequest, Workload

SPARSE = "sparse_kv:128"
FIXED: dict[str, object] = {
    "off": "off",
    **{f"ngram:{n}": f"static:ngram:{n}" for n in (2, 4, 8, 16)},
    **{f"draft_model:{n}": f"static:draft_model:{n}" for n in (1, 2, 4, 8)},
    **{
        f"{SPARSE}:{n}": {"kind": "static", "drafter": SPARSE, "num_draft_tokens": n}
        for n in (2, 4, 8)
    },
}
BATCH_SIZES = (1, 4, 16, 32)
ADAPTIVE, ALONE = "goodput", "each step alone"
_PROMPT_TOKENS = 200
_OUTPUT_TOKENS = 128
_NOISE = 0.05
_CLOSED_BATCHES = 8
_FIRST_BATCHES, _APART = 12, 1000  # and seeds between them
_EARLIER = 500  # seeds from a batch to those of the run before it


@dataclass(frozen=True, slots=True)
class Machine:
    """A `Cost`: flat up to the ridge, then a price per token. Seconds."""

    forward: float
    token: float  # of every token
    ridge_tokens: int
    beyond: float  # of every token beyond the ridge
    kv_token: float
    overhead: float
    rounds: Mapping[str, tuple[float, float]]  # by family: constant, per request

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """See `Cost`."""
        tokens = np.asarray(num_tokens, dtype=float)
        beyond = self.beyond * np.maximum(tokens - self.ridge_tokens, 0.0)
        seconds = self.forward + self.token * tokens + beyond
        return np.asarray(seconds + self.kv_token * np.asarray(kv_tokens, dtype=float))

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """See `Cost`."""
        constant, per_request = self.rounds[family]
        requests = np.asarray(num_requests, dtype=float)
        return np.where(requests > 0, constant + per_request * requests, 0.0)

    def catch_up_seconds(self, family: str, num_tokens: float) -> float:
        """A token that a drafter's cache lacks is computed as one more request would be."""
        return self.rounds[family][1] * num_tokens

    def overhead_seconds(self) -> float:
        """See `Cost`."""
        return self.overhead


MACHINES = {
    "small": Machine(
        3.2e-3, 0.12e-3, 8, 0.1e-3, 1.2e-7, 4e-4,
        {"ngram": (1e-4, 2e-5), "draft_model": (1.1e-3, 3e-5), "sparse_kv": (3.2e-3, 1.2e-4)},
    ),
    "large": Machine(
        40e-3, 0.15e-3, 16, 1.4e-3, 2e-7, 6e-4,
        {"ngram": (1e-4, 2e-5), "draft_model": (6e-3, 2e-4), "sparse_kv": (40e-3, 5e-4)},
    ),
    "gpu": Machine(
        6.5e-3, 2e-6, 200, 3e-5, 4e-8, 4e-4,
        {"ngram": (1e-4, 2e-6), "draft_model": (1e-3, 2e-6), "sparse_kv": (6.5e-3, 1e-5)},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """Text that repeats itself in runs, and how often other drafters are right about it."""

    run_goes_on: float
    run_begins: float
    draft_model: float
    sparse_kv: float


KINDS = {
    "copy": Kind(0.97, 0.05, 0.75, 0.9),
    "code": Kind(0.75, 0.15, 0.6, 0.85),
    "free": Kind(0.45, 0.08, 0.5, 0.7),
}


def cells(machines: Sequence[str]) -> list[tuple[str, int, str]]:
    """Machine, batch size and kind of every cell."""
    kinds = (*KINDS, "mixed")
    return [(m, batch, kind) for m in machines for batch in BATCH_SIZES for kind in kinds]


def measure(machine: str, batch: int, kind: str, seed: int) -> dict[str, object]:
    """Tokens per second of every setting in one cell, simulated."""
    workload = workload_of(kind, batch, seed)
    rates = {name: _rate(policy, machine, workload, batch, seed) for name, policy in FIXED.items()}
    best = max(rates, key=lambda name: rates[name])
    adaptive = _rate("goodput", machine, workload, batch, seed)
    return {
        "machine": machine,
        "batch_size": batch,
        "kind": kind,
        "best_fixed": best,
        "best_fixed_over_off": rates[best] / rates["off"],
        "goodput_over_best_fixed": adaptive / rates[best],
        "goodput_over_off": adaptive / rates["off"],
    }


def measure_closed(machine: str, batch: int, kind: str, seed: int) -> dict[str, object]:
    """The same where nothing follows a batch: eight, each decoded to its end before the next begins.

    Beside the fixed settings, `goodput` that maximises the tokens of each step alone; and of twelve other
    batches, each the first that a controller sees, `goodput` over the best fixed setting of the eight: as
    it is, and with a warm start from what another controller saw in a batch before.
    """
    specs = {**FIXED, ADAPTIVE: ADAPTIVE, ALONE: {"kind": "goodput", "waits_for_slowest": False}}
    cell = machine, batch, kind
    rates = {name: closed_rate(spec, cell, [seed]) for name, spec in specs.items()}
    best = max(FIXED, key=lambda name: rates[name])
    seeds = range(seed + _APART, seed + _APART * (_FIRST_BATCHES + 1), _APART)
    first = {name: closed_rate(specs[name], cell, seeds, batches=1) for name in (ADAPTIVE, best)}
    warm = closed_rate(ADAPTIVE, cell, seeds, batches=1, earlier=1)
    return {
        "machine": machine,
        "batch_size": batch,
        "kind": kind,
        "best_fixed": best,
        "best_fixed_over_off": rates[best] / rates["off"],
        "goodput_over_best_fixed": rates[ADAPTIVE] / rates[best],
        "goodput_over_off": rates[ADAPTIVE] / rates["off"],
        "goodput_over_each_step_alone": rates[ADAPTIVE] / rates[ALONE],
        "first_batch_over_best_fixed": first[ADAPTIVE] / first[best],
        "warm_start_over_best_fixed": warm / first[best],
    }


def closed_rate(
    policy: object,
    cell: tuple[str, int, str],
    seeds: Sequence[int],
    *,
    batches: int = _CLOSED_BATCHES,
    earlier: int = 0,
) -> float:
    """Tokens per second of whole batches, prompts left out; a controller for each seed.

    It is told what another saw, in as many `earlier` batches of the same kind.
    """
    tokens, seconds = 0, 0.0
    for seed in seeds:
        controller, before = (Controller(policy, clock=None) for _ in range(2))  # type: ignore[arg-type]  # a name or a mapping
        controller.warm_start(_decoded(before, cell, seed + _EARLIER, earlier))
        for step in _decoded(controller, cell, seed, batches):
            if not step.view.prefill_tokens:
                tokens += sum(step.emitted)
                seconds += step.timing.total_seconds
    return tokens / seconds


def _decoded(
    controller: Controller, cell: tuple[str, int, str], seed: int, batches: int
) -> list[Observation]:
    """The steps of batches that nothing follows, one after the other; of each seed, requests of other names."""
    machine, batch, kind = cell
    settings = SimulationSettings(
        max_batch_size=batch, max_prefill_tokens=4096, prefix_sharing=False
    )
    times = NoisyTimes(CostTimes(MACHINES[machine]), relative_noise=_NOISE, seed=seed)
    steps: list[Observation] = []
    for block in range(batches):
        requests = list(workload_of(kind, batch, seed + _CLOSED_BATCHES * block))[:batch]
        named = [replace(request, id=f"{seed}-{block}-{request.id}") for request in requests]
        simulation = Simulation(Workload.of(kind, named), controller, times, settings)
        while simulation.has_work:
            steps.append(simulation.step())
    return steps


def _rate(policy: object, machine: str, workload: Workload, batch: int, seed: int) -> float:
    times = NoisyTimes(CostTimes(MACHINES[machine]), relative_noise=_NOISE, seed=seed)
    settings = SimulationSettings(
        max_batch_size=batch, max_prefill_tokens=4096, prefix_sharing=False
    )
    simulation = Simulation(workload, Controller(policy, clock=None), times, settings)  # type: ignore[arg-type]  # a name or a mapping
    tokens, seconds = 0, 0.0
    while simulation.has_work:
        step = simulation.step()
        if len(step.view.requests) == batch and not step.view.prefill_tokens:
            tokens += sum(step.emitted)
            seconds += step.timing.total_seconds
    return tokens / seconds


def workload_of(kind: str, batch: int, seed: int) -> Workload:
    """Four batches of requests of a kind, or of all in turn where it is "mixed"; 24 at least."""
    generator = np.random.default_rng(seed)
    count = -(-max(4 * batch, 24) // batch) * batch
    kinds = list(KINDS) if kind == "mixed" else [kind]
    return Workload.of(
        kind, (_request(generator, KINDS[kinds[n % len(kinds)]], n) for n in range(count))
    )


def _request(generator: np.random.Generator, kind: Kind, number: int) -> SimulatedRequest:
    outcomes = {
        "ngram": _look_up(generator, kind),
        "draft_model": _model(generator, kind.draft_model),
        SPARSE: _model(generator, kind.sparse_kv),
    }
    return SimulatedRequest(str(number), 0.0, _PROMPT_TOKENS, _OUTPUT_TOKENS, outcomes)


def _look_up(generator: np.random.Generator, kind: Kind) -> ArmOutcomes:
    """Nearly always right inside a run, whose length so far is the match; seldom outside."""
    length = _OUTPUT_TOKENS + DEPTH
    matches = np.zeros(length, dtype=int)
    for i in range(1, length):
        goes_on = kind.run_goes_on if matches[i - 1] else kind.run_begins
        matches[i] = matches[i - 1] + 1 if generator.random() < goes_on else 0
    is_right = generator.random(length) < np.where(matches > 0, 0.98, 0.15)
    match_tokens = np.minimum(matches[:_OUTPUT_TOKENS], 30)
    found = (match_tokens > 0) | (generator.random(_OUTPUT_TOKENS) < 0.6)
    most = np.where(found, DEPTH, 0).astype(np.uint8)
    return ArmOutcomes(
        np.minimum(runs_of(is_right), most), match_tokens.astype(np.uint8), max_draft_tokens=most
    )


def _model(generator: np.random.Generator, rate: float) -> ArmOutcomes:
    """A rate of the request's own, which wanders along the text."""
    length = _OUTPUT_TOKENS + DEPTH
    own = generator.beta(12.0 * rate, 12.0 * (1.0 - rate))
    wander = np.convolve(generator.standard_normal(length), np.ones(8) / np.sqrt(8.0), "same")
    hazards = np.clip(own + 0.15 * wander, 0.02, 0.99)
    return ArmOutcomes(runs_of(generator.random(length) < hazards))


def runs_of(is_right: NDArray[np.bool_], length: int = _OUTPUT_TOKENS) -> NDArray[np.uint8]:
    """How many draft tokens in a row are right from each of `length` positions on, at most `DEPTH`."""
    run = np.zeros(len(is_right) + 1, dtype=int)
    for i in range(len(is_right) - 1, -1, -1):
        run[i] = run[i + 1] + 1 if is_right[i] else 0
    return np.minimum(run[:length], DEPTH).astype(np.uint8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(arguments)
    results = []
    for machine, batch, kind in cells(options.machines.split(",")):
        for seed in range(options.seeds):
            found = measure(machine, batch, kind, seed)
            results.append({**found, "seed": seed, "is_simulated": True})
            print(
                f"{machine:6} batch {batch:2} {kind:6} goodput {found['goodput_over_best_fixed']:.3f} "
                f"of the best fixed ({found['best_fixed']}, {found['best_fixed_over_off']:.2f}x off)",
                flush=True,
            )
    ratios = [float(str(found["goodput_over_best_fixed"])) for found in results]
    print(f"simulated: least {min(ratios):.3f}, median {statistics.median(ratios):.3f}")
    command = f"python -m benchmarks.simulated_regret --seeds {options.seeds}"
    print(write_results("simulated_regret", command, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
