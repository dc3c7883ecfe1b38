"""Of what a drafter's tokens gain, the share that is left for whoever ends last, by family: learnt from batches.

A batch that nothing follows waits for the request whose drafts bring least. Before much is known of a request, all
drafters are believed to bring what they do on average; but those that copy bring most of it to requests that
will end early, and next to nothing to the last one, while a model is about as often right everywhere. So of each
finished batch it is noted how often the first token of a family's drafts, used or scored in shadow, was right in
the last request, and in the average one. Luck makes whoever had none the last one, and says nothing of
the next batch: of the difference that share counts by which requests differ beyond luck (James and Stein 1961).
Until batches have finished that say more, the last one is taken for the worst of so many requests as differ as those
of the present batch do.
Knows nothing of costs, plans, or when a batch is over. A fold over observations.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdcontrol.columns import ids_of
from sdcontrol.core import FloatArray, Observation, family_of

__all__ = ["LastGains", "expected_most"]

_EVIDENCE = 0.3  # squared deviations that what the present batch says of its last one counts for
_FADING = 0.8  # of what is known, per batch
_FEWEST = 3  # drafts of a request that say something
_FEWEST_REQUESTS = 3  # of which it can be said how far they differ
_FIRST_LOOK = 4  # steps of a batch, after which that is asked for, and then after 8, 16, 32, ...
_NOTHING: FloatArray = np.zeros(4)  # is known


class LastGains:
    """What is known of the drafters of last requests."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}  # of the batch's requests
        self._size = 0
        self._seated: tuple[Sequence[str], list[int]] = (), []  # who decoded last, and their rows
        self._counts: dict[str, tuple[list[int], list[int]]] = {}  # by arm: drafts, right ones
        self._num_steps = 0  # of the batch
        self._differ: dict[str, float] = {}  # by family, how far its requests do, see `_differing`
        self._known: dict[str, FloatArray] = {}  # by family, see `_told`
        self._kept: dict[int, Mapping[str, float]] = {}  # by number of requests

    def begin(self, ids: Collection[str]) -> None:
        """Another batch, of these requests; what was noted of one that is not over is dropped."""
        self._rows = {name: row for row, name in enumerate(ids)}
        self._size = len(ids)
        self._seated = (), []
        self._counts, self._num_steps = {}, 0
        if self._differ:
            self._differ = {}
            self._kept.clear()

    def count(self, observation: Observation) -> None:
        """Take note of a step's first draft tokens. Loops: the few numbers of a step are not worth arrays."""
        if self._size < 2:  # nobody waits for a lone request
            return
        ids = ids_of(observation.view)
        if ids != self._seated[0]:
            self._seated = ids, [self._rows[name] for name in ids]
        rows, counts = self._seated[1], self._counts
        plan, proposed, accepted = observation.plan, observation.proposed, observation.accepted
        for row, choice, tokens, right in zip(rows, plan.choices, proposed, accepted, strict=True):
            if tokens and choice.drafter is not None:
                drafts, first = counts.get(choice.drafter) or self._add(choice.drafter)
                drafts[row] += 1
                first[row] += right > 0
        for arm, shadow in observation.shadow.items():
            drafts, first = counts.get(arm) or self._add(arm)
            for row, found in zip(rows, shadow, strict=True):
                if found is not None:
                    drafts[row] += 1
                    first[row] += found > 0
        steps = self._num_steps = self._num_steps + 1
        if steps >= _FIRST_LOOK and not steps & (steps - 1):
            self._differ = {family: _differing(table) for family, table in self._by_family()}
            self._kept.clear()

    def learn(self, last: Collection[str]) -> None:
        """The batch is over; which of its requests ended last."""
        rows = [self._rows[name] for name in last]
        for family, table in self._by_family():
            told = _told(table, np.isin(np.arange(table.shape[1]), rows))
            if told is not None:
                self._known[family] = _FADING * self._known.get(family, _NOTHING) + told
        self._kept.clear()

    def kept(self, num_requests: int) -> Mapping[str, float]:
        """By family, the share of its gain that the last of so many requests has; 1 of those left out."""
        kept = self._kept.get(num_requests)
        if kept is None:
            kept = self._kept[num_requests] = {
                family: _kept(
                    self._known.get(family, _NOTHING), self._differ.get(family, 0.0), num_requests
                )
                for family in self._known | self._differ
            }
        return kept

    def _add(self, arm: str) -> tuple[list[int], list[int]]:
        """Counts of an arm that nobody in the batch drafted with before."""
        counts = self._counts[arm] = [0] * self._size, [0] * self._size
        return counts

    def _by_family(self) -> Iterable[tuple[str, FloatArray]]:
        """Drafts and right ones, `[2, requests]`."""
        by_family: dict[str, FloatArray] = {}
        for arm, counts in self._counts.items():
            family = family_of(arm)
            by_family[family] = by_family.get(family, 0.0) + np.array(counts, np.float64)
        return by_family.items()


class _Rates(NamedTuple):
    """How often requests' first draft tokens are right."""

    says: NDArray[np.bool_]  # [requests], who drafted often enough
    rates: FloatArray  # of those
    mean: float
    luck: float  # expected squared deviations of requests that are alike


def _rates(counts: FloatArray) -> _Rates | None:
    says = counts[0] >= _FEWEST
    drafts, right = counts[:, says]
    if len(drafts) < 2 or not right.any():
        return None
    rates = right / drafts
    mean = rates.mean()
    return _Rates(says, rates, mean, (mean * (1.0 - mean) / drafts).mean())


def _differing(counts: FloatArray) -> float:
    """The deviation of requests' rates in shares of their mean, luck and what it may well be more left out."""
    found = _rates(counts)
    if found is None or len(found.rates) < _FEWEST_REQUESTS:
        return 0.0
    luck = found.luck * (1.0 + (2.0 / (len(found.rates) - 1)) ** 0.5)
    return float(max(found.rates.var(ddof=1) - luck, 0.0) ** 0.5 / found.mean)


def _told(counts: FloatArray, is_last: NDArray[np.bool_]) -> FloatArray | None:
    """Weight, how far the last one was behind in shares of the mean, the squared differences and luck in them."""
    found = _rates(counts)
    if found is None or not is_last[found.says].any():
        return None
    says, rates, mean, luck = found
    deviations = expected_most(len(is_last))
    behind = (1.0 - rates[is_last[says]].mean() / mean) * deviations
    return np.array([deviations**2, behind, rates.var(ddof=1) / mean**2, luck / mean**2])


def _kept(known: FloatArray, differing: float, num_requests: int) -> float:
    weight, behind, differences, luck = known.tolist()
    shown = max(1.0 - luck / differences, 0.0) if differences > 0.0 else 0.0
    by_deviation = (shown * behind + _EVIDENCE * differing) / (weight + _EVIDENCE)
    share: float = by_deviation * expected_most(num_requests)
    return 1.0 - min(max(share, 0.0), 1.0)


@lru_cache
def expected_most(num: int) -> float:
    """Of so many standard normal numbers, about (Blom 1958)."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0
