"""A decoder with what `generate` drops on its way to a custom function.

Knows what `generate` calls; the decoder does the rest.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from sdcontrol.integrations.generate_call import Extras, GenerateCall

if TYPE_CHECKING:
    from sdcontrol.integrations.transformers import SpeculativeDecoder

__all__ = ["BoundDecoder"]


class BoundDecoder:
    """A decoder with a streamer, stop strings, seeds or opt-outs; made by `bind`."""

    def __init__(self, decoder: "SpeculativeDecoder", extras: Extras) -> None:
        self._decoder = decoder
        self._extras = extras

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: object,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` calls."""
        call = GenerateCall(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        return self._decoder.generate(model, call, self._extras)
