"""The average acceptance of each drafter arm, by bucket of hint and position.

Knows nothing of single requests: weighted counts in, odds out. A rate is a ratio of counts, shrunk
from the position to its bucket and from there to the prior.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sdcontrol.core import FloatArray, family_of
from sdcontrol.estimators.hints import NUM_BUCKETS, prior_rates

__all__ = ["ArmAverages"]

IntArray = NDArray[np.intp]

_PRIOR_ACCEPTANCE = 0.65
_FAMILY_PRIORS = {"sparse_kv": 0.85}  # a model agrees with itself: MagicDec, table 3, has 0.84
_SHRINK_TOKENS = 4.0  # tokens that the coarser level is worth
_MEMORY_TOKENS = 400.0  # tokens per cell, after which it forgets
_SETTLED_COUNTS = 64  # since the last new arm, before counts wait for one another
_EVERY = 4


class ArmAverages:
    """Counts and odds, both `[arms, NUM_BUCKETS, K]`; arm 0 is one that was never seen.

    A family with a prior of its own has a row under its name, for its arms that were never seen.

    Chains are counted by position, given that the positions before were accepted; arms that
    `become_tree` by node, given nothing.
    """

    def __init__(self, depth: int, prior: Mapping[str, float]) -> None:
        self._depth = depth
        self.index_of: dict[str, int] = {}
        self.tested: FloatArray = np.zeros((1, NUM_BUCKETS, depth))
        self.accepted: FloatArray = np.zeros((1, NUM_BUCKETS, depth))
        self._waiting: list[tuple[IntArray, FloatArray, FloatArray]] = []
        self._num_counted = 0
        self._prior: FloatArray = self._chain_prior(_PRIOR_ACCEPTANCE)
        self.odds: FloatArray = self._shrunk_odds()
        for arm, acceptance in {**_FAMILY_PRIORS, **prior}.items():
            self.add(arm, acceptance)

    @property
    def num_arms(self) -> int:
        """Arms that there is room for, the unseen one included."""
        return len(self.tested)

    def index(self, arm: str) -> int:
        """Where `arm` is; if it was never seen, where its family is, or 0."""
        index = self.index_of.get(arm)
        return self.index_of.get(family_of(arm), 0) if index is None else index

    def add(self, arm: str, acceptance: float | None = None) -> None:
        """Room for one more arm, with its family's prior unless `acceptance` is given."""
        if acceptance is None:
            acceptance = _FAMILY_PRIORS.get(family_of(arm), _PRIOR_ACCEPTANCE)
        self._start_over()
        self.index_of[arm] = self.num_arms
        blank = np.zeros((1, NUM_BUCKETS, self._depth))
        self.tested = np.concatenate([self.tested, blank])
        self.accepted = np.concatenate([self.accepted, blank])
        self._prior = np.concatenate([self._prior, self._chain_prior(acceptance)])
        self.odds = self._shrunk_odds()

    def become_tree(self, arm: str) -> None:
        """Count `arm` by node from now on; its deeper nodes are assumed rarer."""
        self._start_over()
        index = self.index_of[arm]
        self.tested[index] = self.accepted[index] = 0.0
        self._prior[index] = np.cumprod(self._prior[index], axis=1)
        self.odds = self._shrunk_odds()

    def count(
        self, cells: tuple[IntArray, IntArray], tested: FloatArray, accepted: FloatArray
    ) -> None:
        """Add weighted outcomes, `[entries, K]`, to the (arm, bucket) cells, `[entries]` each."""
        width = self._depth
        base = (cells[0] * NUM_BUCKETS + cells[1])[:, None] * width + np.arange(width)
        self._waiting.append((base.ravel(), tested.ravel(), accepted.ravel()))
        self._num_counted += 1
        if self._num_counted <= _SETTLED_COUNTS or len(self._waiting) >= _EVERY:
            self._absorb()

    def _start_over(self) -> None:
        """Let no count wait across a change of the arms, nor for a while after it."""
        if self._waiting:
            self._absorb()
        self._num_counted = 0

    def _absorb(self) -> None:
        """Add what waits to the counts, and forget what exceeds the memory."""
        where, tested, accepted = map(np.concatenate, zip(*self._waiting, strict=True))
        self._waiting.clear()
        size, shape = self.tested.size, self.tested.shape
        self.tested += np.bincount(where, tested, size).reshape(shape)
        self.accepted += np.bincount(where, accepted, size).reshape(shape)
        if self.tested.max() > _MEMORY_TOKENS:
            fade = np.minimum(1.0, _MEMORY_TOKENS / np.maximum(self.tested, 1.0))
            self.tested *= fade
            self.accepted *= fade
        self.odds = self._shrunk_odds()

    def _chain_prior(self, acceptance: float) -> FloatArray:
        return np.repeat(prior_rates(acceptance)[None, :, None], self._depth, axis=2)

    def _shrunk_odds(self) -> FloatArray:
        prior, pull = self._prior, _SHRINK_TOKENS
        weight = pull * prior[:, :, :1]
        level = self.accepted.sum(axis=2, keepdims=True) + weight
        level /= (self.tested * prior).sum(axis=2, keepdims=True) + weight
        rates = (self.accepted + pull * np.minimum(level * prior, 1.0)) / (self.tested + pull)
        rates = np.minimum(np.maximum(rates, 1e-4), 1.0 - 1e-4)
        odds: FloatArray = rates / (1.0 - rates)
        return odds
