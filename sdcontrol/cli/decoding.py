"""What `generate` and `record` share: the options of a run, what they mean together, and models.

Knows options; nothing of prompts' ways through an engine.
"""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from sdcontrol.cli.command import Parser
from sdcontrol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sdcontrol.engine.drafters.build import DrafterSpec

__all__ = [
    "add_models",
    "add_prompts",
    "add_sampling",
    "add_speculation",
    "check_policy",
    "draft_model_of",
    "drafter_names",
    "load_models",
    "sampling_of",
]

_BUNDLED = "bundled"
_NONE = "none"


def add_prompts(parser: Parser) -> None:
    """Prompts."""
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


def add_models(parser: Parser) -> None:
    """Target and draft model."""
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


def add_speculation(parser: Parser) -> None:
    """Drafters, policy, verification."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--drafter",
        action="append",
        metavar="NAME",
        help="ngram (default), sparse_kv:TOKENS or none; may be repeated",
    )
    group.add_argument(
        "--policy",
        default="goodput",
        help="goodput (default), off, static:DRAFTER:TOKENS, learned:PATH, ...",
    )
    group.add_argument(
        "--verification",
        default="coupled",
        choices=("coupled", "rejection"),
        help="coupled (default): sampled text depends on the seed alone; rejection: also on the drafts",
    )
    group.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="prompts decoded together (16)"
    )


def add_sampling(parser: Parser) -> None:
    """How tokens are chosen, and when to stop."""
    group = parser.add_argument_group("sampling (greedy unless one of these is given)")
    group.add_argument("--temperature", type=float, metavar="T", help="0: greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="from the K likeliest tokens alone")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="from the fewest tokens of probability P in all"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the first prompt; the next has +1 (0)"
    )
    group.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="for each prompt (128)"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end with this; repeatable"
    )


def sampling_of(options: argparse.Namespace) -> dict[str, object]:
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


def check_policy(options: argparse.Namespace) -> None:
    """Before a model is loaded, which takes time: does everything that was named exist?"""
    from sdcontrol import policies
    from sdcontrol.integrations.settings import arms_of, check_policy_drafter

    config = policies.parse(options.policy)
    arms = arms_of(drafter_names(options))
    check_policy_drafter(
        config, arms if draft_model_of(options) == _NONE else [*arms, "draft_model"]
    )


def drafter_names(options: argparse.Namespace) -> list[str]:
    """Drafters without a model of their own. Raises `ConfigError`."""
    names = ["ngram"] if options.drafter is None else list(options.drafter)
    if _NONE in names and len(names) > 1:
        raise ConfigError("--drafter none stands alone; leave out the others, or none")
    for name in names:
        if name not in (_NONE, "ngram") and not name.startswith("sparse_kv:"):
            raise ConfigError(
                f"no drafter is called {name!r}; give ngram, sparse_kv:TOKENS or none, and a draft "
                "model as --draft-model"
            )
    return [] if names == [_NONE] else names


def draft_model_of(options: argparse.Namespace) -> str:
    """The name of the draft model; "none" without one."""
    default = _BUNDLED if options.model == _BUNDLED else _NONE
    return str(options.draft_model or default)


def load_models(
    options: argparse.Namespace,
) -> "tuple[PreTrainedModel, list[DrafterSpec], PreTrainedTokenizerBase]":
    """The model, its drafters, its tokenizer. Raises `ConfigError` or `UnsupportedModel`."""
    from sdcontrol.integrations.loading import load_model, load_tokenizer

    where = {"dtype": options.dtype, "device": options.device}
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, **where)
    drafters: list[DrafterSpec] = list(drafter_names(options))
    draft_model = draft_model_of(options)
    if draft_model != _NONE:
        drafters.append(load_model(draft_model, role="draft", **where))
    return model, drafters, tokenizer
