"""Part 6 of the GPU benchmark, simulated: goodput against every fixed setting on a GPU that hides its host.

    python -m benchmarks.simulated_promise [--mixes mixed,0.7]     about 6 minutes

The loads, settings, rates of acceptance and scores are those of `benchmarks.gpu --part 6`; what-if simulation
stands for the engine. Times are the roofline of Llama-3.1-8B and Llama-3.2-1B on an H200, padded to graphs'
sizes, with 2 % of noise; how far from it steps are, and what the host takes beside them, was fitted to what was
measured there (docs/log.md, 2026-11-27), unless nobody drafts and the step was launched ahead of its tokens.
Small batches say little, so they are decoded several times, by controllers of their own. A few loads are decoded on
machines whose steps are shorter, too, with a host that takes as long: there what is hidden weighs most.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from benchmarks.gpu.acceptance import KINDS, MIXES, seeds_of
from benchmarks.gpu.promise import RIVAL, fixed_specs
from benchmarks.gpu.scale import FULL
from benchmarks.known_machine import waited
from benchmarks.measuring import write_results
from benchmarks.regret.scoring import ADAPTIVE, OFF, score_cell
from benchmarks.simulated_regret import runs_of
from sdcontrol.controller import Controller
from sdcontrol.core import FloatArray, Timing
from sdcontrol.engine.buckets import size_edges
from sdcontrol.estimators import hardware, shapes
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.estimators.roofline import Calibration, Forward, RooflineCost
from sdcontrol.outcomes import DEPTH, ArmOutcomes
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes, NoisyTimes, StepWork
from sdcontrol.traces.workload import SimulatedRequest, Workload

MACHINE = KnownMachine(hardware.by_name("H200"), FULL.target, {"draft_model": FULL.draft})
_MACHINE = "H200, llama-3.1-8b"
_FASTER = (("B200", "llama-3.1-8b"), ("H100", "llama-3.2-3b"), ("H200", "llama-3.2-3b"))
_FASTER_LOADS = ((1, 512), (4, 2048), (16, 512), (16, 4096))
_FASTER_MIXES = ("mixed", "0.7")
_REACHED = Calibration(0.766, 0.592, 26e-6, 0.0, request_overhead_seconds=1.7e-7)
_DRAFT_REACHED = replace(_REACHED, layer_overhead_seconds=42e-6)
_NOISE = 0.02
_LEARNING_TURNS = 3
_MATCH_TOKENS = 4
_LEAST_REQUESTS = 16  # of all controllers together
_HOST = {True: (1.0e-3, 30e-6), False: (0.7e-3, 15e-6)}  # by "drafts": a step, and each request
_CONTROLLER = (0.1e-3, 3e-6)  # of a plan: it learns while the device computes


class _Padded(RooflineCost):
    """Forwards of the target go by graphs' sizes."""

    def __init__(self, edges: Sequence[int], *forwards: object) -> None:
        super().__init__(*forwards)  # type: ignore[arg-type]  # as it takes them
        self._edges = np.array(edges)

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """See `Cost`."""
        tokens = np.asarray(num_tokens)
        found = np.minimum(np.searchsorted(self._edges, tokens), len(self._edges) - 1)
        padded = np.maximum(self._edges[found], tokens)
        return super().verify_seconds(padded.astype(float), kv_tokens, num_requests)


class _GpuTimes:
    """`StepTimes` of a device that waits for the host where there are drafts, or were."""

    def __init__(self, controller: Controller, batch: int, machine: KnownMachine) -> None:
        self.machine = machine
        self.token_edges = size_edges(batch * (DEPTH + 1))
        self._controller = controller
        self._times = CostTimes(_truth(self.token_edges, machine))
        self._was_plain = self.launched_ahead = False

    def timing(self, work: StepWork) -> Timing:
        """Of one step; what was launched ahead takes its forward alone."""
        timing, drafts = self._times.timing(work), bool(work.drafts)
        seconds = waited(timing.draft_seconds)
        self.launched_ahead = self._was_plain and not drafts and self._controller.plans_ahead
        self._was_plain = not drafts
        if self.launched_ahead:
            return timing
        count = work.num_requests
        once, each = _CONTROLLER if self._controller.learns else (0.0, 0.0)
        controller, (once, each) = once + each * count, _HOST[drafts]
        return Timing(seconds, timing.verify_seconds, controller, once + each * count)


def _truth(edges: Sequence[int], machine: KnownMachine) -> RooflineCost:
    assert machine.hardware is not None
    target = Forward(machine.target, machine.hardware, calibration=_REACHED)
    drafting = {
        family: Forward(shape, machine.hardware, calibration=_DRAFT_REACHED)
        for family, shape in machine.draft_models.items()
    }
    return _Padded(edges, target, drafting)


def faster_machine(gpu: str, model: str) -> KnownMachine:
    """With the same draft model."""
    return KnownMachine(hardware.by_name(gpu), shapes.by_name(model), MACHINE.draft_models)


