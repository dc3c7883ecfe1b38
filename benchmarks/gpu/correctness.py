"""Part 0, before any time is taken: attention against float64, verdicts against the host's, texts
against `generate`.

Texts are compared in float32 on a small model, where two ways of adding up hardly ever differ.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoder import check_drafters
from benchmarks.gpu.figures import CellFigures, Figure
from benchmarks.gpu.models import random_llama
from benchmarks.gpu.part import Cell, Part
from sdcontrol.controller import Controller
from sdcontrol.engine.attention import AttentionBackend
from sdcontrol.engine.backends import backend_of, cache_class_of
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.device_step import verify_of
from sdcontrol.engine.drafters.base import Draft
from sdcontrol.engine.kv_cache import KVCache, LayerShape
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.packing import PageTable, Segment, ancestors, pack
from sdcontrol.engine.sampling import RowSampler
from sdcontrol.engine.stats import GraphStats
from sdcontrol.engine.verify import CoupledVerifier, SyntheticVerifier, VerifyTask
from sdcontrol.estimators.shapes import ModelShape

__all__ = ["PART", "exact_attention", "random_step"]

_PAGE = 16
_NUM_BLOCKS = 1280
_LOADS = {
    "decoding": ((3, 70, 511, 130, 1000), (1, 1, 1, 1, 1)),
    "a long context": ((16_389,), (1,)),
    "short drafts": ((3, 70, 511, 1000), (1, 7, 5, 8)),
    "long drafts and trees": ((3, 70, 511, 1000), (1, 16, 9, 12)),
    "with a chunk of a prompt": ((3, 70, 511, 130, 1000), (1, 7, 16, 9, 100)),
}
"""Contexts, and tokens of each request: one, up to 8, up to 17, more, each in a tile of its width."""
_TEXT_SHAPE = ModelShape(
    "text", 2, 256, 4, 2, 64, 512, 3200, weight_bytes=4.0, head_bytes=4.0, kv_bytes=4.0
)
_ARMS = ("off", "static:ngram:4", "static:sparse_kv:64:4", "static:draft_model:4", "goodput")


def cells(bench: Bench) -> list[Cell]:
    """What time is taken of comes first, the cheapest before the rest; float32 comes last."""
    skip = None if bench.is_cuda else "kernels and graphs are CUDA's"
    in_model, *others = [
        Cell(f"attention, {_name(dtype)}", partial(_attention, bench, dtype), seconds=20.0)
        for dtype in dict.fromkeys((bench.dtype, torch.float32))
    ]
    return [
        in_model,
        Cell("verdicts against the host's", partial(_verdicts, bench), None, skip, seconds=10.0),
        Cell("texts against generate", partial(_texts, bench), seconds=30.0),
        Cell("graphs against eager", partial(_graphs, bench), None, skip, seconds=60.0),
        *others,
    ]


PART = Part(
    0,
    "correctness",
    cells,
    minutes=2.0,
    only_on_a_gpu=("the Triton kernels on a device, and graphs against eager",),
)


def exact_attention(
    query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float
) -> Tensor:
    """One segment in float64 `[tokens, heads, dim]`; `keys` `[kv_heads, slots, dim]` of a layer."""
    length, total = len(segment.tokens), segment.start + len(segment.tokens)
    slots = (segment.table.blocks[:, None] * _PAGE + np.arange(_PAGE)).reshape(-1)[:total]
    index = torch.from_numpy(slots).to(keys.device)
    group = query.shape[0] // keys.shape[0]
    k, v = (t[:, index].double().repeat_interleave(group, dim=0) for t in (keys, values))
    seen = np.ones((length, total), dtype=bool)
    if segment.parents is None:
        seen[:, segment.start :] = np.tril(np.ones((length, length), dtype=bool))
    else:
        seen[:, segment.start :] = False
        seen[:, segment.start] = True
        seen[1:, segment.start + 1 :] = ancestors(segment.parents)
    scores = query.double() @ k.transpose(1, 2) * scale
    scores.masked_fill_(~torch.from_numpy(seen).to(keys.device), float("-inf"))
    return (scores.softmax(dim=-1) @ v).transpose(0, 1)


def _attention(bench: Bench, dtype: torch.dtype) -> CellFigures:
    """Every width of tile that the other parts time, over pages out of order: the worst of all."""
    shape = bench.scale.target
    layer = LayerShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim, dtype)
    backend = backend_of("auto", [layer], bench.device)
    cache: KVCache = cache_class_of(backend)(
        [layer], num_blocks=_NUM_BLOCKS, block_size=_PAGE, device=bench.device
    )
    generator = torch.Generator(bench.device).manual_seed(0)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.normal_(generator=generator)
    errors = {
        name: _attention_error(backend, cache, _segments(*loads), generator)
        for name, loads in _LOADS.items()
    }
    most = max(2 * torch.finfo(dtype).eps, 1e-5)
    worst = Figure("largest error", max(errors.values()), "", most, is_ceiling=True)
    each = (Figure(f"largest error, {name}", error) for name, error in errors.items())
    return CellFigures((worst, *each), {"backend": type(backend).__name__})


def _attention_error(
    backend: AttentionBackend,
    cache: KVCache,
    segments: list[Segment],
    generator: torch.Generator,
) -> float:
    """The largest difference from float64, as a share of the largest output."""
    layer, device = cache.layers[0], cache.keys[0].device
    batch = pack(segments, _PAGE, device)
    in_order = [member for group in batch.groups for member in group.members]
    tokens = batch.input_ids.shape[1]
    query = torch.empty(tokens, layer.num_heads, layer.key_dim, dtype=layer.dtype, device=device)
    query = query.normal_(generator=generator).transpose(0, 1)
    scale = layer.key_dim**-0.5
    out = backend.attend(0, query, cache, batch, scale)
    parts = query.split([len(segment.tokens) for segment in in_order], dim=1)
    exact = torch.cat(
        [
            exact_attention(part, cache.keys[0], cache.values[0], segment, scale)
            for part, segment in zip(parts, in_order, strict=True)
        ]
    )
    return float((out.double() - exact).abs().max() / exact.abs().max())


def _segments(contexts: Sequence[int], lengths: Sequence[int]) -> list[Segment]:
    """Drafts of 9 tokens are trees."""
    rng = np.random.default_rng(0)
    pages = iter(rng.permutation(np.arange(1, _NUM_BLOCKS)))
    segments = []
    for context, length in zip(contexts, lengths, strict=True):
        count = -(-(context + length) // _PAGE)
        table = PageTable(np.array([next(pages) for _ in range(count)], dtype=np.int64))
        is_tree = length == 9
        parents = tuple(int(rng.integers(-1, node)) for node in range(length - 1))
        segments.append(
            Segment([1] * length, context, table, [0] * length, 1, parents if is_tree else None)
        )
    return segments


def _verdicts(bench: Bench) -> CellFigures:
    """Greedy and sampled rows of the model's vocabulary; chains and trees that are often right."""
    logits, tasks = random_step(bench.scale.target.vocab_size, bench.dtype)
    figures = []
    for name, verifier in (("coupled", CoupledVerifier()), ("synthetic", SyntheticVerifier(0.7))):
        ours = verify_of(verifier, has_kernels=True)(logits.to(bench.device), tasks).read()
        pairs = zip(ours, verifier.verify(logits, tasks), strict=True)
        differing = sum(verdict != expected for verdict, expected in pairs)
        figures.append(Figure(f"{name}: verdicts that differ", differing, "", 0, is_ceiling=True))
    return CellFigures(tuple(figures), {"compared": len(tasks)})


