"""`sdcontrol generate`: prompts in, text out, and what speculation did.

Knows the options and the order of things; decoding, text and statistics come from `integrations`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sdcontrol import __version__
from sdcontrol.cli.command import Commands, Parser, add_command
from sdcontrol.cli.progress import Progress, progress
from sdcontrol.cli.prompts import Prompt, read_prompts
from sdcontrol.cli.results import InOrder, JsonLinesWriter, TextWriter, Writer
from sdcontrol.errors import ConfigError, RequestRefused

if TYPE_CHECKING:
    from sdcontrol.engine.stats import EngineStats
    from sdcontrol.integrations.transformers import SpeculativeDecoder, StreamEvent

__all__ = ["add_generate"]

_BUNDLED = "bundled"
_NONE = "none"
_DESCRIPTION = "Continue prompts with a model; speculation makes it faster, not different."


def add_generate(commands: Commands) -> None:
    """Make the command known."""
    parser = add_command(commands, "generate", run, _DESCRIPTION)
    _add_input(parser)
    _add_model(parser)
    _add_speculation(parser)
    _add_sampling(parser)
    _add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Decode all prompts; 1 where some were refused."""
    sampling = _sampling(options)
    prompts = read_prompts(options.prompts, options.file, sys.stdin)
    for path in (options.output, options.json):
        _check_writable(path)
    _check_policy(options)
    with _decoder(options) as decoder, _opened(options.output) as file:
        ordered = InOrder(prompts, _writer(options, file, len(prompts)))
        try:
            _decode(decoder, prompts, options, sampling, ordered)
        except KeyboardInterrupt:
            ordered.interrupt()
            raise
        finally:
            _report(options, decoder.report(), ordered)
    return 1 if any(result.error is not None for result in ordered.results) else 0


# ---- options


def _add_input(parser: Parser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help='a text to continue; "-" is standard input'
    )
    group.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="PATH",
        help='PATH.jsonl: a JSON object per line, with "prompt" and perhaps "id" (other keys are '
        "left alone); any other file is one prompt; may be repeated",
    )


def _add_model(parser: Parser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument(
        "--model", default=_BUNDLED, metavar="NAME", help="folder, hub name or bundled (default)"
    )
    group.add_argument(
        "--draft-model",
        metavar="NAME",
        help="folder, hub name, bundled or none; default: bundled with the bundled model, else none",
    )
    dtypes = ("auto", "float32", "bfloat16", "float16")
    group.add_argument("--dtype", default="auto", choices=dtypes, help="auto: as it was saved")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: GPU if any")


def _add_speculation(parser: Parser) -> None:
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--drafter",
        action="append",
        metavar="NAME",
        help="ngram (default), sparse_kv:TOKENS or none; may be repeated",
    )
    group.add_argument(
        "--policy", default="goodput", help="goodput (default), off, static:DRAFTER:TOKENS, ..."
    )
    group.add_argument("--verification", default="coupled", choices=("coupled", "rejection"))
    group.add_argument("--batch-size", type=int, default=16, help="prompts decoded together")


def _add_sampling(parser: Parser) -> None:
    group = parser.add_argument_group("sampling (greedy unless one of these is given)")
    group.add_argument("--temperature", type=float, metavar="T", help="0: greedy")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, default=0, help="of the first prompt; the next has +1")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end with this; repeatable"
    )


def _add_output(parser: Parser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--format", default="text", choices=("text", "jsonl"))
    group.add_argument("--output", metavar="PATH", help="write there, not to standard output")
    group.add_argument(
        "--report", action="store_true", help="say on standard error what speculation did"
    )


def _sampling(options: argparse.Namespace) -> dict[str, object]:
    """Options of `generate`; raises `ConfigError` for those that do not go together."""
    given = {
        name: value
        for name in ("temperature", "top_k", "top_p")
        if (value := getattr(options, name)) is not None
    }
    if given.get("temperature") == 0:
        if len(given) > 1:
            raise ConfigError("--top-k and --top-p need a --temperature above 0")
        given = {}
    _check_range("--temperature", given.get("temperature"), "at least 0", lambda t: t > 0)
    _check_range("--top-k", given.get("top_k"), "at least 1", lambda k: k >= 1)
    _check_range("--top-p", given.get("top_p"), "above 0 and at most 1", lambda p: 0 < p <= 1)
    _check_range("--max-new-tokens", options.max_new_tokens, "at least 1", lambda n: n >= 1)
    if "" in options.stop:
        raise ConfigError("--stop '': give at least one character")
    settings: dict[str, object] = {"max_new_tokens": options.max_new_tokens}
    settings |= {"do_sample": bool(given), **given}
    if options.stop:
        settings["stop_strings"] = options.stop
    return settings


def _check_range(
    name: str, value: float | None, limit: str, holds: Callable[[float], bool]
) -> None:
    if value is not None and not holds(value):
        raise ConfigError(f"{name} is {value}; give a number that is {limit}")


def _check_policy(options: argparse.Namespace) -> None:
    """Before a model is loaded, which takes time: does everything that was named exist?"""
    from sdcontrol import policies
    from sdcontrol.integrations.settings import arms_of, check_policy_drafter

    config = policies.parse(options.policy)
    arms = arms_of(_drafter_names(options))
    check_policy_drafter(config, arms if _draft_model(options) == _NONE else [*arms, "draft_model"])


def _drafter_names(options: argparse.Namespace) -> list[str]:
    names = ["ngram"] if options.drafter is None else list(options.drafter)
    if _NONE in names and len(names) > 1:
        raise ConfigError("--drafter none stands alone")
    return [] if names == [_NONE] else names


def _draft_model(options: argparse.Namespace) -> str:
    default = _BUNDLED if options.model == _BUNDLED else _NONE
    return str(options.draft_model or default)


# ---- decoding


@contextmanager
def _decoder(options: argparse.Namespace) -> "Iterator[SpeculativeDecoder]":
    from sdcontrol.engine.drafters.build import DrafterSpec
    from sdcontrol.integrations.loading import load_model, load_tokenizer
    from sdcontrol.integrations.transformers import SpeculativeDecoder

    where = {"dtype": options.dtype, "device": options.device}
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, **where)
    drafters: list[DrafterSpec] = list(_drafter_names(options))
    draft_model = _draft_model(options)
    if draft_model != _NONE:
        drafters.append(load_model(draft_model, role="draft", **where))
    with SpeculativeDecoder(
        model,
        drafters=drafters,
        policy=options.policy,
        verification=options.verification,
        tokenizer=tokenizer,
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


def _check_writable(path: str | None) -> None:
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise ConfigError(f"{path} cannot be written: it is a folder, or is in none")


@contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115
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
            "draft_model": _draft_model(options),
            "drafters": _drafter_names(options),
            "policy": options.policy,
            "verification": options.verification,
            "requests": [result.record() for result in ordered.results],
            "statistics": summary_record(stats),
        }
        text = json.dumps(result, ensure_ascii=False, indent=2)
        Path(options.json).write_text(text + "\n", "utf-8")
