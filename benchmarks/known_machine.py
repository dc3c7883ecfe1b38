"""A GPU that the controller knows from its data sheet, against one that it knows nothing of.

    python -m benchmarks.known_machine [--steps N]     about 5 minutes

The what-if simulation decodes the same requests with a `goodput` that starts from the roofline of
Llama-3.1-8B and Llama-3.2-1B on an H100, with one that starts from nothing, and with every fixed setting.
The simulated GPU is none that a data sheet describes: tokens go by tiles of 64, a good, a middling and a
bad engine reach other shares of the ceilings than are assumed and have other overheads, drafting by a model
waits for the host once, as on an H200 (docs/log.md), and times carry 5 % of noise. Only the first steps with a full batch and no prompt beside it count: later ones have been
learnt by either. Nothing here is measured on a machine.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from benchmarks.measuring import write_results
from benchmarks.simulated_regret import FIXED, KINDS, workload_of
from sdcontrol.controller import Controller
from sdcontrol.core import FloatArray, Timing
from sdcontrol.estimators import hardware, shapes
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.estimators.roofline import Calibration, Forward, RooflineCost
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes, NoisyTimes, StepWork
from sdcontrol.traces.workload import Workload

MACHINE = KnownMachine(
    hardware.by_name("H100-SXM"),
    shapes.by_name("llama-3.1-8b"),
    {"draft_model": shapes.by_name("llama-3.2-1b")},
)
ENGINES = {
    "good": Calibration(0.9, 0.75, 4e-6, 2e-8, 3e-4),
    "middling": Calibration(0.75, 0.6, 8e-6, 1e-7, 6e-4),
    "bad": Calibration(0.5, 0.35, 3e-5, 4e-7, 1.5e-3),
}
BATCH_SIZES = (1, 8, 32, 64, 128)
CONTEXTS = (512, 4096)
STEPS = 120
_TILE = 64
_NOISE = 0.05
_MODEL_DRAFTS = 0.9e-3  # that the device waits once where a model drafts, on an H200
_MOST_KV_TOKENS = 300_000


@dataclass(frozen=True, slots=True)
class Cell:
    """What is decoded, and by which engine."""

    engine: str
    kind: str
    batch_size: int
    context_tokens: int


def cells() -> list[Cell]:
    """Those whose KV fits the GPU beside the weights."""
    kinds = (*KINDS, "mixed")
    drawn = [Cell(*choice) for choice in product(ENGINES, kinds, BATCH_SIZES, CONTEXTS)]
    return [cell for cell in drawn if cell.batch_size * cell.context_tokens <= _MOST_KV_TOKENS]


class _Tiled(RooflineCost):
    """The tokens of a verification go by whole tiles."""

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """See `Cost`."""
        tokens = np.asarray(num_tokens, dtype=float)
        tiles = np.where(tokens > _TILE, np.ceil(tokens / _TILE) * _TILE, tokens)
        return super().verify_seconds(tiles, kv_tokens, num_requests)


class _HostTimes(CostTimes):
    """Whoever drafts with a model waits for the host once."""

    def timing(self, work: StepWork) -> Timing:
        """See `StepTimes`."""
        timing = super().timing(work)
        return replace(timing, draft_seconds=waited(timing.draft_seconds))


def waited(draft_seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by family, with what the device waits for the host once where a model drafts."""
    return {
        family: seconds + (0.0 if family == "ngram" else _MODEL_DRAFTS)
        for family, seconds in draft_seconds.items()
    }


def measure(cell: Cell, num_steps: int = STEPS, seed: int = 0) -> dict[str, object]:
    """Tokens per second of the two controllers over the best fixed setting's, simulated."""
    rates = {
        name: rate_of(Controller(spec, clock=None), cell, num_steps, seed)  # type: ignore[arg-type]  # a name or a mapping
        for name, spec in FIXED.items()
    }
    best = max(rates, key=lambda name: rates[name])
    untold = rate_of(Controller("goodput", clock=None), cell, num_steps, seed)
    knowing = Controller("goodput", clock=None)
    knowing.price_by(MACHINE)
    told = rate_of(knowing, cell, num_steps, seed)
    return {
        "engine": cell.engine,
        "kind": cell.kind,
        "batch_size": cell.batch_size,
        "context_tokens": cell.context_tokens,
        "best_fixed": best,
        "best_fixed_over_off": rates[best] / rates["off"],
        "untold_over_best_fixed": untold / rates[best],
        "told_over_best_fixed": told / rates[best],
    }


def rate_of(controller: Controller, cell: Cell, num_steps: int = STEPS, seed: int = 0) -> float:
    """Tokens per second of the first steps, simulated."""
    times = NoisyTimes(_HostTimes(_truth(cell.engine)), relative_noise=_NOISE, seed=seed)
    settings = SimulationSettings(
        max_batch_size=cell.batch_size,
        max_prefill_tokens=1 << 20,
        kv_tokens=1 << 20,
        prefix_sharing=False,
    )
    simulation = Simulation(_requests(cell, seed), controller, times, settings)
    tokens, seconds, count = 0, 0.0, 0
    while simulation.has_work and count < num_steps:
        step = simulation.step()
        if len(step.view.requests) == cell.batch_size and not step.view.prefill_tokens:
            tokens += sum(step.emitted)
            seconds += step.timing.total_seconds
            count += 1
    return tokens / seconds


def _truth(engine: str) -> RooflineCost:
    fit, machine = ENGINES[engine], MACHINE.hardware
    drafting = {
        family: Forward(shape, machine, calibration=fit)
        for family, shape in MACHINE.draft_models.items()
    }
    return _Tiled(Forward(MACHINE.target, machine, calibration=fit), drafting)


def _requests(cell: Cell, seed: int) -> Workload:
    drawn = workload_of(cell.kind, cell.batch_size, seed)
    return Workload.of(
        cell.kind, (replace(request, prompt_tokens=cell.context_tokens) for request in drawn)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    results = []
    for cell in cells():
        results.append({**measure(cell, options.steps), "is_simulated": True})
        told, untold = (results[-1][f"{name}_over_best_fixed"] for name in ("told", "untold"))
        print(f"{cell}: {told:.3f} of the best fixed, not told {untold:.3f}", flush=True)
    for name in ("untold", "told"):
        ratios = sorted(float(str(found[f"{name}_over_best_fixed"])) for found in results)
        print(
            f"simulated, {name}: least {ratios[0]:.3f}, a tenth below {ratios[len(ratios) // 10]:.3f}, "
            f"mean {statistics.mean(ratios):.3f}"
        )
    command = f"python -m benchmarks.known_machine --steps {options.steps}"
    print(write_results("known_machine", command, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
