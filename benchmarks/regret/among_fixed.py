"""A few adaptive arms among every fixed setting: all take turns in each block, in random order.

Before the first block all warm up, what does not learn for a few tokens; a fixed setting that the
first block shows to be far behind goes. Knows no scores.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.regret.arms import Spec, fixed_specs
from benchmarks.regret.grid import Case
from benchmarks.regret.rig import Arm, Rig
from benchmarks.regret.scoring import OFF, best_on_odd, even
from sdcontrol.core import Observation
from sdcontrol.experiments.compare import Ratio, paired_ratio

__all__ = ["AmongFixed", "among_fixed"]

_OUTCLASSED = 0.75  # of the best fixed setting's rate


@dataclass(frozen=True, slots=True)
class AmongFixed:
    """By arm that is still in, for each counted block: tokens per second, and steps."""

    best: str  # fixed setting, on odd blocks
    rates: Mapping[str, list[float]]
    steps: Mapping[str, list[int]]

    def ratio(self, ours: str, others: str) -> Ratio:
        """Of one arm's rate over another's on even blocks."""
        return paired_ratio(even(self.rates[ours]), even(self.rates[others]))


def among_fixed(
    case: Case,
    ours: Mapping[str, Spec],
    *,
    anew: Collection[str] = (),
    warm: Mapping[str, str] = MappingProxyType({}),
) -> AmongFixed:
    """Measure a cell; only its first phase, whose requests follow each other or nothing.

    Those of `ours` that are named in `anew` have learned nothing when a block begins; those in `warm` know what
    the arm named there saw in the block before.
    """
    specs = {**fixed_specs(case), **ours}
    arms = {name: Arm(name, spec) for name, spec in specs.items()}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    steps: dict[str, list[int]] = {name: [] for name in arms}
    seen: dict[str, Sequence[Observation]] = {}
    rng, rig = random.Random(0), Rig(case)
    try:
        for block in range(case.blocks + 1):
            arms |= {name: Arm(name, ours[name]) for name in (*anew, *warm)}
            for name, other in warm.items():
                arms[name].controller.warm_start(seen.get(other, ()))
            for name in rng.sample(list(arms), len(arms)):
                run = rig.run(arms[name], 0, block, tokens=_tokens(arms[name], case, block))
                if name in warm.values():
                    seen[name] = run.observations
                if block:
                    rates[name].append(run.rate)
                    steps[name].append(run.stats.steps)
            if block == 1:
                arms = {name: arm for name, arm in arms.items() if _stays(name, rates, ours)}
    finally:
        rig.close()
    rates = {name: rates[name] for name in arms}
    best = best_on_odd(rates, [name for name in rates if name not in ours])
    return AmongFixed(best, rates, {name: steps[name] for name in arms})


def _tokens(arm: Arm, case: Case, block: int) -> int:
    """Per request; a run is so much shorter."""
    is_short = not block and not arm.controller.learns
    return max(case.tokens // 8, 2) if is_short else case.tokens


def _stays(name: str, rates: Mapping[str, list[float]], ours: Mapping[str, Spec]) -> bool:
    most = max(row[0] for other, row in rates.items() if other not in ours)
    return name == OFF or name in ours or rates[name][0] >= _OUTCLASSED * most
