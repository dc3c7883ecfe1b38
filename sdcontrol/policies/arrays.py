"""Array idioms that are fast for eight requests and for hundreds. Knows nothing of speculation."""

from functools import cache

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.policies.problem import IntArray

__all__ = ["NARROW", "column", "counting", "greatest", "least", "ones", "running", "total"]

NARROW = 48  # columns up to which numpy's own accumulate and reduceat are the faster way

total = np.add.reduce
greatest = np.maximum.reduce
least = np.minimum.reduce


@cache
def counting(count: int) -> IntArray:
    """0, 1, ..., count - 1. Shared: do not write to it."""
    return np.arange(count)


@cache
def column(count: int) -> IntArray:
    """0, 1, ..., count - 1 as `[count, 1]`. Shared: do not write to it."""
    return np.arange(count)[:, None]


@cache
def ones(count: int, weight: float = 1.0) -> FloatArray:
    """`count` times `weight`. Shared: do not write to it."""
    return np.full(count, weight)


def running(of: np.ufunc, values: FloatArray) -> FloatArray:
    """`of.accumulate` over the last axis but one, in place."""
    if values.shape[-1] < NARROW:
        of.accumulate(values, axis=-2, out=values)
    else:
        for n in range(1, values.shape[-2]):
            of(values[..., n, :], values[..., n - 1, :], out=values[..., n, :])
    return values
