"""The average acceptance of each drafter arm, by bucket of hint and position.

Knows nothing of single requests: weighted counts in, odds out. A rate is a ratio of counts: the first
position's is shrunk to its bucket's and from there to the prior, every other's to that of the one
before it. So positions that were never tested are believed to go on as the last tested ones do:
where a draft that was right for three tokens is hardly ever wrong at the fourth, longer ones are
tried.

What an average says of a new request is a mixture over `levels`: those for whom a
first token was right are mostly those for whom the next will be. `odds` are those at level 0 which, so
mixed, come to the average.
"""

from collections.abc import Mapping

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray, family_of
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.coming import FIRST_DRAFTS
from sdcontrol.estimators.hints import NUM_BUCKETS, prior_rates
from sdcontrol.estimators.levels import FIRST_PRIOR, RATIOS

__all__ = ["ArmAverages", "shrink"]

_PRIOR_ACCEPTANCE = 0.65
_FAMILY_PRIORS = {"sparse_kv": 0.85}  # a model agrees with itself: MagicDec, table 3, has 0.84
_SHRINK_TOKENS = 16.0  # tokens that the coarser level is worth
_MEMORY_TOKENS = 400.0  # tokens per cell, after which it forgets
_LEAST_RATE = 1e-4
_NEWTON_STEPS = 4
_LEAST_ODDS = 1e-6


class ArmAverages:
    """Counts, and odds at level 0, all `[arms, NUM_BUCKETS, K]`; arm 0 is one that was never seen.

    A family with a prior of its own has a row under its name, for its arms that were never seen.

    Chains are counted by position, given that the positions before were accepted; arms that
    `become_tree` by node, given nothing. Whoever adds to the counts of a cell calls `shrink`. `coming`,
    `[arms, 2]`, are drafts that were asked for, and those of which something came: see the module of that name.
    """

    def __init__(self, depth: int, prior: Mapping[str, float]) -> None:
        self._depth = depth
        self.index_of: dict[str, int] = {}
        shape = 0, NUM_BUCKETS, depth
        self.tested: FloatArray = np.zeros(shape)
        self.accepted: FloatArray = np.zeros(shape)
        self.prior: FloatArray = np.zeros(shape)
        self.odds: FloatArray = np.zeros(shape)
        self.coming: FloatArray = np.zeros((0, 2))
        self._append(_PRIOR_ACCEPTANCE)
        for arm, acceptance in {**_FAMILY_PRIORS, **prior}.items():
            self.add(arm, acceptance)

    @property
    def num_arms(self) -> int:
        """Arms that there is room for, the unseen one included."""
        return len(self.tested)

    @property
    def tables(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Tested, accepted, prior, odds."""
        return self.tested, self.accepted, self.prior, self.odds

    def index(self, arm: str) -> int:
        """Where `arm` is; if it was never seen, where its family is, or 0."""
        index = self.index_of.get(arm)
        return self.index_of.get(family_of(arm), 0) if index is None else index

    def add(self, arm: str, acceptance: float | None = None) -> None:
        """Room for one more arm, with its family's prior unless `acceptance` is given."""
        if acceptance is None:
            acceptance = _FAMILY_PRIORS.get(family_of(arm), _PRIOR_ACCEPTANCE)
        if not 0.0 < acceptance <= 1.0:
            raise ConfigError(
                f"prior acceptance of {arm!r} is {acceptance}; give a rate per token above 0, at most 1"
            )
        self._append(acceptance)
        self.index_of[arm] = self.num_arms - 1

    def become_tree(self, arm: str, levels: FloatArray) -> None:
        """Count `arm` by node from now on; its deeper nodes are assumed rarer. `levels`: its prior."""
        index = self.index_of[arm]
        self.tested[index] = self.accepted[index] = 0.0
        self.prior[index] = np.cumprod(self.prior[index], axis=1)
        self._shrink_all(index, levels, is_tree=True)

    def _append(self, acceptance: float) -> None:
        blank = np.zeros((1, NUM_BUCKETS, self._depth))
        prior = prior_rates(acceptance, self._depth)[None]
        before = *self.tables, self.coming
        rows = blank, blank, prior, blank, np.full((1, 2), FIRST_DRAFTS)
        grown = [np.concatenate(pair) for pair in zip(before, rows, strict=True)]
        # No call stands between these, and only after one are signals looked for.
        self.tested, self.accepted, self.prior, self.odds, self.coming = grown
        self._shrink_all(self.num_arms - 1, FIRST_PRIOR, is_tree=False)

    def _shrink_all(self, arm: int, levels: FloatArray, *, is_tree: bool) -> None:
        for bucket in range(NUM_BUCKETS):
            shrink(
                (self.tested[arm, bucket], self.accepted[arm, bucket], self.prior[arm, bucket]),
                levels,
                is_tree,
                self.odds[arm, bucket],
            )


@compiled("float64(float64, float64[::1], float64)", is_inlined=True)
def _odds_of(rate: float, levels: FloatArray, guess: float) -> float:
    """The odds at level 0 with which the levels, mixed, come to `rate`: Newton's steps in log-odds."""
    aim = rate / (1.0 - rate)
    odds = guess if guess > 0.0 else aim
    for _ in range(_NEWTON_STEPS):
        mixed, slope = 0.0, 0.0
        for k in range(len(levels)):
            own = odds * RATIOS[k] / (1.0 + odds * RATIOS[k])
            mixed += levels[k] * own
            slope += levels[k] * own * (1.0 - own)
        odds *= (aim * (1.0 - mixed) / mixed) ** (mixed * (1.0 - mixed) / slope)
    return min(max(odds, _LEAST_ODDS), 1.0 / _LEAST_ODDS)


@compiled("void(float64[::1], float64)", is_inlined=True)
def _go_on(levels: FloatArray, odds: float) -> None:
    """The levels of those who accepted a token that is accepted with `odds` at level 0."""
    total = 0.0
    for k in range(len(levels)):
        levels[k] *= odds * RATIOS[k] / (1.0 + odds * RATIOS[k])
        total += levels[k]
    for k in range(len(levels)):
        levels[k] /= total


@compiled("void(UniTuple(float64[::1], 3), float64[::1], boolean, float64[::1])", is_inlined=True)
def shrink(
    counted: tuple[FloatArray, FloatArray, FloatArray],
    levels: FloatArray,
    is_tree: bool,
    odds: FloatArray,
) -> None:
    """Set `odds` from the counts of one cell, once what exceeds its memory is forgotten; all `[K]`.

    `counted` are tested, accepted and prior; `levels` the probabilities of a new request's.
    """
    tested, accepted, prior = counted
    hits = expected = _SHRINK_TOKENS * prior[0]
    for j in range(len(tested)):
        fade = min(1.0, _MEMORY_TOKENS / max(tested[j], 1.0))
        tested[j] *= fade
        accepted[j] *= fade
        hits += accepted[j]
        expected += tested[j] * prior[j]
    believed = min(hits / expected * prior[0], 1.0)
    left = levels.copy()
    for j in range(len(tested)):
        rate = (accepted[j] + _SHRINK_TOKENS * believed) / (tested[j] + _SHRINK_TOKENS)
        rate = min(max(rate, _LEAST_RATE), 1.0 - _LEAST_RATE)
        odds[j] = _odds_of(rate, left, odds[j])
        if not is_tree:
            _go_on(left, odds[j])
        if j + 1 < len(tested):
            believed = min(rate * prior[j + 1] / prior[j], 1.0)
