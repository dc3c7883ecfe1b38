"""The two models: their sizes, how they are made, run and written.

Knows nothing of data or of training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from sdcontrol.engine.bundled.batches import EOS_ID, VOCABULARY
from sdcontrol.engine.renamed import CACHE

DTYPE = torch.bfloat16  # of the weights as shipped


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model; heads are 64 wide."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int


TARGET = Shape(hidden=256, layers=8, heads=4, kv_heads=2, feed_forward=640)
# Much shallower than the target: on small machines the cost of a token goes with depth.
DRAFT = Shape(hidden=128, layers=2, heads=2, kv_heads=1, feed_forward=352)
TINY = Shape(hidden=64, layers=1, heads=1, kv_heads=1, feed_forward=64)


def build(shape: Shape, seed: int) -> LlamaForCausalLM:
    """An untrained model in fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return LlamaForCausalLM(config)


def logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """The fp32 logits `[rows, length, vocabulary]` that follow each token of `ids`."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return functional.linear(hidden, model.lm_head.weight).float()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the configuration and a bf16 copy of the weights; a file is there in full, or as it was before."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as written:
        moved(copy, DTYPE).save_pretrained(written)
        for path in Path(written).iterdir():
            os.replace(path, folder / path.name)


def load(folder: Path, dtype: torch.dtype = DTYPE) -> LlamaForCausalLM:
    """What `save` wrote, ready to run."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.train(mode=False)
    return model


def moved(model: LlamaForCausalLM, where: str | torch.device | torch.dtype) -> LlamaForCausalLM:
    """The model on a device or in a type. Only here because transformers' own `to` has no types."""
    return model.to(where)  # type: ignore[arg-type, no-any-return, unused-ignore]  # by version of transformers


@torch.no_grad()
def continue_greedily(model: LlamaForCausalLM, prompts: list[list[int]], tokens: int) -> Tensor:
    """The next `tokens` tokens of every prompt, `[prompts, tokens]`, also after `<|eos|>`."""
    longest = max(map(len, prompts))
    # Padding on the left shifts all positions of a row alike: rotary embeddings see no difference.
    fresh = torch.tensor([[EOS_ID] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    cache, found = None, list[Tensor]()
    for _ in range(tokens):
        answer = model(
            input_ids=fresh,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: cache},
        )
        cache, fresh = answer[CACHE], answer.logits[:, -1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(fresh)], dim=1)
        found.append(fresh)
    return torch.cat(found, dim=1)
