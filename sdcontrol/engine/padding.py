"""To how many tokens forwards are padded where torch compiles its products for each number of them.

Knows a model's dtype and device; nothing of batches. Graphs have sizes of their own: `buckets`.
"""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

__all__ = ["compiles_by_size", "eager_token_edges", "pad"]

_EXACT_TOKENS, _FINE_TOKENS = 16, 256  # of a forward; up to the second, padding is below 8 tokens
_FINE_STEP, _COARSE_STEP = 8, 32
_COMPILED_TYPES = {torch.bfloat16, torch.float16}
"""In which torch's matrix products on a CPU are compiled anew for every number of tokens: it takes
several milliseconds for each shape of weights."""


def eager_token_edges(model: PreTrainedModel, most: int) -> tuple[int, ...]:
    """The numbers of tokens, up to `most` and what that is padded to, that forwards are padded to.

    Ascending; empty where nothing is padded. Forwards of captured graphs have edges of their own.
    """
    if not compiles_by_size(model):
        return ()
    return tuple(sorted({_padded(num_tokens) for num_tokens in range(1, most + 1)}))


def compiles_by_size(model: PreTrainedModel) -> bool:
    """Whether every new number of tokens costs a compilation."""
    return model.device.type == "cpu" and model.dtype in _COMPILED_TYPES


def _padded(num_tokens: int) -> int:
    """A number of tokens that few others are padded to as well."""
    if num_tokens <= _EXACT_TOKENS:
        return num_tokens
    step = _FINE_STEP if num_tokens <= _FINE_TOKENS else _COARSE_STEP
    return -(-num_tokens // step) * step


def pad(values: Tensor) -> Tensor:
    """With zeros at the end, as far as forwards are padded."""
    count = values.shape[-1]
    return functional.pad(values, (0, _padded(count) - count))
