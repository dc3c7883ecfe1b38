"""How transformers decodes: every rival of part 4, with tokens per second as its result.

Rivals decode prompts of random tokens, which they prefill; only decoding is timed, by when steps
had ended, in the later half of a call. Knows transformers; nothing of our engine or of cells.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from benchmarks.gpu.bench import Bench
from sdcontrol.engine.renamed import CACHE

__all__ = ["BATCHED", "BATCHED_COMPILED", "COMPILED_LOOP", "DYNAMIC", "STATIC", "BatchedOutput",
           "Rival", "attention_used", "decoding_rate", "static_loop", "token_times"]  # fmt: skip

_WARM_STEPS = 4
_STRIDE = 8  # steps between two looks at the clock, where nobody has to wait for each
_PAGE = 256
_MOST_TOKENS = 8192  # of one forward; some versions would go by free memory
_FEWEST_PAGES = 64  # with fewer `generate_batch` gives up its warm-up, of as many tokens


@dataclass(frozen=True, slots=True)
class Rival:
    """A way to decode."""

    name: str
    rates: Callable[[Bench, int, int], list[float]]  # of a batch and context: tokens per second
    seconds: float  # that its cell takes on a GPU, about; most of it compiles
    is_cuda_only: bool = False


class BatchedOutput(Protocol):
    """What `generate_batch` gives for a request, as far as it matters here."""

    error: str | None
    generated_tokens: list[int]
    timestamps: list[float] | None


@contextmanager
def attention_used(model: LlamaForCausalLM) -> Iterator[list[str]]:
    """Names of the attention that the model has inside, its own first; afterwards that is put back.

    `generate_batch` may take another one for a call.
    """
    names = [str(model.config._attn_implementation)]
    change = model.set_attn_implementation

    def noted(name: str, *others: object, **options: object) -> None:
        names.append(name)
        change(name, *others, **options)  # type: ignore[arg-type]  # whatever it takes

    model.set_attn_implementation = noted  # type: ignore[assignment, method-assign]  # to note what is set
    try:
        yield names
    finally:
        del model.set_attn_implementation
        model.set_attn_implementation(names[0])


class _Stamps(StoppingCriteria):
    """When each step had ended; never stops."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.ends: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **keywords: object) -> Tensor:
        self._bench.wait()
        self.ends.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _generate(bench: Bench, batch: int, context: int, *, cache: str | None) -> list[float]:
    """Tokens per second of each step, after a first call that compiles."""
    model, ids = bench.target(), _prompts(bench, batch, context)
    for _ in range(2):
        stamps = _Stamps(bench)
        model.generate(  # type: ignore[misc]  # transformers hides its type
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=_num_tokens(bench),
            cache_implementation=cache,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
    return _rates(stamps.ends, batch)


def _generate_batch(
    bench: Bench, batch: int, context: int, *, settings: Mapping[str, object], calls: range
) -> list[float]:
    """Tokens per second while all requests decode, by when each token was there: of every call but
    call 0, which compiles on the way.

    Raises where a request failed: the call itself only logs that.
    """
    from transformers import ContinuousBatchingConfig  # which not every version has

    model, prompts = bench.target(), _prompts(bench, batch, context).tolist()
    num_tokens = 2 * _num_tokens(bench)  # prompts may begin one after the other
    pages = 1 + (context + num_tokens) // _PAGE  # of one request
    config = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    memory: dict[str, object] = {
        _page_setting(ContinuousBatchingConfig): _PAGE,
        "num_blocks": max(2 * batch * (pages + 1), _FEWEST_PAGES),
        "max_batch_tokens": _MOST_TOKENS,
        "allow_block_sharing": False,  # every call would find the prompts of the one before
    }
    rates: list[float] = []
    for call in calls:
        batching = ContinuousBatchingConfig(**{**memory, **settings})  # type: ignore[arg-type]  # keywords of several types
        outputs = model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=batching,
            record_timestamps=True,
            progress_bar=False,
        )
        ends = token_times(outputs, batch, num_tokens)
        rates += [decoding_rate(ends)] if call else []
    return rates


