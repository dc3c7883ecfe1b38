"""Samples of softmax(scores) as the argmax of scores plus Gumbel noise.

Knows nothing of requests or drafts. On a device the noise is made for every entry; on a CPU only
where it could decide, with the same result.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sdcontrol.engine.copies import upload
from sdcontrol.engine.noise import gumbel_of_keys, row_keys, token_counters, upper_bits

__all__ = ["INVALID", "dense_gumbel_argmax", "greedy_argmax", "gumbel_argmax"]

INVALID = -1
"""Stands for "nothing can be sampled here" until the tokens have left the device."""

_CHUNK = 1 << 17  # entries at a time on a CPU: what it works on stays in its cache
_SPARSE = 8  # fewer than one possible token in so many: look at those alone
_SLACK = 1.0001  # covers the rounding of float32 in a bound, generously


def greedy_argmax(scores: Tensor) -> Tensor:
    """The first of the largest entries of each row of `scores` `[n, vocab]`; int64 `[n]`."""
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    # numpy's is 20 times as fast as torch's here; same rule for ties and NaN.
    return torch.from_numpy(scores.detach().float().numpy().argmax(axis=-1))


def gumbel_argmax(
    scores: Tensor, seeds: Sequence[int], positions: Sequence[int], stream: int
) -> Tensor:
    """A sample of softmax(scores) per row, int64 `[n]`, by the Gumbel-max rule.

    Row `i` of `scores` `[n, vocab]` uses the noise of (`seeds[i]`, `positions[i]`, token,
    `stream`). `INVALID` where the largest score of a row is not finite.
    """
    where = upload(np.array([seeds, positions], dtype=np.int64), scores.device)
    keys = row_keys(where[0], where[1], stream)
    if scores.device.type != "cpu":
        tokens = dense_gumbel_argmax(scores, keys)
    else:
        rows_at_once = max(_CHUNK // scores.shape[1], 1)
        parts = zip(scores.split(rows_at_once), keys.split(rows_at_once), strict=True)
        tokens = torch.cat([_gumbel_argmax_where_needed(*part) for part in parts])
    return tokens.masked_fill(~scores.amax(dim=-1).isfinite(), INVALID)


def dense_gumbel_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """The rule as it is written, for rows with a finite largest score."""
    token_ids = torch.arange(scores.shape[1], device=scores.device)
    return gumbel_of_keys(keys[:, None], token_ids).add_(scores).argmax(dim=-1)


def _gumbel_argmax_where_needed(scores: Tensor, keys: Tensor) -> Tensor:
    possible = scores > -torch.inf
    if int(possible.count_nonzero()) * _SPARSE >= scores.numel():
        possible = _could_win(scores, keys)
    flat = torch.from_numpy(np.flatnonzero(possible.numpy()))
    rows = flat // scores.shape[1]
    token_ids = flat - rows * scores.shape[1]
    noisy = gumbel_of_keys(keys[rows], token_ids).add_(scores[rows, token_ids])
    best = torch.full((len(scores),), -torch.inf, dtype=torch.float64)
    best.scatter_reduce_(0, rows, noisy, "amax")
    winners = noisy == best[rows]
    return torch.zeros_like(keys).scatter_(0, rows[winners], token_ids[winners])


def _could_win(scores: Tensor, keys: Tensor) -> Tensor:
    """Where score + noise could be the row's largest: everywhere else it is shown not to be.

    With v the uniform number, gumbel = -log(-log(1 - v)) <= -log(v). So an entry that reaches what
    the row's largest score has with its own noise, `reached`, has v <= exp(score - reached). That
    test needs neither logarithm and no float64. The largest score is taken off first: a low
    temperature makes scores so large that float32 has no digits left for the noise.
    """
    top = greedy_argmax(scores)[:, None]
    noise = gumbel_of_keys(keys[:, None], top).float()
    bits = _hash_rows(keys, scores.shape[1])
    behind = scores - scores.gather(1, top)
    most = behind.sub_(noise).exp_().mul_(_SLACK * 2.0**52).add_(1.0)
    return bits.float() <= most


def _hash_rows(keys: Tensor, vocab_size: int) -> Tensor:
    """The upper 52 bits of every hash, `[n, vocab]`."""
    return upper_bits(keys[:, None] + _counters(vocab_size))


@lru_cache(maxsize=8)
def _counters(vocab_size: int) -> Tensor:
    return token_counters(torch.arange(vocab_size))
