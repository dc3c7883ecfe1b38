"""`sdcontrol inspect`: what is in a trace, or one request's way through it.

Knows the options, and how a summary is written as JSON; what is found comes from `traces`.
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from sdcontrol.cli.command import Commands, add_command
from sdcontrol.cli.files import check_writable, find_trace, write_json

if TYPE_CHECKING:
    from sdcontrol.traces.inspect import TraceSummary

__all__ = ["add_inspect", "summary_record"]

_DESCRIPTION = "Say what is in a trace: requests, acceptance, choices, times, regimes."


def add_inspect(commands: Commands) -> None:
    """Make the command known."""
    parser = add_command(commands, "inspect", run, _DESCRIPTION)
    parser.add_argument("trace", metavar="TRACE", help="a trace's folder, or bundled:NAME")
    parser.add_argument("--request", metavar="ID", help="follow this request step by step")


def run(options: argparse.Namespace) -> int:
    """Print, and where asked write, what is in the trace."""
    from sdcontrol.traces.follow import follow
    from sdcontrol.traces.inspect import summarise
    from sdcontrol.traces.reader import Trace

    folder = find_trace(options.trace)
    check_writable(options.json, inputs=[folder])
    trace = Trace(folder)
    if options.request is not None:
        lines = list(follow(trace, options.request))
        record: dict[str, object] = {"request": options.request, "lines": lines}
    else:
        summary = summarise(trace)
        lines, record = summary.lines(), summary_record(summary)
    print(*lines, sep="\n")
    if options.json is not None:
        write_json(options.json, {"trace": options.trace, **record})
    return 0


def summary_record(summary: "TraceSummary") -> dict[str, object]:
    """Plain numbers, strings, lists and mappings."""
    arms = {
        name: {**asdict(arm), "acceptance_rates": arm.acceptance_rates}
        for name, arm in summary.arms.items()
    }
    choices = [
        {"batch": batch, "context": context, "times_chosen": dict(counts)}
        for (batch, context), counts in summary.choices.items()
    ]
    return {
        "description": summary.header_words,
        "is_complete": not summary.cut,
        "cut": summary.cut,
        "num_requests": summary.num_requests,
        "num_steps": summary.num_steps,
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
        "duration_seconds": summary.duration_seconds,
        "tokens_per_second": summary.tokens_per_second,
        "phase_seconds": dict(summary.seconds),
        "finish_reasons": dict(summary.finish_reasons),
        "arms": arms,
        "choices": choices,
        "regimes": [asdict(regime) for regime in summary.regimes],
        "cost": None if summary.cost is None else asdict(summary.cost),
        "faults": dict(summary.faults),
    }
