"""`sdcontrol generate`: prompts in, text out, and what speculation did.

Knows the options and the order of things; decoding, text and statistics come from `integrations`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from sdcontrol import __version__
from sdcontrol.cli.command import Commands, Parser, add_command
from sdcontrol.cli.decoding import (
    add_models,
    add_prompts,
    add_sampling,
    add_speculation,
    check_policy,
    draft_model_of,
    drafter_names,
    load_models,
    sampling_of,
)
from sdcontrol.cli.files import check_writable, write_json
from sdcontrol.cli.progress import Progress, progress
from sdcontrol.cli.prompts import Prompt, read_prompts
from sdcontrol.cli.results import InOrder, JsonLinesWriter, TextWriter, Writer
from sdcontrol.errors import ConfigError, RequestRefused

if TYPE_CHECKING:
    from sdcontrol.engine.stats import EngineStats
    from sdcontrol.integrations.transformers import SpeculativeDecoder, StreamEvent

__all__ = ["add_generate"]

_DESCRIPTION = "Continue prompts with a model; speculation makes it faster, not different."


def add_generate(commands: Commands) -> None:
    """Make the command known."""
    parser = add_command(commands, "generate", run, _DESCRIPTION)
    add_prompts(parser)
    add_models(parser)
    add_speculation(parser)
    add_sampling(parser)
    _add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Decode all prompts; 1 where some were refused."""
    sampling = sampling_of(options)
    prompts = read_prompts(options.prompts, options.file, sys.stdin)
    check_writable(options.output, options.json, inputs=options.file)
    check_policy(options)
    with _decoder(options) as decoder, _opened(options.output) as file:
        ordered = InOrder(prompts, _writer(options, file, len(prompts)))
        try:
            _decode(decoder, prompts, options, sampling, ordered)
        except BaseException:  # what others had ended with is written, whatever it is
            ordered.interrupt()
            raise
        finally:
            _report(options, decoder.report(), ordered)
    return 1 if any(result.error is not None for result in ordered.results) else 0


# ---- options


def _add_output(parser: Parser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--format", default="text", choices=("text", "jsonl"), help="jsonl: one object per prompt"
    )
    group.add_argument("--output", metavar="PATH", help="write there, not to standard output")
    group.add_argument(
        "--report", action="store_true", help="say on standard error what speculation did"
    )
    group.add_argument(
        "--warm-start",
        metavar="FOLDER",
        help="keep there what this run teaches of models and machine; begin with what earlier ones did",
    )


# ---- decoding


@contextmanager
def _decoder(options: argparse.Namespace) -> "Iterator[SpeculativeDecoder]":
    from sdcontrol.integrations.transformers import SpeculativeDecoder

    model, drafters, tokenizer = load_models(options)
    with SpeculativeDecoder(
        model,
        drafters=drafters,
        policy=options.policy,
        verification=options.verification,
        tokenizer=tokenizer,
        warm_start=options.warm_start,
        max_batch_size=options.batch_size,
    ) as decoder:
        yield decoder


def _decode(
    decoder: "SpeculativeDecoder",
    prompts: Sequence[Prompt],
    options: argparse.Namespace,
    sampling: Mapping[str, object],
    ordered: InOrder,
) -> None:
    def refused(index: int, error: RequestRefused) -> None:
        ordered.end(index, "refused", drafters={}, error=str(error))
        print(f"sdcontrol: refused: {error}", file=sys.stderr)

    stream: Callable[..., Iterator[StreamEvent]] = decoder.stream
    events = stream(
        [prompt.text for prompt in prompts],
        ids=[str(prompt.id) for prompt in prompts],
        seeds=[options.seed + index for index in range(len(prompts))],
        on_refused=refused,
        **sampling,
    )
    has_terminal = sys.stdout.isatty() and options.output is None  # where text shows the progress
    with progress(len(prompts), is_shown=sys.stderr.isatty() and not has_terminal) as shown:
        for event in events:
            _take(event, ordered, shown)


def _take(event: "StreamEvent", ordered: InOrder, shown: Progress) -> None:
    ordered.add(event.index, event.text, len(event.tokens))
    shown.advance(len(event.tokens), has_ended=event.finish_reason is not None)
    if event.finish_reason is not None:
        drafters = {
            arm: {"proposed": stats.proposed, "accepted": stats.accepted}
            for arm, stats in event.drafters.items()
        }
        ordered.end(event.index, event.finish_reason, drafters=drafters)


# ---- output


@contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    with file:
        yield file


def _writer(options: argparse.Namespace, file: TextIO, num_prompts: int) -> Writer:
    if options.format == "jsonl":
        return JsonLinesWriter(file)
    return TextWriter(file, has_headers=num_prompts > 1)


def _report(options: argparse.Namespace, stats: "EngineStats", ordered: InOrder) -> None:
    from sdcontrol.integrations.summary import request_lines, summary_lines, summary_record

    if options.report:
        print(*summary_lines(stats), *request_lines(stats), sep="\n", file=sys.stderr)
    if options.json is not None:
        result = {
            "version": __version__,
            "model": options.model,
            "draft_model": draft_model_of(options),
            "drafters": drafter_names(options),
            "policy": options.policy,
            "verification": options.verification,
            "requests": [result.record() for result in ordered.results],
            "statistics": summary_record(stats),
        }
        write_json(options.json, result)
