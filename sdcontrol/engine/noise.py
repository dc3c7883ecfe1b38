"""Noise that is a function of (request seed, position, token, stream), and of nothing else.

Counter-based: nothing is drawn in order, so the batch, the drafts and the device do not matter.
Knows nothing of logits, requests or tokens' meaning.

The recipe, in unsigned 64-bit arithmetic that wraps, `>>` shifting in zeros:

    mix(z):  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
             z = (z ^ z >> 27) * 0x94D049BB133111EB
             return z ^ z >> 31
    g      = 0x9E3779B97F4A7C15
    key    = mix(mix(seed + g * (stream + 1)) + g * (position + 1))
    hash   = mix(key + g * (token + 1))
    v      = ((hash >> 12) + 0.5) * 2**-52          in [2**-53, 1 - 2**-53], exact in float64
    gumbel = -log(-log1p(-v))                       float64

`hash` is output number `token + 1` of SplitMix64 (Steele, Lea and Flood 2014) started at `key`;
the integer part is the same on every device, the logarithms within an ulp. 52 random bits make
ties, and orders decided by that ulp, too rare to be seen.
"""

import torch
from torch import Tensor

__all__ = [
    "ACCEPT",
    "DRAFT",
    "RESIDUAL",
    "SYNTHETIC",
    "TARGET",
    "as_int64",
    "derive_seed",
    "gumbel",
    "gumbel_of_keys",
    "row_keys",
    "token_counters",
    "uniform",
    "uniforms",
    "upper_bits",
]

TARGET = 0
"""Stream of the target's own samples; coupled drafters share it."""
ACCEPT = 1
"""Stream of the acceptance test of rejection sampling."""
RESIDUAL = 2
"""Stream of the sample that replaces a rejected draft token."""
DRAFT = 3
"""Stream of a drafter that samples on its own, for rejection sampling."""
SYNTHETIC = 4
"""Stream of made-up acceptances."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """Standard Gumbel noise, float64.

    The three int64 tensors broadcast, all on one device; see the module for the recipe.
    """
    return gumbel_of_keys(row_keys(seeds, positions, stream), token_ids)


def gumbel_of_keys(keys: Tensor, token_ids: Tensor) -> Tensor:
    """`gumbel` where the keys of the rows are known already; both int64, they broadcast."""
    uniforms = upper_bits(keys + token_counters(token_ids)).to(torch.float64)
    return uniforms.add_(0.5).mul_(-(2.0**-52)).log1p_().neg_().log_().neg_()


def row_keys(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """The key under which every token of a row is hashed; int64, broadcast."""
    start = _mix(seeds + as_int64(_GOLDEN * (stream + 1)))
    return _mix(start + (positions + 1) * as_int64(_GOLDEN))


def token_counters(token_ids: Tensor) -> Tensor:
    """What is added to a key before the last `mix`: int64, a function of the token alone."""
    return (token_ids + 1) * as_int64(_GOLDEN)


def upper_bits(keyed_counters: Tensor) -> Tensor:
    """The upper 52 bits of the hash, int64 in [0, 2**52), from key + counter; overwrites those."""
    return _shift_(_mix(keyed_counters), 12)


def uniform(seed: int, position: int, stream: int, token_id: int = 0) -> float:
    """One uniform number strictly between 0 and 1: the `v` of the recipe."""
    start = _mix_int(seed + _GOLDEN * (stream + 1))
    key = _mix_int(start + _GOLDEN * (position + 1))
    return ((_mix_int(key + _GOLDEN * (token_id + 1)) >> 12) + 0.5) * 2.0**-52


def uniforms(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """`uniform` of many, float64. The three int64 tensors broadcast, all on one device."""
    bits = upper_bits(row_keys(seeds, positions, stream) + token_counters(token_ids))
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def derive_seed(seed: int, position: int, stream: int) -> int:
    """Another seed, a function of these three; fits an int64."""
    start = _mix_int(seed + _GOLDEN * (stream + 1))
    return as_int64(_mix_int(start + _GOLDEN * (position + 1)))


def as_int64(bits: int) -> int:
    """The int64 with the same lowest 64 bits: so any integer is a seed."""
    bits &= _MASK
    return bits - (1 << 64) if bits >> 63 else bits


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser; overwrites its argument: at a full vocabulary copies would cost."""
    bits ^= _shift_(bits.clone(), 30)
    bits *= as_int64(_FIRST_FACTOR)
    bits ^= _shift_(bits.clone(), 27)
    bits *= as_int64(_SECOND_FACTOR)
    bits ^= _shift_(bits.clone(), 31)
    return bits


def _shift_(bits: Tensor, places: int) -> Tensor:
    """Shift right in place, zeros coming in; torch's own shift of an int64 copies the sign."""
    bits >>= places
    bits &= (1 << (64 - places)) - 1
    return bits


def _mix_int(bits: int) -> int:
    bits &= _MASK
    bits = (bits ^ bits >> 30) * _FIRST_FACTOR & _MASK
    bits = (bits ^ bits >> 27) * _SECOND_FACTOR & _MASK
    return bits ^ bits >> 31
