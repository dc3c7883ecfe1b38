"""`sdcontrol record`: decode prompts and keep every decision and what came of it.

Knows the options and the order of things; what is written stands in `traces`.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdcontrol.cli.command import Commands, add_command
from sdcontrol.cli.decoding import (
    add_models,
    add_prompts,
    add_sampling,
    add_speculation,
    check_policy,
    load_models,
    sampling_of,
)
from sdcontrol.cli.files import check_writable, write_json
from sdcontrol.cli.inspect import summary_record
from sdcontrol.cli.progress import progress
from sdcontrol.cli.prompts import Prompt, read_prompts
from sdcontrol.errors import ConfigError, RequestRefused
from sdcontrol.extras import check_installed

if TYPE_CHECKING:
    from sdcontrol.core import Planner
    from sdcontrol.engine.drafters.build import DrafterSpec
    from sdcontrol.engine.loop import Engine
    from sdcontrol.engine.request import Request
    from sdcontrol.traces.recorder import Recorder

__all__ = ["add_record"]

_DESCRIPTION = "Decode prompts and record every decision, to replay and learn from."


def add_record(commands: Commands) -> None:
    """Make the command known."""
    parser = add_command(commands, "record", run, _DESCRIPTION)
    add_prompts(parser)
    add_models(parser)
    add_speculation(parser)
    add_sampling(parser)
    group = parser.add_argument_group("recording")
    group.add_argument("--output", required=True, metavar="FOLDER", help="a new folder: the trace")
    group.add_argument(
        "--acceptance-table",
        action="store_true",
        help="compute, after the run, what every drafter would have had accepted everywhere; "
        "sdcontrol replay needs it to judge other policies",
    )
    group.add_argument(
        "--keep-token-ids",
        action="store_true",
        help="store token ids of prompts and outputs; else only how many there were",
    )


def run(options: argparse.Namespace) -> int:
    """Record, and say what was recorded; 1 where prompts were refused."""
    sampling = sampling_of(options)
    prompts = read_prompts(options.prompts, options.file, sys.stdin)
    check_writable(options.json, inputs=[options.output, *options.file])
    if options.acceptance_table and options.verification == "rejection":
        raise ConfigError(
            "--acceptance-table needs --verification coupled: under rejection the text itself "
            "depends on what was drafted"
        )
    check_policy(options)
    num_refused = _record(options, prompts, sampling)
    _report(options)
    return 1 if num_refused else 0


def _record(
    options: argparse.Namespace, prompts: Sequence[Prompt], sampling: Mapping[str, object]
) -> int:
    """Decode into the trace; how many prompts were refused."""
    from sdcontrol.engine.loop import Engine
    from sdcontrol.integrations.recording import facts_of_run
    from sdcontrol.integrations.settings import engine_config, planner_of

    config = engine_config({"max_batch_size": options.batch_size})
    _check_output(options)
    model, drafters, tokenizer = load_models(options)
    recorder = _recorder(planner_of(options.policy), options)
    try:
        engine = Engine(
            model,
            drafters=drafters,
            planner=recorder,
            verification=options.verification,
            tokenizer=tokenizer,
            config=config,
        )
    except BaseException:
        recorder.discard()
        raise
    with recorder, engine:
        recorder.describe(facts_of_run(engine, drafters))
        requests = _submit(engine, prompts, options.seed, sampling)
        _decode(engine, len(requests))
    if options.acceptance_table:
        _add_table(options, engine, drafters, requests)
    return len(prompts) - len(requests)


def _check_output(options: argparse.Namespace) -> None:
    """What would fail once the models are loaded, which takes time."""
    check_installed("pyarrow")
    folder = Path(options.output)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; record into a new folder")


def _recorder(planner: "Planner", options: argparse.Namespace) -> "Recorder":
    from sdcontrol.traces.recorder import Recorder

    return Recorder(planner, options.output, keep_token_ids=options.keep_token_ids)


def _submit(
    engine: "Engine", prompts: Sequence[Prompt], first_seed: int, sampling: Mapping[str, object]
) -> "list[Request]":
    """Queue every prompt; those that can never run are told of and left out."""
    submit: Callable[..., str] = engine.submit
    found = []
    for index, prompt in enumerate(prompts):
        try:
            name = submit(
                prompt.text, request_id=str(prompt.id), seed=first_seed + index, **sampling
            )
        except RequestRefused as error:
            print(f"sdcontrol: refused: {error}", file=sys.stderr)
            continue
        found.append(engine.requests[name])
    return found


def _decode(engine: "Engine", num_requests: int) -> None:
    with progress(num_requests, is_shown=sys.stderr.isatty()) as shown:
        while engine.has_work:
            engine.step()
            for event in engine.take_events():
                shown.advance(len(event.tokens), has_ended=event.finish_reason is not None)


def _add_table(
    options: argparse.Namespace,
    engine: "Engine",
    drafters: "Sequence[DrafterSpec]",
    requests: "Sequence[Request]",
) -> None:
    from sdcontrol.integrations.acceptance import add_acceptance_table

    folder = Path(options.output)
    with progress(len(requests), is_shown=sys.stderr.isatty()) as shown:
        add_acceptance_table(
            folder,
            engine.model,
            drafters,
            requests,
            config=engine.config,
            on_request=lambda: shown.advance(0, has_ended=True),
        )


def _report(options: argparse.Namespace) -> None:
    from sdcontrol.traces.inspect import summarise
    from sdcontrol.traces.reader import Trace

    summary = summarise(Trace(options.output))
    print(f"recorded into {options.output}", *summary.lines(), sep="\n")
    if options.json is not None:
        write_json(options.json, {"trace": options.output, **summary_record(summary)})
