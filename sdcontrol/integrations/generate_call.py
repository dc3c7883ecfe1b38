"""One call of `generate`, as a custom function receives it.

Knows what transformers prepares and what it drops; nothing of engines or drafts.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from sdcontrol.engine.generation import (
    Decoding,
    check_generation_config,
    fresh_seed,
    stop_string_criteria,
    temperature_of,
)
from sdcontrol.engine.renamed import CACHES
from sdcontrol.engine.request import Criterion, StopRules
from sdcontrol.engine.sampling import RowSampler, processors_of_row
from sdcontrol.errors import UnsupportedGeneration
from sdcontrol.integrations.one_each import one_each

__all__ = ["Extras", "GenerateCall", "GenerateRow", "Speculation", "Streamer"]

Speculation = bool | Sequence[str]
"""Whether a request may draft, or the families that it may use."""

_CHECKED_INPUTS = frozenset({"attention_mask", "position_ids", *CACHES})
_WITHOUT_EFFECT = frozenset({"use_cache", "logits_to_keep"})  # on the text
_DROPPED = {
    "streamer": "pass it as custom_generate=decoder.bind(streamer=...)",
    "assistant_model": "pass it as SpeculativeDecoder(model, drafters=[assistant_model])",
    "synced_gpus": "rows are decoded by this process alone; leave it out, or use plain generate",
    "negative_prompt_ids": "guidance is not supported; use plain generate",
    "negative_prompt_attention_mask": "guidance is not supported; use plain generate",
}
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


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
    inputs: Mapping[str, object]  # attention_mask, cache, ...

    def check(self) -> None:
        """Raise `UnsupportedGeneration` for whatever cannot be honoured."""
        check_generation_config(self.config)
        _refuse_dropped_arguments()
        for name in CACHES:
            if not _is_empty_cache(self.inputs.get(name)):
                raise UnsupportedGeneration(f"a filled {name} is not supported; leave it out")
        for name, given in self.inputs.items():
            is_known = name in _CHECKED_INPUTS or name in _WITHOUT_EFFECT
            if not is_known and _is_given(given):
                raise UnsupportedGeneration(
                    f"model input {name!r} is not supported by speculative decoding; leave it out"
                )
        self._check_shapes()
        self._check_positions()

    def rows(self, extras: Extras) -> list[GenerateRow]:
        """Every row as a request: its prompt, how it samples, when it ends."""
        num_rows, width = self.input_ids.shape
        seeds = _per_row("seeds", extras.seeds, num_rows) or self._fresh_seeds(num_rows)
        speculation = _per_row("speculation", extras.speculation, num_rows) or [True] * num_rows
        criteria = self._row_criteria(extras)
        self._check_padding_token(num_rows, criteria)
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
        """Prompts and outputs as `generate` returns them, padded on the right.

        Rows that a criterion ended are padded too where no end-of-text token is set, and `generate`
        would let them run on until all have ended.
        """
        longest = max((len(output) for output in outputs), default=0)
        filled = [[*output, *[self._pad_token] * (longest - len(output))] for output in outputs]
        new = torch.tensor(filled, dtype=self.input_ids.dtype, device=self.input_ids.device)
        sequences = torch.cat((self.input_ids, new.view(len(outputs), longest)), dim=1)
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
        return sequences

    @property
    def _pad_token(self) -> int:
        """Only asked for where rows may differ in length; `rows` has checked that it exists."""
        pad = getattr(self.config, "_pad_token_tensor", None)
        return 0 if pad is None else int(pad)

    @property
    def _max_length(self) -> int:
        """Of prompt and output. A criterion that the user gave stands in place of the config's."""
        limits = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        return int(min(limits, default=self.config.max_length))

    @property
    def _eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a row; a user's criterion stands in place of the config's."""
        given = [c.eos_token_id for c in self.criteria if type(c) is EosTokenCriteria]
        return frozenset(int(token) for ids in given for token in torch.as_tensor(ids).flatten())

    def _fresh_seeds(self, num_rows: int) -> list[int]:
        """Greedy rows have no use for any, and leave torch's generator alone."""
        return [fresh_seed() if self.config.do_sample else 0 for _ in range(num_rows)]

    def _decoding(
        self, row: int, padding: tuple[int, ...], seed: int, criteria: tuple[Criterion, ...]
    ) -> Decoding:
        num_rows, width = self.input_ids.shape
        rules = StopRules(
            max_new_tokens=max(self._max_length - width, 1),
            eos_token_ids=self._eos_token_ids,
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

    def _check_padding_token(self, num_rows: int, criteria: Sequence[Criterion]) -> None:
        may_differ = num_rows > 1 and (bool(criteria) or bool(self._eos_token_ids))
        if may_differ and getattr(self.config, "_pad_token_tensor", None) is None:
            raise UnsupportedGeneration(
                f"{num_rows} rows may end at different lengths, and there is no pad_token_id to "
                "fill them with; set one"
            )

    def _check_shapes(self) -> None:
        """`generate` drops a mask of ones alone, having made the positions from it."""
        width = self.input_ids.shape[-1]
        for name in ("attention_mask", "position_ids"):
            given = self.inputs.get(name)
            if isinstance(given, Tensor) and given.shape[-1] != width:
                raise UnsupportedGeneration(
                    f"{name} of shape {list(given.shape)} for input_ids of shape "
                    f"{list(self.input_ids.shape)}; give an attention_mask of the prompts' own shape"
                )

    def _check_positions(self) -> None:
        """Positions count a row's tokens from 0; at padding they do not matter."""
        given = self.inputs.get("position_ids")
        if given is None:
            return
        mask = self.inputs.get("attention_mask")
        seen = mask if isinstance(mask, Tensor) else torch.ones_like(self.input_ids[:1])
        standard = seen.long().cumsum(dim=-1) - 1
        is_standard = isinstance(given, Tensor) and bool(
            ((given.to(standard.device) == standard) | (seen == 0)).all()
        )
        if not is_standard:
            raise UnsupportedGeneration(
                "position_ids that do not count the tokens of a row from 0 are not supported; "
                "leave them out"
            )

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


_T = TypeVar("_T")


def _per_row(name: str, values: Sequence[_T] | None, num_rows: int) -> list[_T] | None:
    return None if values is None else cast(list[_T], one_each(name, values, num_rows, "rows"))


def _is_given(argument: object) -> bool:
    """Models of several kinds of input add an empty mapping of those that are not there."""
    is_empty = isinstance(argument, Mapping) and not argument
    return argument is not None and argument is not False and not is_empty


def _is_empty_cache(cache: object) -> bool:
    length = getattr(cache, "get_seq_length", None)
    return cache is None or (length is not None and int(length()) == 0)


def _refuse_dropped_arguments() -> None:
    """`generate` keeps some arguments from custom functions without a word: look at its frame.

    Wrappers around it (PEFT's, a model's own) have frames of their own; without any frame of
    transformers' own nothing was dropped.
    """
    frame = sys._getframe().f_back
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    if frame is None:
        return
    for name, remedy in _DROPPED.items():
        if _is_given(frame.f_locals.get(name)):
            raise UnsupportedGeneration(f"{name} does not reach a custom_generate: {remedy}")
    options = frame.f_locals.get("kwargs")
    for name in CACHES:
        if isinstance(options, Mapping) and options.get(name) is not None:
            raise UnsupportedGeneration(
                f"{name} would neither be read nor filled: the engine keeps its own cache; leave it out"
            )