def measure(
    batch: int, context: int, mix: str, machine: KnownMachine = MACHINE
) -> dict[str, object]:
    """Scores of one load, as part 6 has them; simulated."""
    fixed = fixed_specs(FULL.sparse_arm, context)
    rival = {"kind": RIVAL, "drafter": "draft_model"}
    specs: dict[str, object] = {**fixed, ADAPTIVE: ADAPTIVE, RIVAL: rival}
    rates = {
        name: [
            rate
            for seed in range(max(_LEAST_REQUESTS // batch, 1))
            for rate in _Arm(spec, machine, batch, context, mix=mix, seed=seed).rates()
        ]
        for name, spec in specs.items()
    }
    score = score_cell({name: rate for name, rate in rates.items() if name != RIVAL})
    whole = {name: statistics.harmonic_mean(each) for name, each in rates.items()}
    best = max(fixed, key=lambda name: whole[name])
    return {
        "batch_size": batch,
        "context_tokens": context,
        "acceptance": mix,
        "best_fixed": score.best,
        "of_best_fixed": score.to_best.median,
        "of_none": score.to_off.median,
        "whole_best_fixed": best,
        "whole_of_best_fixed": whole[ADAPTIVE] / whole[best],
        "whole_of_none": whole[ADAPTIVE] / whole[OFF],
        "whole_of_rival": whole[ADAPTIVE] / whole[RIVAL],
        "best_fixed_over_none": whole[best] / whole[OFF],
    }


class _Arm:
    """One controller, which keeps what it learnt from turn to turn."""

    def __init__(
        self,
        spec: object,
        machine: KnownMachine,
        batch: int,
        context: int,
        *,
        mix: str,
        seed: int,
    ) -> None:
        self.controller = Controller(spec, clock=None)  # type: ignore[arg-type]  # a name or a mapping
        self.controller.goes_ahead()
        self._load = batch, context, mix, seed
        times = _GpuTimes(self.controller, batch, machine)
        self._times = NoisyTimes(times, relative_noise=_NOISE, seed=seed)

    def rates(self) -> list[float]:
        """Tokens per second of each block that counts."""
        if self.controller.learns:
            for turn in range(_LEARNING_TURNS):
                self._turn(-turn, f"before-{turn}")
        return [self._turn(block, str(block)) for block in range(1, FULL.blocks + 1)]

    def _turn(self, block: int, name: str) -> float:
        batch, context, mix, seed = self._load
        requests = _requests(batch, context, mix, block + 100 * seed)
        named = [replace(request, id=f"{name}-{request.id}") for request in requests]
        named.append(replace(requests[0], id=f"{name}-next"))  # who waits for a place
        settings = SimulationSettings(
            max_batch_size=batch,
            max_prefill_tokens=1 << 20,
            kv_tokens=1 << 21,
            prefix_sharing=False,
        )
        workload = Workload.of(mix, named)
        simulation = _Prepared(workload, self.controller, self._times, settings)
        tokens, seconds, count = 0, 0.0, 0
        while count < FULL.steps:
            step = simulation.step()
            if step.view.prefill_tokens:
                simulation.prepare()
            if len(step.view.requests) == batch and not step.view.prefill_tokens:
                tokens += sum(step.emitted)
                seconds += step.timing.total_seconds
                count += 1
        return tokens / seconds


class _Prepared(Simulation):
    """Contexts are in the draft model's cache, too, as the GPU benchmark has them."""

    def prepare(self) -> None:
        """Prompts have been computed."""
        for live in self._live.values():
            for block in live.scheduled.table.blocks:
                self._pool.mark(block, "draft_model")


@cache
def _requests(batch: int, context: int, mix: str, block: int) -> tuple[SimulatedRequest, ...]:
    """Long enough for a turn in which all is accepted."""
    length = (FULL.steps + 8) * (DEPTH + 1)
    kinds = tuple(KINDS.values())
    generator = np.random.default_rng([batch, context, block + _LEARNING_TURNS])
    return tuple(
        SimulatedRequest(
            str(row),
            0.0,
            context,
            length,
            _outcomes(generator.random(length + DEPTH), kinds[seed % len(kinds)], context),
        )
        for row, seed in enumerate(seeds_of(MIXES[mix], batch, block))
    )


def _outcomes(luck: FloatArray, rates: Mapping[str, float], context: int) -> dict[str, ArmOutcomes]:
    """All drafters share a request's luck, as in the GPU benchmark."""
    length = len(luck) - DEPTH
    found = {family: runs_of(luck < rate, length) for family, rate in rates.items()}
    matches = np.full(length, _MATCH_TOKENS, dtype=np.uint8)
    most = np.full(length, DEPTH, dtype=np.uint8)
    outcomes = {
        "draft_model": ArmOutcomes(found["draft_model"]),
        "ngram": ArmOutcomes(found["ngram"], matches, max_draft_tokens=most),
    }
    if context > FULL.sparse_budgets[0]:
        outcomes[FULL.sparse_arm] = ArmOutcomes(found["sparse_kv"])
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mixes", default=",".join(FULL.mixes))
    options = parser.parse_args(arguments)
    results: list[dict[str, object]] = []
    for mix in options.mixes.split(","):
        for batch, context in FULL.promise:
            results.append(_measured(_MACHINE, MACHINE, batch, context, mix))
    for gpu, model in _FASTER:
        machine = faster_machine(gpu, model)
        for mix, (batch, context) in product(_FASTER_MIXES, _FASTER_LOADS):
            results.append(_measured(f"{gpu}, {model}", machine, batch, context, mix))
    for name in ("of_best_fixed", "of_none", "whole_of_best_fixed", "whole_of_none"):
        ratios = sorted(float(str(found[name])) for found in results)
        print(f"simulated, {name}: least {ratios[0]:.3f}, median {statistics.median(ratios):.3f}")
    print(write_results("simulated_promise", "python -m benchmarks.simulated_promise", results))
    return 0


def _measured(
    name: str, machine: KnownMachine, batch: int, context: int, mix: str
) -> dict[str, object]:
    found = measure(batch, context, mix, machine)
    print(_line({"machine": name, **found}), flush=True)
    return {"machine": name, **found, "is_simulated": True}


def _line(found: Mapping[str, object]) -> str:
    figures = ", ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in found.items()
    )
    return f"simulated: {figures}"


if __name__ == "__main__":
    sys.exit(main())
