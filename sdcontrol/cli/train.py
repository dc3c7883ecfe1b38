"""`sdcontrol train`: a learned policy from traces, with a report of what it learnt.

Knows the options and how the report reads; learning and judging stand in `experiments.training`.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sdcontrol import __version__
from sdcontrol.cli.command import Commands, add_command
from sdcontrol.cli.files import check_writable, find_trace, write_json
from sdcontrol.errors import ConfigError
from sdcontrol.extras import check_installed

if TYPE_CHECKING:
    from sdcontrol.experiments.training import TrainingReport
    from sdcontrol.traces.reader import Trace

__all__ = ["add_train"]

_DESCRIPTION = "Learn a policy from traces, and say what it learnt."
_MOST_WEIGHTS = 4  # shown of each arm


def add_train(commands: Commands) -> None:
    """Make the command known."""
    parser = add_command(commands, "train", run, _DESCRIPTION)
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", help="a trace's folder, or bundled:NAME; one or more"
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="POLICY.skops",
        help="--policy learned:POLICY.skops",
    )


def run(options: argparse.Namespace) -> int:
    """Learn from all traces together, report, save."""
    check_writable(options.json, options.output, inputs=options.traces)
    if Path(options.output).suffix != ".skops":
        raise ConfigError(f"--output {options.output}: a learned policy is a .skops file")
    for package in ("sklearn", "skops"):
        check_installed(package)
    traces = _traces(options)
    from sdcontrol.experiments.training import learn
    from sdcontrol.outcomes import DEPTH
    from sdcontrol.policies.learned_model import save
    from sdcontrol.traces.drawn import drawn_runs

    facts = [trace.header.controller for trace in traces]
    most = max((known.max_draft_tokens for known in facts if known is not None), default=DEPTH)
    drawn = [drawn_runs(trace) for trace in traces]
    model, report = learn([list(trace.observations()) for trace in traces], most, drawn)
    save(model, Path(options.output))
    print(*_lines(report), sep="\n")
    print(f"saved: use it as --policy learned:{options.output}")
    if options.json is not None:
        record = {"version": __version__, "traces": options.traces, "policy": options.output}
        write_json(options.json, {**record, **report.to_json()})
    return 0


def _traces(options: argparse.Namespace) -> "list[Trace]":
    paths = [find_trace(given) for given in options.traces]
    from sdcontrol.traces.reader import Trace

    traces = [Trace(path) for path in paths]
    ids = [trace.header.trace_id for trace in traces]
    for name, given in zip(ids, options.traces, strict=True):
        if ids.count(name) > 1:
            raise ConfigError(f"{given} stands there twice, perhaps as a copy; give it once")
    return traces


def _lines(report: "TrainingReport") -> Iterator[str]:
    yield (
        f"learnt from {report.num_runs} traces: {report.num_steps} steps of {report.num_requests} "
        "requests"
    )
    if report.num_drawn_steps:
        yield (
            f"acceptance also from {report.num_drawn_steps} steps with drafters and lengths drawn at "
            "random, by the acceptance tables"
        )
    yield from _acceptance(report)
    yield from _step_time(report)
    yield f"where it must not be used, and goodput's own estimates stand: {_outside(report)}"
    yield (
        "nor with other models or settings of the engine: it would notice by step times alone, so "
        "train anew"
    )


def _acceptance(report: "TrainingReport") -> Iterator[str]:
    scores = report.scores
    yield (
        f"acceptance, {report.num_folds} folds by request, {scores.outcomes} verified draft tokens: "
        f"log loss {scores.learned_log_loss:.4f}, of the online estimator alone "
        f"{scores.online_log_loss:.4f}"
    )
    for arm, weights in report.weights.items():
        yield f"  {arm} is accepted {_strongest(weights)}"
    online = [arm for arm in report.arms if arm not in report.weights]
    if online:
        yield f"  {', '.join(online)}: nothing beyond the online estimate, which stands"
    if not report.is_better:
        yield "beware: it foresees acceptance no better than the online estimator; prefer goodput"


def _step_time(report: "TrainingReport") -> Iterator[str]:
    scores, prices = report.scores, report.prices
    yield (
        f"step time, {report.num_folds} folds by stretches, {scores.steps} held-out steps: median "
        f"error {scores.learned_step_error:.1%}, of the cost corrected online "
        f"{scores.online_step_error:.1%}; mean log error {scores.learned_step_log_error:.3f}, "
        f"{scores.online_step_log_error:.3f}"
    )
    yield (
        f"  a forward takes {1e3 * prices.forward:.3g} ms, each further token "
        f"{1e3 * prices.per_further_token:.2g} ms, request {1e3 * prices.per_request:.2g} ms, 1000 KV "
        f"tokens {1e3 * prices.per_1000_kv_tokens:.2g} ms"
    )
    if prices.rounds:
        rounds = [f"{family} {1e3 * s:.3g} ms" for family, s in sorted(prices.rounds.items())]
        yield f"  a drafting round for one request: {', '.join(rounds)}"
    if prices.is_used:
        yield "  these follow the machine's speed; of them and of the cost corrected online those"
        yield "  count for more that were nearer of late"
    else:
        yield "  they foresaw held-out steps badly, so the cost corrected online stands alone"
    if not report.prices_better:
        yield "beware: it prices steps no better than the cost corrected online"


def _strongest(weights: Mapping[str, float]) -> str:
    """The features that move the log odds of acceptance most, in words."""
    known = [item for item in weights.items() if item[0] != "constant"]
    found = sorted(known, key=lambda item: -abs(item[1]))[:_MOST_WEIGHTS]
    more = [f"{name} ({weight:+.2f})" for name, weight in found if weight > 0.0]
    less = [f"{name} ({weight:+.2f})" for name, weight in found if weight < 0.0]
    words = [("more", more), ("less", less)]
    return ", ".join(f"{word} with {' and '.join(names)}" for word, names in words if names)


def _outside(report: "TrainingReport") -> str:
    limits = [
        f"{name} above {high:.0f}" + (f" or below {low:.0f}" if low >= 1.0 else "")
        for name, (low, high) in report.limits.items()
    ]
    return ", ".join(
        [
            *limits,
            f"drafters other than {', '.join(report.arms) or 'none'}",
            "requests with a temperature, match or confidence beyond those seen",
        ]
    )
