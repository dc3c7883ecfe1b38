"""Coupled sampling and verification on the device, by Triton.

    sample   a program per (row of scores, part of the vocabulary), then one per row: reads the
             scores once, vocab * itemsize bytes per row. Two 64-bit multiplications and a float32
             logarithm per entry; the two float64 logarithms of the noise only in blocks where an
             entry could still win, about one block in ten
    walk     a program per request, a few hundred bytes: down the draft to the first rejection;
             what is accepted is what was sampled, or made up beforehand

The noise is that of `noise`, whose integers it shares to the bit. `-log(1 - v)` needs no `log1p`:
`v` has 53 bits, so `1 - v` is exact in float64.

Knows scores, seeds and drafts; nothing of caches or policies. The twins are in `reference_steps`.
"""

# A kernel has no types until it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdcontrol.engine.gumbel_max import INVALID
from sdcontrol.engine.kernels.launching import OPTIONS
from sdcontrol.engine.noise import TARGET

__all__ = [
    "Sampled",
    "reduce_kernel",
    "sample_kernel",
    "sample_scores",
    "walk_drafts",
    "walk_kernel",
]

_BLOCK = 1024  # entries that a program looks at together
_PART = 8 * _BLOCK  # entries of one program, where there are rows enough to keep a device busy
_ENOUGH_PROGRAMS = 256
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
_INVALID = tl.constexpr(INVALID)
_SLACK = tl.constexpr(1e-3)  # more than float32 can be off in the bound of the noise


@triton.jit
def _mix(bits):
    """SplitMix64's finaliser of uint64."""
    bits = (bits ^ (bits >> 30)) * _FIRST_FACTOR
    bits = (bits ^ (bits >> 27)) * _SECOND_FACTOR
    return bits ^ (bits >> 31)