def random_step(vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, list[VerifyTask]]:
    """Logits of 32 requests, and what they drafted."""
    rng = np.random.default_rng(0)
    tasks: list[VerifyTask] = []
    first_row = 0
    for request in range(32):
        num_nodes, is_tree = int(rng.integers(0, 9)), request % 4 == 3
        parents = [int(rng.integers(-1, n)) if is_tree else n - 1 for n in range(num_nodes)]
        draft = Draft(tuple(rng.integers(0, 3, num_nodes).tolist()), tuple(parents))
        sampler = RowSampler(do_sample=request % 2 == 1, seed=request)
        tasks.append(VerifyTask(sampler, [1] * (request + 4), draft, first_row, "drafter"))
        first_row += 1 + num_nodes
    logits = torch.randn(first_row, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[:, :3] += 10.0  # most of the weight is on the tokens that are drafted
    return logits.to(dtype), tasks


def _texts(bench: Bench) -> CellFigures:
    """Every arm, all requests at once, against one `generate` per request."""
    model, prompts = _model(bench), _prompts()
    expected = [_generate(model, prompt, bench.scale.text_tokens) for prompt in prompts]
    figures = []
    for arm in _ARMS:
        texts, _ = _decode(bench, model, prompts, arm)
        differing = sum(text != other for text, other in zip(texts, expected, strict=True))
        figures.append(Figure(f"{arm}: texts that differ", differing, "", 0, is_ceiling=True))
    return CellFigures(tuple(figures), {"compared": len(prompts)})


def _graphs(bench: Bench) -> CellFigures:
    """With layers compiled. Raises `RuntimeError` where a capture failed: eager would be compared with itself."""
    model, prompts = _model(bench), _prompts()
    figures, used = [], {}
    for arm in _ARMS:
        texts, graphs = _decode(bench, model, prompts, arm, compile_layers=bench.is_cuda)
        if not graphs.captured or "capture failed" in graphs.eager:
            raise RuntimeError(f"{arm}: {graphs.captured} graphs, forwards without: {graphs.eager}")
        eager, _ = _decode(bench, model, prompts, arm, cuda_graphs=False)
        differing = sum(text != other for text, other in zip(texts, eager, strict=True))
        figures.append(Figure(f"{arm}: texts that differ", differing, "", 0, is_ceiling=True))
        used[arm] = asdict(graphs)
    return CellFigures(tuple(figures), {"graphs": used})


def _decode(
    bench: Bench,
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    arm: str,
    **settings: bool,
) -> tuple[list[list[int]], GraphStats]:
    """Texts, and what came of graphs. The model drafts for itself, so that drafts are accepted."""
    engine = Engine(
        model,
        drafters={"ngram": "ngram", "sparse_kv:64": "sparse_kv:64", "draft_model": model},
        planner=Controller(arm),
        config=EngineConfig(kv_tokens=1 << 13, **settings),
    )
    with engine:
        ids = [
            engine.submit(prompt, max_new_tokens=bench.scale.text_tokens, do_sample=False)
            for prompt in prompts
        ]
        finished = engine.run()
    check_drafters(engine)
    return [finished[name].output for name in ids], engine.stats.graphs


def _generate(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(  # type: ignore[misc]  # transformers hides its type
        ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _model(bench: Bench) -> LlamaForCausalLM:
    return random_llama(_TEXT_SHAPE, device=bench.device, dtype=torch.float32, seed=3)


def _prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(16, 3000) for _ in range(length)] * 2 for length in (9, 40, 64, 121)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
