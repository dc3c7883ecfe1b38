"""Does `sdcontrol ab` claim what is there, and nothing else?

    python -m benchmarks.ab [--runs 20] [--simulated 2000] [--seconds 240]

Equal arms, live and drawn from the noise that the live runs recorded; planted slowdowns of 3 % and
0.5 %; runs killed at random moments and resumed. Takes about 6 minutes on two cores.
"""

import argparse
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.measuring import write_results
from sdcontrol.core import BatchView, Confidence, Observation, Plan, Planner
from sdcontrol.engine.bundled import load_bundled, load_bundled_tokenizer
from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.judge import compare, counted, decide, log_ratios
from sdcontrol.experiments.live import LiveRunner, Models
from sdcontrol.experiments.loading import load_experiments
from sdcontrol.experiments.records import BlockRecord, RunRecord
from sdcontrol.experiments.results import Results
from sdcontrol.experiments.run import run_experiment
from sdcontrol.experiments.schedule import turns
from sdcontrol.experiments.statistics import blocks_needed, noise_of, smallest_effect
from sdcontrol.experiments.store import RunFolder

_FILE = Path(__file__).parent.parent / "experiments" / "a_a.yaml"
_SHORT = ("blocks=8", "stopping.looks=2", "repeat_every=0", "workload.num_tokens=16")
_KILLED = ("blocks=6", "stopping.looks=1", "workload.num_tokens=16")
_METRIC = "tokens_per_second"
_NONE = "no difference shown"
_MOST_BLOCKS = 60
_MOST_SIMULATED_BLOCKS = 500


class Slowed:
    """A planner that wastes a share of every step's time, and is otherwise the one it wraps."""

    def __init__(self, planner: Planner, share: float) -> None:
        self._planner = planner
        self._share = share
        self.drafts = getattr(planner, "drafts", True)
        self.learns = getattr(planner, "learns", True)
        self.refines_hinted = getattr(planner, "refines_hinted", True)
        self.refines_between_rounds = getattr(planner, "refines_between_rounds", True)

    def plan(self, view: BatchView) -> Plan:
        """Its plan."""
        return self._planner.plan(view)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """Its shorter plan."""
        return self._planner.refine(view, plan, confidence)

    def observe(self, observation: Observation) -> None:
        """Tell it, and take longer than the step took."""
        self._planner.observe(observation)
        until = time.perf_counter() + self._share * observation.timing.total_seconds
        while time.perf_counter() < until:
            pass


