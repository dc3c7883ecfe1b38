"""Does the learned policy foresee more than what is learnt online, and decode at least as fast?

    python -m benchmarks.learned [--json] [--seeds N]     about 10 minutes

Prediction, recorded live: the bundled pair decodes in 8 settings. Models are trained on traces of these runs
with acceptance tables, or on the bundled trace `mixed`, as `sdcontrol train` does, and scored on runs of other prompts. Log losses depend on no clock;
errors of step times do, and a busy machine makes them larger for both sides. Both forecasts are made
before a step, of the same steps by the same rule; nothing is trimmed. The median error says how close
the usual step is; the mean absolute log error counts the far ones too, from which wrong plans
come. The corrected roofline starts without a model of the machine, as a `Controller` does, and from
the roofline of the two models on this machine.

Goodput, simulated: what-if runs of `learned` over those of `goodput`, on the same requests, with 5 % of
noise; what is learnt online is learnt from nothing. Made-up machines, batch sizes and texts are those of
`benchmarks.simulated_regret` (trained on one mixed run per batch size, of other seeds); recorded texts
are those of the bundled trace, at step times fitted to it (trained on the live runs). Intervals: 95 % of
the mean over seeds, by Student's t.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from scipy import stats

from benchmarks.learned_runs import SETTINGS, Decode, Recordings, decode, made_up
from benchmarks.measuring import write_results
from benchmarks.simulated_regret import BATCH_SIZES, KINDS, MACHINES
from sdcontrol.core import Cost, FloatArray
from sdcontrol.policies import Policy
from sdcontrol.policies.learned import Learned
from sdcontrol.policies.learned_model import LearnedModel, fit
from sdcontrol.policies.learned_scores import losses, step_errors, summary
from sdcontrol.traces.bundled import bundled_trace
from sdcontrol.traces.drawn import drawn_runs
from sdcontrol.traces.fitted_times import FittedTimes
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.what_if import settings_of, workload_of

_TRAINED_SEED, _JUDGED_SEED = 1, 2
_BUNDLED = ("mixed", "static", "roofline", "smartspec", "heuristic", "off")
_RECORDED_BATCHES = (1, 2, 4, 8)


def predictions(recordings: Recordings) -> tuple[list[dict[str, object]], LearnedModel]:
    """Every trained model on every group of judged runs; and the model of the live runs."""
    live = [recordings.record(setting, _TRAINED_SEED, has_table=True) for setting in SETTINGS]
    judged = [recordings.record(setting, _JUDGED_SEED) for setting in SETTINGS]
    bundled = [Trace(bundled_trace(name)) for name in _BUNDLED]
    roofline = recordings.roofline()
    of_live, of_mixed = _trained(live), _trained(bundled[:1])
    results = [
        *_scored("live runs", of_live, "other live runs", judged, roofline),
        *_scored("live runs", of_live, "bundled traces", bundled, roofline),
        *_scored("bundled:mixed", of_mixed, "live runs", [*live, *judged], roofline),
    ]
    return results, of_live


def _trained(traces: Sequence[Trace]) -> LearnedModel:
    """As `sdcontrol train` does."""
    drawn = [drawn_runs(trace) for trace in traces]
    return fit([list(trace.observations()) for trace in traces], drawn=drawn)


def _scored(
    trained_on: str, model: LearnedModel, judged_on: str, traces: Sequence[Trace], roofline: Cost
) -> Iterator[dict[str, object]]:
    """One line per prior of the online cost."""
    runs = [list(trace.observations()) for trace in traces]
    loss = np.concatenate([losses(model, run) for run in runs])
    for prior in (None, roofline):
        errors = [step_errors(model, run, prior) for run in runs]
        found = summary(loss, np.concatenate(errors))
        yield {
            "what": "prediction",
            "trained_on": trained_on,
            "judged_on": judged_on,
            "online_cost_starts_from": "nothing" if prior is None else "the roofline",
            "outcomes": found.outcomes,
            "log_loss": _pair(found.learned_log_loss, found.online_log_loss),
            "steps": found.steps,
            "median_step_error": _pair(found.learned_step_error, found.online_step_error),
            "mean_log_step_error": _pair(found.learned_step_log_error, found.online_step_log_error),
            "runs_with_smaller_mean_log_error": f"{_wins(errors)} of {len(errors)}",
        }


def _wins(errors: Iterable[FloatArray]) -> int:
    means = [np.nanmean(np.abs(run), axis=0) for run in errors]
    return sum(bool(learned <= online) for learned, online in means)


def _pair(learned: float, online: float) -> dict[str, float]:
    return {"learned": round(learned, 4), "online": round(online, 4)}


def simulated(seeds: int) -> Iterator[dict[str, object]]:
    """Every cell of the made-up machines."""
    for machine in MACHINES:
        runs = [made_up(machine, b, "mixed", "goodput", 1000 + b) for b in BATCH_SIZES]
        model = fit([run.observations for run in runs])
        for batch in BATCH_SIZES:
            for kind in (*KINDS, "mixed"):

                def run(policy: Policy | str, seed: int, b: int = batch, k: str = kind) -> Decode:
                    return made_up(machine, b, k, policy, seed)  # noqa: B023  (called at once)

                yield {
                    "machine": machine,
                    "batch": batch,
                    "text": kind,
                    **_ratio(run, model, seeds),
                }


def recorded(model: LearnedModel, seeds: int) -> Iterator[dict[str, object]]:
    """The texts of the bundled trace, all at once, at batch sizes that were not recorded."""
    trace = Trace(bundled_trace("mixed"))
    times, workload = FittedTimes.of(trace), workload_of(trace).at_once()
    for batch in _RECORDED_BATCHES:
        settings = settings_of(trace).model_copy(update={"max_batch_size": batch})

        def run(policy: Policy | str, seed: int) -> Decode:
            return decode(workload, policy, times, settings, seed=seed)  # noqa: B023  (called at once)

        yield {"machine": "recorded", "batch": batch, "text": "mixed", **_ratio(run, model, seeds)}


def _ratio(
    run: Callable[[Policy | str, int], Decode], model: LearnedModel, seeds: int
) -> dict[str, object]:
    """Tokens per second of `learned` over `goodput`."""
    ratios = np.log(
        [
            run(Learned(model), seed).tokens_per_second / run("goodput", seed).tokens_per_second
            for seed in range(seeds)
        ]
    )
    mean = float(ratios.mean())
    spread = float(stats.t.ppf(0.975, seeds - 1) * stats.sem(ratios)) if seeds > 1 else 0.0
    low, middle, high = np.exp([mean - spread, mean, mean + spread]).round(4).tolist()
    return {
        "what": "goodput",
        "is_simulated": True,
        "learned_over_goodput": middle,
        "interval": [low, high],
        "seeds": seeds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4, help="of every simulated cell")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/learned.json")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        results, model = predictions(Recordings(Path(folder)))
    for found in results:
        print(found, flush=True)
    cells = []
    for found in chain(recorded(model, options.seeds), simulated(options.seeds)):
        cells.append(found)
        print(_line(found), flush=True)
    print(_verdict(cells))
    if options.json:
        print(write_results("learned", "python -m benchmarks.learned --json", [*results, *cells]))
    return 0


def _line(found: Mapping[str, object]) -> str:
    return (
        f"simulated {found['machine']:8} batch {found['batch']:2} {found['text']:6} "
        f"learned over goodput {found['learned_over_goodput']:.3f} {found['interval']}"
    )


def _verdict(cells: Sequence[Mapping[str, object]]) -> str:
    ratios = np.array([found["learned_over_goodput"] for found in cells], float)
    highs = np.array([found["interval"] for found in cells], float)[:, 1]
    return (
        f"simulated: least {ratios.min():.3f}, median {np.median(ratios):.3f} of {len(cells)} cells; "
        f"surely below 1 in {int((highs < 1.0).sum())}"
    )


if __name__ == "__main__":
    sys.exit(main())