@triton.jit
def _row_key(seed, position, stream):
    start = _mix(seed.to(tl.uint64, bitcast=True) + _GOLDEN * (stream + 1).to(tl.uint64))
    return _mix(start + (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN)


@triton.jit
def _uniform(key, token):
    """The number `v` of the recipe, float64."""
    bits = _mix(key + (token + 1).to(tl.uint64) * _GOLDEN) >> 12
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52


@triton.jit
def _best_of(noisy, token, best, winner):
    """The larger of the running best and a block's; the first of equal ones."""
    top = tl.max(noisy, 0)
    first = tl.min(tl.where(noisy == top, token, 2147483647), 0)
    return tl.maximum(top, best), tl.where(top > best, first, winner)


@triton.jit
def _noisy_block(score, token, key, best, winner):
    """Take in a block of a sampled row, if any entry of it could beat the best so far.

    With `v` the uniform number the noise is at most -log(v), since -log(1 - v) >= v.
    """
    v = _uniform(key, token)
    bound = score.to(tl.float64) - tl.log(v.to(tl.float32)).to(tl.float64) + _SLACK
    if tl.max(bound, 0) > best:
        noisy = score.to(tl.float64) - tl.log(-tl.log(1.0 - v))
        best, winner = _best_of(noisy, token, best, winner)
    return best, winner


@triton.jit(
    do_not_specialize=["stream"],  # of 1 it would make a constant, which `_row_key` cannot take
    do_not_specialize_on_alignment=["seeds", "positions", "is_sampled"],
)
def sample_kernel(  # noqa: PLR0915  (one kernel)
    scores, seeds, positions, is_sampled, bests, winners, tops, totals, row_stride, vocab_size,
    stream, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best entry of one part of one row; and its largest score, with the sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * PART
    key = _row_key(tl.load(seeds + row), tl.load(positions + row), stream)
    with_noise = tl.load(is_sampled + row) != 0
    best = tl.full([], float("-inf"), tl.float64)
    winner = begin
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(begin, tl.minimum(begin + PART, vocab_size), BLOCK):
        token = start + tl.arange(0, BLOCK)
        places = scores + row * row_stride + token
        score = tl.load(places, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        is_number = score == score
        finite_or_more = tl.where(is_number, score, float("inf"))
        new_top = tl.maximum(top, tl.max(finite_or_more, 0))
        base = tl.where(tl.abs(new_top) < float("inf"), new_top, 0.0)
        total = total * tl.exp(tl.minimum(top - base, 0.0))
        total += tl.sum(tl.exp(tl.minimum(finite_or_more - base, 0.0)), 0)
        top = new_top
        if with_noise:
            best, winner = _noisy_block(finite_or_more, token, key, best, winner)
        else:  # argmax: NaN before infinity before numbers
            rank = tl.where(score == float("inf"), 1e300, finite_or_more.to(tl.float64))
            best, winner = _best_of(rank, token, best, winner)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(bests + place, best)
    tl.store(winners + place, winner)
    tl.store(tops + place, top)
    tl.store(totals + place, total)


@triton.jit(do_not_specialize_on_alignment=["is_sampled"])
def reduce_kernel(
    bests, winners, tops, totals, is_sampled, tokens, confidence, PARTS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The best of a row's parts, and the probability of its likeliest entry."""
    row = tl.program_id(0)
    parts = tl.arange(0, PADDED)
    inside = parts < PARTS
    places = row * PARTS + parts
    best = tl.load(bests + places, mask=inside, other=float("-inf"))
    first = tl.min(tl.where((best == tl.max(best, 0)) & inside, parts, PADDED), 0)
    token = tl.load(winners + row * PARTS + first).to(tl.int64)
    top = tl.load(tops + places, mask=inside, other=float("-inf"))
    largest = tl.max(top, 0)
    is_finite = tl.abs(largest) < float("inf")
    total = tl.load(totals + places, mask=inside, other=0.0)
    base = tl.where(is_finite, largest, 0.0)
    total = tl.sum(total * tl.exp(tl.minimum(top - base, 0.0)), 0)
    chance = tl.where(is_finite, 1.0 / tl.where(is_finite, total, 1.0), 0.0)
    is_valid = is_finite | (tl.load(is_sampled + row) == 0)
    tl.store(tokens + row, tl.where(is_valid, token, _INVALID))
    tl.store(confidence + row, chance)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row of scores."""

    tokens: Tensor  # int64 [rows]; `INVALID` where a sampled row has no finite largest score
    confidence: Tensor  # float32 [rows]: the largest probability; 0 where it is not a number


def sample_scores(
    scores: Tensor, seeds: Tensor, positions: Tensor, is_sampled: Tensor, *, stream: int = TARGET
) -> Sampled:
    """The argmax of each row of processed `scores` `[rows, vocab]`, or a sample of its softmax.

    Row `i` is sampled where `is_sampled[i]`, with the noise of (`seeds[i]`, `positions[i]`, token,
    `stream`); seeds and positions are int64 `[rows]`, positions count the tokens before the row's.
    """
    assert scores.stride(1) == 1
    rows, vocab_size = scores.shape
    part = _PART if rows * vocab_size > _ENOUGH_PROGRAMS * _PART else _BLOCK
    num_parts = triton.cdiv(vocab_size, part)
    bests = torch.empty((rows, num_parts), dtype=torch.float64, device=scores.device)
    winners = torch.empty_like(bests, dtype=torch.int32)
    tops = torch.empty_like(bests, dtype=torch.float32)
    totals = torch.empty_like(tops)
    sample_kernel[(rows, num_parts)](
        scores, seeds, positions, is_sampled, bests, winners, tops, totals, scores.stride(0),
        vocab_size, stream, PART=part, BLOCK=_BLOCK, num_warps=4, **OPTIONS,
    )  # fmt: skip
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    confidence = torch.empty(rows, dtype=torch.float32, device=scores.device)
    reduce_kernel[(rows,)](
        bests, winners, tops, totals, is_sampled, tokens, confidence, PARTS=num_parts,
        PADDED=triton.next_power_of_2(num_parts), num_warps=1, **OPTIONS,
    )  # fmt: skip
    return Sampled(tokens, confidence)


@triton.jit(
    do_not_specialize=["verdict_stride"],
    do_not_specialize_on_alignment=[
        "draft_tokens", "parents", "stands", "first_rows", "first_nodes", "num_nodes",
    ],
)  # fmt: skip
def walk_kernel(
    samples, draft_tokens, parents, stands, first_rows, first_nodes, num_nodes, verdicts,
    verdict_stride, IS_GIVEN: tl.constexpr,
):  # fmt: skip
    """Down one draft, as long as a child of the last accepted node stands.

    That is what was sampled there; or, where `IS_GIVEN`, what `stands`.
    """
    request = tl.program_id(0)
    first_row = tl.load(first_rows + request)
    first_node = tl.load(first_nodes + request)
    verdict = verdicts + request * verdict_stride
    node = -1
    depth = 0
    sample = tl.load(samples + first_row)
    for child in range(tl.load(num_nodes + request).to(tl.int32)):
        is_child = tl.load(parents + first_node + child).to(tl.int32) == node
        if IS_GIVEN:
            does_stand = tl.load(stands + first_node + child) != 0
        else:
            does_stand = tl.load(draft_tokens + first_node + child) == sample
        if is_child & does_stand:
            tl.store(verdict + 2 + depth, child)
            node = child
            depth += 1
            sample = tl.load(samples + first_row + 1 + child)
    tl.store(verdict, depth)
    tl.store(verdict + 1, sample)


def walk_drafts(
    samples: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    stands: Tensor | None = None,
    *,
    first_rows: Tensor,
    first_nodes: Tensor,
    num_nodes: Tensor,
    verdicts: Tensor,
) -> None:
    """What of each request's draft is accepted, into `verdicts` int64 `[requests, 2 + nodes]`.

    A row is: how many nodes were accepted, the next token, then the accepted nodes. So one copy
    brings a step's outcome to the host. `samples` `[rows]` are the target's; request `r` owns
    those from `first_rows[r]` on, one for the root and one for each of its `num_nodes[r]` nodes,
    which lie in `draft_tokens` and `parents` (-1: the root) from `first_nodes[r]` on. A node is
    accepted after its parent where it is the sample there, or where `stands[node]`. All int64.
    """
    walk_kernel[(len(num_nodes),)](
        samples, draft_tokens, parents, parents if stands is None else stands, first_rows,
        first_nodes, num_nodes, verdicts, verdicts.stride(0), IS_GIVEN=stands is not None,
        num_warps=1, **OPTIONS,
    )  # fmt: skip