def main() -> int:
    """Run all parts and write `benchmarks/results/ab.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=20, help="live A/A runs")
    parser.add_argument("--simulated", type=int, default=2000, help="simulated A/A runs")
    parser.add_argument("--seconds", type=float, default=240.0, help="most for planted slowdowns")
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    models = _models()
    with tempfile.TemporaryDirectory() as folder:
        live, ratios, seconds = _live_runs(options.runs, models, Path(folder))
        simulated = _simulated_runs(options.simulated, ratios)
        planted = [
            _planted(effect, ratios, models, Path(folder), int(options.seconds / 2 / seconds))
            for effect in (-0.03, -0.005)
        ]
        killed = _killed(options.kills, Path(folder))
    results = [live, simulated, *planted, killed]
    for result in results:
        print(json.dumps(result))
    path = write_results("ab", "python -m benchmarks.ab", results)
    print(f"written: {path}")
    return 0


def _models() -> Models:
    tokenizer = load_bundled_tokenizer()
    target = load_bundled("target", dtype=torch.float32)

    def encode(text: str) -> Sequence[int]:
        return [int(token) for token in tokenizer(text)["input_ids"]]

    return Models(target, None, encode)


def _experiment(*overrides: str) -> Experiment:
    return load_experiments(_FILE, overrides)[0]


def _run(
    plan: Experiment,
    models: Models,
    folder: Path,
    wrap: Callable[[str, Planner], Planner] | None = None,
) -> tuple[Results, list[BlockRecord]]:
    where = RunFolder(folder, plan)
    results = run_experiment(plan, LiveRunner(plan, models, wrap=wrap), where)
    return results, where.blocks()


def _live_runs(
    number: int, models: Models, folder: Path
) -> tuple[dict[str, object], list[float], float]:
    """The same policy twice: how often a difference is claimed; log ratios; seconds of a block."""
    claims, ratios = 0, []
    started, num_blocks = time.perf_counter(), 0
    for seed in range(number):
        plan = _experiment(*_SHORT, f"seed={seed}", f"name=live-{seed}")
        results, blocks = _run(plan, models, folder / plan.name)
        claims += any(found.verdict != _NONE for found in results.comparisons)
        ratios += log_ratios(counted(blocks), "second", "first", _METRIC).values()
        num_blocks += len(blocks)
    each = (time.perf_counter() - started) / max(num_blocks, 1)
    facts = {
        "part": "A/A, live",
        "runs": number,
        "claims": claims,
        "stated_rate": 0.05,
        "blocks": len(ratios),
        "noise_of_a_block": noise_of(ratios),
        "standard_deviation": float(np.std(ratios)),
        "mean_log_ratio": float(np.mean(ratios)),
        "texts_differing": results.texts.num_differing,
    }
    return facts, ratios, each


def _block(number: int, log_ratio: float) -> BlockRecord:
    """A block in which `second` is that much faster than `first`."""
    rates = {"first": 1.0, "second": math.exp(log_ratio)}
    runs = tuple(
        RunRecord(arm=arm, start_seconds=0, seconds=1, tokens=1, metrics={_METRIC: rate})
        for arm, rate in rates.items()
    )
    return BlockRecord(block=number, is_warmup=False, runs=runs)


def _is_claimed(plan: Experiment, log_ratios: Sequence[float]) -> bool:
    """Judged as a run is: it ends at the first look that lets it."""
    blocks: list[BlockRecord] = []
    for number, ratio in enumerate(log_ratios):
        blocks.append(_block(number, ratio))
        if decide(plan, blocks).is_done:
            break
    return compare(plan, blocks)[0].verdict != _NONE


def _simulated_runs(number: int, ratios: Sequence[float]) -> dict[str, object]:
    """Recorded blocks, drawn again, arms swapped by lot: the arms are equal and so is the noise."""
    plan, rng = _experiment(*_SHORT), np.random.default_rng(0)
    claims = 0
    for _ in range(number):
        drawn = rng.choice(ratios, plan.blocks) * rng.choice((-1, 1), plan.blocks)
        claims += _is_claimed(plan, drawn.tolist())
    return {
        "part": "A/A, simulated from the live noise",
        "runs": number,
        "claims": claims,
        "rate": claims / number,
        "stated_rate": 0.05,
        "standard_error": math.sqrt(0.05 * 0.95 / number),
    }


def _planted(
    effect: float, ratios: Sequence[float], models: Models, folder: Path, most_blocks: int
) -> dict[str, object]:
    """A slowdown in one arm: as many blocks as are needed, where there is time for them."""
    noise = noise_of(ratios)
    needed = blocks_needed(effect, noise)
    number = min(needed, _MOST_BLOCKS, max(most_blocks - 3, 6))
    plan = _experiment(f"blocks={number}", "stopping.looks=1", "repeat_every=0", "seed=99")
    share = 1 / (1 + effect) - 1

    def wrap(arm: str, planner: Planner) -> Planner:
        return Slowed(planner, share if arm == "second" else 0.0)  # the wrapper costs both the same

    results, _ = _run(plan, models, folder / f"planted{effect}", wrap)
    found = results.comparisons[0]
    return {
        "part": f"planted {effect:.1%}, live",
        "noise_of_a_block": noise,
        "blocks_needed": needed,
        "blocks_run": found.num_blocks,
        "smallest_slowdown_that_these_show": smallest_effect(found.num_blocks, noise),
        "ratio": [found.ratio.value, found.ratio.low, found.ratio.high],
        "p": found.p_adjusted,
        "verdict": found.verdict,
        "power_at_needed_simulated": _power(effect, ratios, needed),
        "power_at_run_simulated": _power(effect, ratios, found.num_blocks),
    }


def _power(effect: float, ratios: Sequence[float], blocks: int, *, runs: int = 200) -> float | None:
    """How often so many blocks of the recorded noise show this slowdown, of 200 simulated runs.

    None where the noise asks for so many that nobody would run them.
    """
    if blocks > _MOST_SIMULATED_BLOCKS:
        return None
    plan = _experiment(f"blocks={blocks}", "stopping.looks=1")
    rng, found = np.random.default_rng(1), 0
    for _ in range(runs):
        drawn = rng.choice(ratios, plan.blocks) * rng.choice((-1, 1), plan.blocks)
        judged = [_block(n, math.log1p(effect) + float(r)) for n, r in enumerate(drawn)]
        found += compare(plan, judged)[0].verdict == "slower"
    return found / runs


def _killed(kills: int, folder: Path) -> dict[str, object]:
    """The command, killed at random moments and resumed, beside the same one left alone."""
    rng = random.Random(0)
    whole, cut = folder / "whole", folder / "cut"
    started = time.perf_counter()
    _command(whole)
    lasted = time.perf_counter() - started
    lost, resumed = 0, 0
    for attempt in range(kills):
        before = _finished(cut)
        _command(cut, resume=attempt > 0, kill_after=rng.uniform(0.4, 0.9) * lasted)
        lost += any(_finished(cut).get(name) != text for name, text in before.items())
        resumed += bool(before)
    before = _finished(cut)
    _command(cut, resume=True)
    lost += any(_finished(cut).get(name) != text for name, text in before.items())
    plan = _experiment(*_KILLED)
    both = [Results.load(place / plan.name / "results.json") for place in (whole, cut)]
    orders = [_orders(place, plan) for place in (whole, cut)]
    common = min(map(len, orders))
    return {
        "part": "killed and resumed, live",
        "kills": kills,
        "resumed_with_finished_blocks": resumed,
        "finished_blocks_lost_or_changed": lost,
        "same_order_and_seeds": orders[0][:common] == orders[1][:common],
        "planned_order": all(is_planned for place in orders for is_planned, _ in place),
        "verdicts": [[found.verdict for found in results.comparisons] for results in both],
        "complete": [results.is_complete for results in both],
    }


def _command(output: Path, *, resume: bool = False, kill_after: float | None = None) -> None:
    sets = [word for override in _KILLED for word in ("--set", override)]
    more = ["--resume"] if resume and _finished(output) else ["--overwrite"]
    command = [sys.executable, "-m", "sdcontrol", "ab", str(_FILE), "--output", str(output)]
    process = subprocess.Popen([*command, *sets, *more], stdout=subprocess.DEVNULL)
    try:
        process.wait(kill_after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _finished(output: Path) -> Mapping[str, str]:
    paths = output.glob("*/blocks/0*.json")
    return {path.name: path.read_text("utf-8") for path in sorted(paths)}


def _orders(output: Path, plan: Experiment) -> list[tuple[bool, list[str]]]:
    """Per block: whether it ran as planned, and its arms in order."""
    blocks = [BlockRecord.model_validate_json(text) for text in _finished(output).values()]
    return [
        (
            [(run.arm, run.is_repeat) for run in block.runs] == turns(plan, blocks[:number]),
            [run.arm for run in block.runs if not run.is_repeat],
        )
        for number, block in enumerate(blocks)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
