"""Part 4: plain decoding against transformers on the same device, in the same run, the same model.

Rivals decode prompts of random tokens, which they prefill; only decoding is timed, by when steps
had ended, in the later half of a call. Ours decodes from contexts in place, anew beside each rival.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
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
from benchmarks.gpu.decoder import Decoder, DecoderSpec, kv_tokens_for
from benchmarks.gpu.figures import CellFigures, Figure
from benchmarks.gpu.part import Cell, Part
from benchmarks.regret.rig import Arm
from sdcontrol.engine.verify import CoupledVerifier

__all__ = ["PART", "BatchedOutput", "decoding_rate", "static_loop", "token_times"]

_VERIFIER = CoupledVerifier()
_TO_GENERATE = 2.0  # at batch 32
_TO_COMPILED = 1.0  # at batch 1
_RIVAL_COPIES = 3  # of KV, with the rivals' caches
_WARM_STEPS = 4
_CALLS = 3  # of generate_batch, after one that compiles
_STRIDE = 8  # steps between two looks at the clock, where nobody has to wait for each
_RIVAL_PAGE = 256
_RIVAL_TOKENS = 8192  # of one of its forwards; some versions would go by free memory
_FEWEST_PAGES = 64  # with fewer its warm-up, of as many tokens, is given up
_COMPILED_LOOP, _STATIC_CACHE = "compiled loop", "generate, static cache"
_BATCHING_FASTEST = "generate_batch, graphs and compiled"
_BATCHING: Mapping[str, Mapping[str, object]] = {
    "generate_batch": {},
    _BATCHING_FASTEST: {"use_cuda_graph": True, "default_compile_level": 1},
}
"""Settings of `ContinuousBatchingConfig`: its own choice, and what is said to be the fastest."""


class BatchedOutput(Protocol):
    """What `generate_batch` gives for a request, as far as it matters here."""

    error: str | None
    generated_tokens: list[int]
    timestamps: list[float] | None


def cells(bench: Bench) -> list[Cell]:
    """One per batch, context and rival, so that none costs another."""
    return [
        Cell(
            f"batch {batch}, context {context}, {name}",
            partial(_measure, bench, batch, context, name, rival),
            bench.need(_RIVAL_COPIES * _kv_tokens(bench, batch, context)),
            _skip(bench, name),
        )
        for batch, context in bench.scale.transformers
        for name, rival in _rivals(bench, batch, context).items()
    ]


PART = Part(
    4,
    "plain decoding against transformers",
    cells,
    minutes=8.0,  # most of it compiles
    only_on_a_gpu=(
        "over generate and generate_batch at batch 32, target 2.0",
        "over a decode loop under torch.compile with CUDA graphs at batch 1, target 1.0",
    ),
)


def _measure(
    bench: Bench, batch: int, context: int, name: str, rival: Callable[[], list[float]]
) -> CellFigures:
    if bench.is_cuda:
        torch.compiler.reset()  # what was compiled for other shapes would be made dynamic
    decoder = _open(bench, batch, context)
    ours, theirs = _ours(bench, decoder), rival()
    ratio = statistics.median(ours) / statistics.median(theirs)
    return CellFigures(
        (
            Figure.of("ours: tokens per second", ours),
            Figure.of(f"{name}: tokens per second", theirs),
            Figure(f"ours over {name}", ratio, "x", _target(name, batch)),
        ),
        {"graphs": asdict(decoder.graphs)},
    )


def _rivals(bench: Bench, batch: int, context: int) -> dict[str, Callable[[], list[float]]]:
    """By name, tokens per second of a rival; at batch 1 the one with a target first."""
    load = (bench, batch, context)
    compiled = {_COMPILED_LOOP: partial(_compiled_loop, *load)} if batch == 1 else {}
    return {
        **compiled,
        "generate, dynamic cache": partial(_generate, *load, None),
        **{name: partial(_generate_batch, *load, each) for name, each in _BATCHING.items()},
        _STATIC_CACHE: partial(_generate, *load, "static"),
    }


def _skip(bench: Bench, name: str) -> str | None:
    is_cuda_only = name in {_BATCHING_FASTEST, _STATIC_CACHE}
    return "on CUDA only" if is_cuda_only and not bench.is_cuda else None


def _target(name: str, batch: int) -> float | None:
    if name == _COMPILED_LOOP:
        return _TO_COMPILED
    return _TO_GENERATE if batch > 1 else None


def _open(bench: Bench, batch: int, context: int) -> Decoder:
    room = bench.scale.steps + 16
    spec = DecoderSpec((), _VERIFIER, kv_tokens_for(batch, context, room), batch, room)
    decoder = bench.decoder(spec)
    decoder.prepare(batch, context)
    return decoder


def _ours(bench: Bench, decoder: Decoder) -> list[float]:
    """Tokens per second of each turn."""
    arm = Arm("off", "off")
    decoder.turn(arm, steps=2)
    return [decoder.turn(arm, steps=bench.scale.steps).rate for _ in range(bench.scale.blocks)]


class _Stamps(StoppingCriteria):
    """When each step had ended; never stops."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.ends: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **keywords: object) -> Tensor:
        self._bench.wait()
        self.ends.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _generate(bench: Bench, batch: int, context: int, cache: str | None) -> list[float]:
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
    bench: Bench, batch: int, context: int, settings: Mapping[str, object]
) -> list[float]:
    """Tokens per second while all requests decode, by when each token was there.

    Raises where a request failed: the call itself only logs that.
    """
    from transformers import ContinuousBatchingConfig  # which not every version has

    model, prompts = bench.target(), _prompts(bench, batch, context).tolist()
    num_tokens = 2 * _num_tokens(bench)  # prompts may begin one after the other
    pages = 1 + (context + num_tokens) // _RIVAL_PAGE  # of one request
    config = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    memory: dict[str, object] = {
        _page_setting(ContinuousBatchingConfig): _RIVAL_PAGE,
        "num_blocks": max(2 * batch * (pages + 1), _FEWEST_PAGES),
        "max_batch_tokens": _RIVAL_TOKENS,
        "allow_block_sharing": False,  # every call would find the prompts of the one before
    }
    rates: list[float] = []
    attention = model.config._attn_implementation
    try:
        for call in range(1 + _CALLS):
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
    finally:
        model.set_attn_implementation(attention)
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
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens = [logits[:, -1].argmax(-1, keepdim=True)]
        for step, position in enumerate(positions):
            out = forward(tokens[-1], position_ids=position, past_key_values=cache, use_cache=True)
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


def _kv_tokens(bench: Bench, batch: int, context: int) -> int:
    return kv_tokens_for(batch, context, bench.scale.steps + 16)
