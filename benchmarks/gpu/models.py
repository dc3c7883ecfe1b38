"""Models of an exact shape with random weights, made where they are used.

Knows transformers and shapes; nothing of engines.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sdcontrol.estimators.shapes import ModelShape

__all__ = ["llama_config", "random_llama"]

_SPREAD = 0.02  # of weights; logits stay finite, and that is all that matters
_POSITIONS = 131072
_ROPE_THETA = 500000.0


def llama_config(shape: ModelShape) -> LlamaConfig:
    """The configuration of this shape, without an end of text."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=shape.is_head_tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": _ROPE_THETA}
    return config


def random_llama(
    shape: ModelShape, *, device: torch.device, dtype: torch.dtype, seed: int
) -> LlamaForCausalLM:
    """Weights are drawn on the device: nothing is downloaded, nothing initialised twice."""
    config = llama_config(shape)
    config.dtype = dtype
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to(dtype=dtype)  # type: ignore[call-arg]  # transformers wraps it
    model.to_empty(device=device)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # its buffers are empty
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # norms
            else:
                parameter.normal_(std=_SPREAD, generator=generator)
    model.requires_grad_(False)
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
