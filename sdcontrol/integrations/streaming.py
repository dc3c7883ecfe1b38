"""Tokens and text of several requests as they come.

Knows events and tokenizers; nothing of models, drafts or how a step is made.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sdcontrol.engine.stats import DrafterStats
from sdcontrol.errors import ConfigError, UnsupportedGeneration
from sdcontrol.integrations.detokenizer import Detokenizer
from sdcontrol.integrations.feed import Consumer
from sdcontrol.integrations.one_each import one_each

__all__ = ["StreamEvent", "options_per_prompt", "stream_events"]


_LISTS = {"request_id": "ids", "seed": "seeds"}  # what a caller calls lists of options


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """New tokens of one request. `index` is its place among the prompts."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    text: str  # empty without a tokenizer; what later tokens may change comes with those
    finish_reason: str | None = None  # eos, length, stop, cancelled; None: there is more to come
    drafters: Mapping[str, DrafterStats] = field(default_factory=dict)
    # ^ with the last event: what each drafter arm did for this request


def stream_events(
    consumer: Consumer, places: Mapping[str, tuple[int, Detokenizer]]
) -> Iterator[StreamEvent]:
    """A consumer's events with their text; `places` has a prompt's place by request id."""
    for event in consumer:
        index, detokenizer = places[event.request_id]
        is_last = event.finish_reason is not None
        yield StreamEvent(
            event.request_id,
            index,
            event.tokens,
            detokenizer.add(event.tokens, is_last=is_last),
            event.finish_reason,
            consumer.drafts_of(event.request_id) if is_last else {},
        )


def options_per_prompt(
    prompts: Sequence[object],
    per_prompt: Mapping[str, Sequence[object] | None],
    options: Mapping[str, object],
) -> list[dict[str, object]]:
    """For each prompt, the options of all and what is its own.

    Raises `ConfigError` or `UnsupportedGeneration` for arguments that do not go together.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts is one string; give a list of prompts")
    if options.get("num_return_sequences") not in (None, 1):
        raise UnsupportedGeneration(
            f"num_return_sequences={options['num_return_sequences']!r}: a stream has one text per "
            "prompt; give the prompt as often as you want texts"
        )
    given = {
        name: one_each(_LISTS.get(name, name), values, len(prompts), "prompts")
        for name, values in per_prompt.items()
        if values is not None
    }
    for name in set(options) & set(per_prompt):
        raise ConfigError(f"{name}={options[name]!r} is of one request; give a list, one for each")
    return [
        {**options, **{name: values[index] for name, values in given.items()}}
        for index in range(len(prompts))
    ]
