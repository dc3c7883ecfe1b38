"""Verification that makes acceptances up, at given rates; all compute is real. For benchmarks.

What is accepted depends on seeds, positions and rates alone, so it is known while the target still
computes. Knows nothing of policies, caches or time.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sdcontrol.core import family_of
from sdcontrol.engine.coupled import CoupledVerifier
from sdcontrol.engine.noise import SYNTHETIC, uniform, uniforms
from sdcontrol.engine.walk import VerifyTask, Walk, depths_of
from sdcontrol.errors import ConfigError, UnknownName

__all__ = ["Rates", "RatesOf", "SyntheticVerifier"]

Rates = float | Sequence[float]
"""Conditional acceptance by depth in the draft; the last one holds beyond, a number everywhere."""

RatesOf = Callable[[VerifyTask], Sequence[float]]
"""The rates of one request's draft, by depth."""


class SyntheticVerifier(CoupledVerifier):
    """Accepts draft tokens at given rates; the target's samples are computed all the same.

    `rates` is the probability that a draft token is accepted if its parent was: one for all, by
    drafter (an arm, or its family), or a function of the task. Siblings are tried in the draft's
    order; `rates_of` says them for a task. The text is the drafts' own with the target's sample at
    the end of each; give requests different seeds, or like requests are accepted alike.

    With `shares_luck` the number that decides depends on request and position alone, not on the
    token: where one drafter is lucky, so are the others. Chains only, since siblings would be, too.

    Raises `ConfigError` for a rate outside [0, 1], `UnknownName` for a drafter without rates.
    """

    def __init__(
        self, rates: Rates | Mapping[str, Rates] | RatesOf, *, shares_luck: bool = False
    ) -> None:
        self.supports_trees = not shares_luck
        self.rates_of: RatesOf = rates if callable(rates) else _given(rates)

    def stands(self, tasks: Sequence[VerifyTask]) -> NDArray[np.bool_]:
        """Whether a node is accepted where its parent is: all nodes, one task after the other."""
        seeds: list[int] = []
        positions: list[int] = []
        noises: list[int] = []
        rates: list[float] = []
        for task in tasks:
            if task.draft is None or not task.draft.tokens:
                continue
            own, length, depths = self.rates_of(task), len(task.tokens), depths_of(task.draft)
            last = len(own) - 1
            rates.extend([own[depth if depth < last else last] for depth in depths])
            seeds.extend([task.sampler.seed] * len(depths))
            positions.extend([length + depth for depth in depths])
            noises.extend(self._noises_of(task.draft.tokens))
        keys = torch.from_numpy(np.array([seeds, positions, noises], dtype=np.int64))
        drawn: NDArray[np.float64] = uniforms(keys[0], keys[1], keys[2], SYNTHETIC).numpy()
        return drawn < np.array(rates)

    def _accepts(self, walk: Walk, child: int, sample: int) -> bool:
        rates, seed = self.rates_of(walk.task), walk.task.sampler.seed
        (noise,) = self._noises_of(walk.draft.tokens[child : child + 1])
        rate = rates[min(len(walk.path), len(rates) - 1)]
        return uniform(seed, walk.position, SYNTHETIC, noise) < rate

    def _noises_of(self, tokens: Sequence[int]) -> Sequence[int]:
        """Which of the numbers at its position decides on each token."""
        return tokens if self.supports_trees else [0] * len(tokens)


def _given(rates: Rates | Mapping[str, Rates]) -> RatesOf:
    if not isinstance(rates, Mapping):
        everywhere = _checked(rates)
        return lambda task: everywhere
    by_drafter = {name: _checked(value) for name, value in rates.items()}

    def rates_of(task: VerifyTask) -> tuple[float, ...]:
        for name in (task.drafter, family_of(task.drafter)):
            if name in by_drafter:
                return by_drafter[name]
        raise UnknownName(
            f"no synthetic acceptance rates for drafter {task.drafter!r}; there are some for "
            f"{sorted(by_drafter)}"
        )

    return rates_of


def _checked(rates: Rates) -> tuple[float, ...]:
    checked: tuple[float, ...] = tuple(np.atleast_1d(np.asarray(rates, np.float64)).tolist())
    if not checked or not all(0.0 <= rate <= 1.0 for rate in checked):
        raise ConfigError(f"acceptance rates {checked}: give at least one, each in [0, 1]")
    return checked
