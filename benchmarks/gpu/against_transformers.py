"""Part 4: plain decoding against transformers on the same device, in the same run, the same model.

Rivals decode prompts of random tokens, which they prefill; only decoding is timed: by the steps'
own ends, or for `generate_batch` by what more tokens take. Ours decodes from contexts in place.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from transformers import GenerationConfig, StaticCache, StoppingCriteria, StoppingCriteriaList

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoder import DecoderSpec, kv_tokens_for
from benchmarks.gpu.figures import CellFigures, Figure
from benchmarks.gpu.part import Cell, Part
from benchmarks.regret.rig import Arm
from sdcontrol.engine.verify import CoupledVerifier

__all__ = ["PART"]

_VERIFIER = CoupledVerifier()
_TO_GENERATE = 2.0  # at batch 32
_TO_COMPILED = 1.0  # at batch 1
_RIVAL_COPIES = 3  # of KV, with the rivals' caches
_WARM_STEPS = 4
_PAIRS = 3
_RIVAL_PAGE = 256
_BATCHING: Mapping[str, Mapping[str, object]] = {
    "generate_batch": {},
    "generate_batch, graphs and compiled": {"use_cuda_graph": True, "default_compile_level": 1},
}
"""Settings of `ContinuousBatchingConfig`: its own choice, and what is said to be the fastest."""


def cells(bench: Bench) -> list[Cell]:
    """One per batch and context."""
    return [
        Cell(
            f"batch {batch}, context {context}",
            partial(_measure, bench, batch, context),
            bench.lacks(_RIVAL_COPIES * _kv_tokens(bench, batch, context)),
        )
        for batch, context in bench.scale.transformers
    ]


PART = Part(
    4,
    "plain decoding against transformers",
    cells,
    minutes=6.0,
    only_on_a_gpu=(
        "over generate and generate_batch at batch 32, target 2.0",
        "over a decode loop under torch.compile with CUDA graphs at batch 1, target 1.0",
    ),
)


def _measure(bench: Bench, batch: int, context: int) -> CellFigures:
    ours = _ours(bench, batch, context)
    rivals: dict[str, Callable[[], list[float]]] = {
        "generate, dynamic cache": partial(_generate, bench, batch, context, None),
        "compiled loop": partial(_compiled_loop, bench, batch, context),
        "generate, static cache": partial(_generate, bench, batch, context, "static"),
    }
    rivals |= {
        name: partial(_generate_batch, bench, batch, context, settings)
        for name, settings in _BATCHING.items()
    }
    figures, facts = [Figure.of("ours: tokens per second", ours)], dict[str, object]()
    for name, measure in rivals.items():
        skip = _skip(bench, name, batch)
        if skip:
            facts[name] = skip
            continue
        try:
            rates = measure()
        except Exception as error:  # another library's settings on an unknown machine
            facts[name] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            continue
        figures.append(Figure.of(f"{name}: tokens per second", rates))
        ratio = statistics.median(ours) / statistics.median(rates)
        figures.append(Figure(f"ours over {name}", ratio, "x", _target(name, batch)))
    return CellFigures(tuple(figures), facts)


def _skip(bench: Bench, name: str, batch: int) -> str | None:
    if name == "compiled loop" and batch > 1:
        return "measured at batch 1"
    if not bench.is_cuda and name in {*_BATCHING, "generate, static cache"}:
        return "on CUDA only"
    return "out of time" if bench.budget.left < 0 else None


def _target(name: str, batch: int) -> float | None:
    if name == "compiled loop":
        return _TO_COMPILED
    return _TO_GENERATE if batch > 1 else None


def _ours(bench: Bench, batch: int, context: int) -> list[float]:
    """Tokens per second of each turn."""
    room = bench.scale.steps + 16
    spec = DecoderSpec((), _VERIFIER, kv_tokens_for(batch, context, room), batch, room)
    decoder = bench.decoder(spec)
    decoder.prepare(batch, context)
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
        model.generate(  # type: ignore[misc]
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
    """Tokens per second, from the difference between many new tokens and few."""
    from transformers import ContinuousBatchingConfig  # which not every version has

    model, prompts = bench.target(), _prompts(bench, batch, context).tolist()
    few, many = 8, 8 + 4 * bench.scale.steps
    pages = 1 + (context + many) // _RIVAL_PAGE  # of one request
    memory: dict[str, object] = {
        "page_size": _RIVAL_PAGE,
        "num_blocks": 2 * batch * (pages + 1),
        "allow_block_sharing": False,  # every call would find the prompts of the one before
    }

    def seconds(num_tokens: int) -> float:
        config = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(**{**memory, **settings})  # type: ignore[arg-type]
        bench.wait()
        started = time.perf_counter()
        model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
        bench.wait()
        return time.perf_counter() - started

    attention = model.config._attn_implementation
    try:
        seconds(few)
        pairs = [(seconds(few), seconds(many)) for _ in range(_PAIRS)]
    finally:
        model.set_attn_implementation(attention)
    return [batch * (many - few) / (long - short) for short, long in pairs if long > short]


def _compiled_loop(bench: Bench, batch: int, context: int) -> list[float]:
    """The forward compiled with CUDA graphs over a static cache, one token after the other."""
    model, ids = bench.target(), _prompts(bench, batch, context)
    steps = _num_tokens(bench)
    cache = StaticCache(config=model.config, max_cache_len=context + steps + 16)
    forward = model.forward
    if bench.is_cuda:
        forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    ends: list[float] = []
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        for step in range(steps):
            position = torch.tensor([[context + step]], device=bench.device)
            out = forward(token, position_ids=position, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True).clone()
            bench.wait()
            ends.append(time.perf_counter())
    return _rates(ends, batch)


def _rates(ends: list[float], batch: int) -> list[float]:
    """Of the later half of the steps: the first ones compile, record and warm up."""
    later = ends[len(ends) // 2 :]
    return [batch / (end - begin) for begin, end in pairwise(later)]


def _num_tokens(bench: Bench) -> int:
    return 2 * bench.scale.steps + _WARM_STEPS


def _prompts(bench: Bench, batch: int, context: int) -> Tensor:
    generator = torch.Generator(bench.device).manual_seed(0)
    vocabulary = bench.scale.target.vocab_size
    return torch.randint(16, vocabulary, (batch, context), generator=generator, device=bench.device)


def _kv_tokens(bench: Bench, batch: int, context: int) -> int:
    return kv_tokens_for(batch, context, bench.scale.steps + 16)