def _page_setting(config: type) -> str:
    """What it calls the tokens of a page; once they were those of a block."""
    return "page_size" if "page_size" in signature(config).parameters else "block_size"


def token_times(
    outputs: Mapping[str, BatchedOutput], batch: int, num_tokens: int
) -> list[list[float]]:
    """By request, when each token was there; raises `RuntimeError` where some are missing."""
    found = list(outputs.values())
    errors = sorted({output.error for output in found if output.error})
    whole = [output for output in found if len(output.generated_tokens) == num_tokens]
    times = [output.timestamps for output in whole if output.timestamps]
    if len(times) < batch:
        raise RuntimeError(f"{len(times)} of {batch} requests are whole; {errors or 'no error'}")
    return times


def decoding_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second from when the last request is half done until the first one ends."""
    begin = max(own[len(own) // 2] for own in times)
    end = min(own[-1] for own in times)
    if end <= begin:
        raise RuntimeError("requests did not decode together; give more new tokens")
    return sum(begin < at <= end for own in times for at in own) / (end - begin)


def _compiled_loop(bench: Bench, batch: int, context: int) -> list[float]:
    """The forward compiled with CUDA graphs over a static cache, one token after the other."""
    model, ids = bench.target(), _prompts(bench, batch, context)
    forward = model.forward
    if bench.is_cuda:
        forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    stride = 1 if bench.scale.is_small else _STRIDE
    ends: list[float] = []

    def step_done(step: int) -> None:
        if step % stride == 0:
            bench.wait()
            ends.append(time.perf_counter())

    static_loop(model, forward, ids, _num_tokens(bench), step_done)
    return _rates(ends, stride * batch)


def static_loop(
    model: LlamaForCausalLM,
    forward: Callable[..., CausalLMOutputWithPast],
    ids: Tensor,
    steps: int,
    step_done: Callable[[int], None],
) -> list[Tensor]:
    """Greedy tokens `[batch, 1]` after `ids`, each by one call of `forward`, the model's own."""
    context = ids.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=context + steps + 16)
    positions = torch.arange(context, context + steps, device=ids.device).view(-1, 1, 1)
    with torch.no_grad():
        logits = model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits
        tokens = [logits[:, -1].argmax(-1, keepdim=True)]
        for step, position in enumerate(positions):
            out = forward(tokens[-1], position_ids=position, use_cache=True, **{CACHE: cache})
            tokens.append(out.logits[:, -1].argmax(-1, keepdim=True).clone())
            step_done(step)
    return tokens


def _rates(ends: list[float], tokens: int) -> list[float]:
    """Of the later half: what comes first compiles, records and warms up."""
    later = ends[len(ends) // 2 :]
    return [tokens / (end - begin) for begin, end in pairwise(later)]


def _num_tokens(bench: Bench) -> int:
    return 2 * bench.scale.steps + _WARM_STEPS


def _prompts(bench: Bench, batch: int, context: int) -> Tensor:
    generator = torch.Generator(bench.device).manual_seed(0)
    vocabulary = bench.scale.target.vocab_size
    return torch.randint(16, vocabulary, (batch, context), generator=generator, device=bench.device)


DYNAMIC = Rival("generate, dynamic cache", partial(_generate, cache=None), 20.0)
STATIC = Rival(
    "generate, static cache", partial(_generate, cache="static"), 75.0, is_cuda_only=True
)
COMPILED_LOOP = Rival("compiled loop", _compiled_loop, 75.0)
BATCHED = Rival("generate_batch", partial(_generate_batch, settings={}, calls=range(4)), 30.0)
"""With its own choice of settings."""

BATCHED_COMPILED = Rival(
    "generate_batch, graphs and compiled",
    partial(
        _generate_batch,
        settings={"use_cuda_graph": True, "default_compile_level": 1},
        calls=range(1, 2),  # one: each compiles before it begins
    ),
    200.0,
    is_cuda_only=True,
)
"""With the settings that are said to be the fastest."""
