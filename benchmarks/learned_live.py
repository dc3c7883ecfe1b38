"""Does a run begin better with what was learnt from others? Live: `python -m benchmarks.learned_live`.

    python -m benchmarks.learned_live [--cells NAME,NAME] [--turns N] [--resume]     about 40 minutes

The learned policy is a head start: after 96 steps of about as many requests it is `goodput`, so that
what it brings, it brings at the beginning. In every cell and workload of `benchmarks.regret`, with the
model that is trained for it there, controllers that know nothing yet decode three blocks of requests
(a workload: all its phases once), one of `learned` and two of `goodput` in turns, the mean of which is
compared with; how far those two are apart stands beside. Every turn has requests of its own. Intervals:
95 % of the mean of the turns' logarithms, by Student's t; over all cases of the mean of theirs.
"""

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import transformers
from scipy import stats

from benchmarks.measuring import RESULTS, write_results
from benchmarks.regret.grid import CELLS, WORKLOADS, Case
from benchmarks.regret.rig import Arm, Rig
from benchmarks.regret.scoring import ADAPTIVE, LEARNED
from benchmarks.regret.training import trained_model
from sdcontrol.core import FloatArray
from sdcontrol.policies.learned import Learned
from sdcontrol.policies.learned_model import LearnedModel

__all__ = ["RATIOS", "measure", "over_all"]

_AGAIN = f"{ADAPTIVE} again"
_ARMS = (LEARNED, ADAPTIVE, _AGAIN)
_BLOCKS = 3  # of a controller, in a cell
_TURNS = 12
_NAME = "learned_live"
RATIOS = ("first_block", "whole", "goodput_again")


def measure(case: Case, *, turns: int = _TURNS, is_tiny: bool = False) -> dict[str, Any]:
    """One cell or workload. Raises `ValueError` for fewer than two turns."""
    if turns < 2:
        raise ValueError(f"{turns} turns; an interval needs at least 2")
    rig = Rig(case, is_tiny=is_tiny)
    try:
        model = trained_model(rig)
        _decode(rig, ADAPTIVE, 0)  # what is compiled for a shape
        rng = random.Random(0)
        seconds = np.array(
            [
                [turn[name] for name in _ARMS]
                for turn in (_turn(rig, model, number, rng) for number in range(turns))
            ]
        )
    finally:
        rig.close()
    return {
        "name": case.name,
        "acceptance": "synthetic" if rig.pair.is_synthetic else "real",
        "turns": turns,
        "steps": round(float(seconds[:, 1, :, 1].sum(axis=1).mean()), 1),
        "first_block": _ratio(seconds[:, :, :1]),
        "whole": _ratio(seconds),
        "goodput_again": _ratio(seconds[:, [2, 1]]),
    }


def _turn(rig: Rig, model: LearnedModel, number: int, rng: random.Random) -> dict[str, FloatArray]:
    """By arm what `_decode` says, of one turn's requests."""
    first = 1 + number * _blocks_of(rig.case)
    specs = {ADAPTIVE: ADAPTIVE, LEARNED: Learned(model), _AGAIN: ADAPTIVE}
    return {name: _decode(rig, specs[name], first) for name in rng.sample(_ARMS, len(_ARMS))}


def _decode(rig: Rig, spec: str | Learned, first: int) -> FloatArray:
    """Seconds per token and steps of a new controller's blocks, `[blocks, 2]`."""
    arm = Arm("new", spec)
    found = []
    for block in range(first, first + _blocks_of(rig.case)):
        runs = [rig.run(arm, phase, block) for phase in rig.case.phases_of(block)]
        tokens = sum(run.tokens for run in runs)
        found.append([sum(run.seconds for run in runs) / tokens, sum(r.stats.steps for r in runs)])
    return np.array(found)


def _blocks_of(case: Case) -> int:
    return 1 if case.is_workload else _BLOCKS


def _ratio(seconds: FloatArray) -> dict[str, float]:
    """How much faster the first arm was than the others, `[turns, arms, blocks, 2]`."""
    each = np.log(seconds[:, :, :, 0].mean(axis=2))
    return _mean_of(each[:, 1:].mean(axis=1) - each[:, 0])


def _mean_of(logs: FloatArray) -> dict[str, float]:
    spread = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
    low, mean, high = np.exp([logs.mean() - spread, logs.mean(), logs.mean() + spread]).tolist()
    return {"mean": round(mean, 4), "low": round(low, 4), "high": round(high, 4)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = {case.name: case for case in (*CELLS, *WORKLOADS)}
    parser.add_argument("--cells", default=",".join(cases), help="names, as in benchmarks.regret")
    parser.add_argument("--turns", type=int, default=_TURNS, help="per cell, at least 2")
    parser.add_argument("--resume", action="store_true", help="measure what has no result yet")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.cells.split(",")) - set(cases)):
        parser.error(f"no cell is called {unknown}; there are {list(cases)}")
    transformers.utils.logging.disable_progress_bar()
    found = _earlier() if options.resume else {}
    for name in options.cells.split(","):
        if name not in found:
            found[name] = measure(cases[name], turns=options.turns)
            print(_line(found[name]), flush=True)
            results = [found[name] for name in cases if name in found]
            write_results(_NAME, "python -m benchmarks.learned_live", results)
    if len(found) > 1:
        print(_line(over_all([*found.values()])))
    return 0


def _earlier() -> dict[str, dict[str, Any]]:
    path = RESULTS / f"{_NAME}.json"
    if not path.exists():
        return {}
    return {found["name"]: found for found in json.loads(path.read_text("utf-8"))["results"]}


def over_all(results: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The mean over cases, each of which counts once."""
    means = {key: np.log([found[key]["mean"] for found in results]) for key in RATIOS}
    steps = float(np.mean([found["steps"] for found in results]))
    ratios = {key: _mean_of(logs) for key, logs in means.items()}
    return {"name": f"all {len(results)}", "steps": round(steps, 1), **ratios}


def _line(found: Mapping[str, Any]) -> str:
    words = []
    for key in RATIOS:
        ratio = found[key]
        words.append(f"{key} {ratio['mean']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")
    return f"{found['name']:28} {', '.join(words)}; {found['steps']} steps"


if __name__ == "__main__":
    sys.exit(main())
