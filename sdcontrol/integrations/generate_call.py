"""One call of `generate`, as a custom function receives it.

Knows what transformers prepares and what it drops; nothing of engines or drafts.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from sdcontrol.engine.generation import (
    Decoding,
    check_generation_config,
    eos_token_ids,
    fresh_seed,
    stop_string_criteria,
    temperature_of,
)
from sdcontrol.engine.request import Criterion, StopRules
from sdcontrol.engine.sampling import RowSampler, processors_of_row
from sdcontrol.errors import ConfigError, UnsupportedGeneration

__all__ = ["Extras", "GenerateCall", "GenerateRow", "Speculation", "Streamer"]

Speculation = bool | Sequence[str]
"""Whether a request may draft, or the families that it may use."""

_DERIVED_INPUTS = frozenset({"use_cache", "logits_to_keep", "cache_position"})
_DROPPED = {
    "streamer": "pass it as custom_generate=decoder.bind(streamer=...)",
    "assistant_model": "pass it as SpeculativeDecoder(model, drafters=[assistant_model])",
    "negative_prompt_ids": "guidance is not supported; use plain generate",
}


class Streamer(Protocol):
    """transformers' streamers: told the prompt, then every token, then the end."""

    def put(self, value: Tensor) -> None:
        """Take token ids."""
        ...

    def end(self) -> None:
        """No more will come."""
        ...


@dataclass(frozen=True, slots=True)
class Extras:
    """What `generate` does not pass on."""

    streamer: Streamer | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    stop_strings: tuple[str, ...] = ()
    seeds: Sequence[int] | None = None
    speculation: Sequence[Speculation] | None = None


@dataclass(frozen=True, slots=True)
class GenerateRow:
    """One row of the batch, without its padding."""

    prompt: list[int]
    decoding: Decoding
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The arguments of a custom generate function. `input_ids` is `[rows, width]`."""

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    inputs: Mapping[str, object]  # attention_mask, past_key_values, ...

    def check(self) -> None:
        """Raise `UnsupportedGeneration` for whatever cannot be honoured."""
        check_generation_config(self.config)
        _refuse_dropped_arguments()
        for name, given in self.inputs.items():
            if name == "past_key_values" and not _is_empty_cache(given):
                raise UnsupportedGeneration("a filled past_key_values is not supported; leave it")
            if name not in _KNOWN_INPUTS and given is not None and given is not False:
                raise UnsupportedGeneration(
                    f"model input {name!r} is not supported by speculative decoding; remove it"
                )

    def rows(self, extras: Extras) -> list[GenerateRow]:
        """Every row as a request: its prompt, how it samples, when it ends."""
        num_rows, width = self.input_ids.shape
        seeds = _per_row("seeds", extras.seeds, num_rows) or [fresh_seed() for _ in range(num_rows)]
        speculation = _per_row("speculation", extras.speculation, num_rows) or [True] * num_rows
        criteria = self._row_criteria(extras)
        prompts = self.input_ids.tolist()
        paddings = self._paddings(width)
        return [
            GenerateRow(
                prompts[row][paddings[row] :],
                self._decoding(row, tuple(prompts[row][: paddings[row]]), seeds[row], criteria),
                speculation[row],
            )
            for row in range(num_rows)
        ]

    def output(self, outputs: Sequence[Sequence[int]]) -> Tensor | GenerateDecoderOnlyOutput:
        """Prompts and outputs as `generate` returns them, padded on the right."""
        longest = max((len(output) for output in outputs), default=0)
        filled = [[*output, *[self._pad_token] * (longest - len(output))] for output in outputs]
        new = torch.tensor(filled, dtype=self.input_ids.dtype, device=self.input_ids.device)
        sequences = torch.cat((self.input_ids, new.view(len(outputs), longest)), dim=1)
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    @property
    def _pad_token(self) -> int:
        pad = getattr(self.config, "_pad_token_tensor", None)
        return 0 if pad is None else int(pad)

    def _decoding(
        self, row: int, padding: tuple[int, ...], seed: int, criteria: tuple[Criterion, ...]
    ) -> Decoding:
        num_rows, width = self.input_ids.shape
        rules = StopRules(
            max_new_tokens=int(self.config.max_length) - width,
            eos_token_ids=eos_token_ids(self.config),
            criteria=criteria,
            pad_tokens=padding,
        )
        sampler = RowSampler(
            processors=processors_of_row(self.processors, row, num_rows),
            do_sample=bool(self.config.do_sample),
            seed=seed,
            pad_tokens=padding,
        )
        return Decoding(sampler, rules, temperature_of(self.config))

    def _row_criteria(self, extras: Extras) -> tuple[Criterion, ...]:
        """The criteria beside length and end-of-text, which the stop rules know themselves."""
        own = [c for c in self.criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        return (*own, *stop_string_criteria(extras.stop_strings, extras.tokenizer))

    def _paddings(self, width: int) -> list[int]:
        """How many tokens of each row are padding, all on its left."""
        mask = self.inputs.get("attention_mask")
        if not isinstance(mask, Tensor):
            return [0] * len(self.input_ids)
        lengths = mask.long().sum(dim=1)
        left = torch.arange(width, device=mask.device) >= (width - lengths)[:, None]
        if not bool((mask.bool() == left).all()) or int(lengths.min()) == 0:
            raise UnsupportedGeneration(
                "attention_mask must be zeros (padding), then ones, with at least one 1 per row; "
                "pad on the left"
            )
        return [width - length for length in lengths.tolist()]


_KNOWN_INPUTS = _DERIVED_INPUTS | {"attention_mask", "position_ids", "past_key_values"}


_T = TypeVar("_T")


def _per_row(name: str, values: Sequence[_T] | None, num_rows: int) -> list[_T] | None:
    if values is not None and len(values) != num_rows:
        raise ConfigError(f"{len(values)} {name} for {num_rows} rows; give one per row")
    return None if values is None else list(values)


def _is_empty_cache(cache: object) -> bool:
    length = getattr(cache, "get_seq_length", None)
    return cache is None or (length is not None and int(length()) == 0)


def _refuse_dropped_arguments() -> None:
    """`generate` keeps some arguments from custom functions without a word: look at its frame."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "generate":
        frame = frame.f_back
    if not frame.f_code.co_filename.endswith("generation/utils.py"):
        return
    for name, remedy in _DROPPED.items():
        if frame.f_locals.get(name) is not None:
            raise UnsupportedGeneration(f"{name} does not reach a custom_generate: {remedy}")
