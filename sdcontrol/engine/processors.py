"""transformers' logits processors: which may be used, and what each needs to see.

Knows nothing of sampling, drafts or requests.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from inspect import signature
from typing import cast

from torch import LongTensor, Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from sdcontrol.errors import UnsupportedGeneration

__all__ = ["Processor", "check_processors", "num_head", "parameters_of", "processors_of_row"]

Processor = Callable[[Tensor, Tensor], Tensor]

_PREFIX_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
    hf.InfNanRemoveLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
)
"""Exactly these classes (a subclass may look at the prefix) treat every row alike."""

_REFUSED = {
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn is told the index in the batch",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance needs a second row",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance runs the model again",
    "DiaClassifierFreeGuidanceLogitsProcessor": "guidance needs a second row",
    "WatermarkLogitsProcessor": "watermarks are not supported",
    "SynthIDTextWatermarkLogitsProcessor": "it counts its own calls",
    "WhisperTimeStampLogitsProcessor": "it is for speech",
    "WhisperNoSpeechDetection": "it is for speech",
    "BarkEosPrioritizerLogitsProcessor": "it is for speech",
    "AlternatingCodebooksLogitsProcessor": "it is for audio",
    "DiaEOSChannelFilterLogitsProcessor": "it is for audio",
    "DiaEOSDelayPatternLogitsProcessor": "it is for audio",
}


def check_processors(processors: Sequence[Processor]) -> None:
    """Raise `UnsupportedGeneration` unless every processor is a function of one row."""
    for processor in processors:
        for cls in type(processor).__mro__:
            if cls.__name__ in _REFUSED:
                raise UnsupportedGeneration(
                    f"{type(processor).__name__} cannot be applied at draft positions, one row at "
                    f"a time: {_REFUSED[cls.__name__]}; remove it from the generation settings"
                )
        if len(signature(processor).parameters) > 2:
            raise UnsupportedGeneration(
                f"{type(processor).__name__} takes more than (input_ids, scores), and nothing "
                "else is known here; remove it from the generation settings"
            )


def processors_of_row(
    processors: Sequence[Processor], row: int, num_rows: int
) -> LogitsProcessorList:
    """The processors of a `generate` call of `num_rows`, as they apply to its row `row` alone.

    Some hold facts per row of the call (paddings, encoder tokens): those are copied and cut.
    """
    return LogitsProcessorList([_of_row(processor, row, num_rows) for processor in processors])


def _of_row(processor: Processor, row: int, num_rows: int) -> Processor:
    cut = copy(processor)
    if isinstance(cut, hf.RepetitionPenaltyLogitsProcessor):
        if not isinstance(cut.prompt_ignore_length, Tensor):
            return processor
        cut.prompt_ignore_length = cut.prompt_ignore_length[row : row + 1]
    elif isinstance(cut, hf.EncoderRepetitionPenaltyLogitsProcessor):
        source = row * len(cut.encoder_input_ids) // num_rows
        cut.encoder_input_ids = cast(LongTensor, cut.encoder_input_ids[source : source + 1])
    elif isinstance(cut, hf.EncoderNoRepeatNGramLogitsProcessor):
        cut.generated_ngrams = [cut.generated_ngrams[row * cut.batch_size // num_rows]]
        cut.batch_size = 1
    else:
        return processor
    return cut


def num_head(processors: Sequence[Processor]) -> int:
    """How many processors stand before the closing run of those that need no prefix."""
    count = len(processors)
    while count and type(processors[count - 1]) in _PREFIX_FREE:
        count -= 1
    return count


def parameters_of(processor: Processor) -> Hashable:
    """Equal for processors that do the same."""
    values = sorted(vars(processor).items())
    plain = ((name, _plain(value)) for name, value in values)
    return (type(processor), *plain)


def _plain(value: object) -> Hashable:
    return tuple(value.flatten().tolist()) if isinstance(value, Tensor) else repr(value)
