"""Accept or reject draft tokens.

Knows nothing of policies, caches or time: logits and drafts in, accepted nodes and tokens out.

    coupled    a draft token is accepted when it is the target's own sample at that place; the
               samples depend on (seed, position) only, so the text does not depend on the drafts
               (Daliri, Musco and Suresh 2024)
    rejection  a draft token is accepted with probability min(1, p / q), otherwise replaced by a
               sample of what q left out of p (Leviathan et al. 2023)
    synthetic  made-up acceptances at given rates, all compute real: for benchmarks
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from sdcontrol.core import family_of
from sdcontrol.engine.coupled import CoupledVerifier
from sdcontrol.engine.noise import SYNTHETIC, uniform
from sdcontrol.engine.rejection import RejectionVerifier
from sdcontrol.engine.walk import Verdict, VerifyTask, Walk
from sdcontrol.errors import ConfigError, UnknownName

__all__ = [
    "CoupledVerifier",
    "RejectionVerifier",
    "SyntheticVerifier",
    "Verdict",
    "Verifier",
    "VerifyTask",
    "build_verifier",
    "verifier_of",
]


class Verifier(Protocol):
    """Decides which draft tokens stand."""

    @property
    def supports_trees(self) -> bool:
        """Whether drafts may have alternatives."""
        ...

    def verify(self, logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verdict]:
        """One verdict per task; `logits` is the step's `[rows, vocab]`, which is left as it is.

        A function of its arguments alone. Raises `UnsupportedGeneration` where a row that must be
        sampled has no finite largest score.
        """
        ...


Rates = float | Sequence[float]
"""Conditional acceptance by depth in the draft; the last one holds beyond, a number everywhere."""


class SyntheticVerifier(CoupledVerifier):
    """Accepts draft tokens at given rates; the target's samples are computed all the same.

    `rates` is the probability that a draft token is accepted if its parent was: one for all, or
    by drafter (an arm, or its family). Siblings are tried in the draft's order. The text is the
    drafts' own with the target's sample at the end of each; give requests different seeds, or
    like requests are accepted alike.

    Raises `ConfigError` for a rate outside [0, 1], `UnknownName` for a drafter without rates.
    """

    def __init__(self, rates: Rates | Mapping[str, Rates]) -> None:
        by_drafter = rates if isinstance(rates, Mapping) else {"": rates}
        self._is_global = not isinstance(rates, Mapping)
        self._rates = {name: _checked_rates(value) for name, value in by_drafter.items()}

    def _accepts(self, walk: Walk, child: int, sample: int) -> bool:
        rates = self._rates_of(walk.task.drafter)
        rate = rates[min(len(walk.path), len(rates) - 1)]
        seed = walk.task.sampler.seed
        return uniform(seed, walk.position, SYNTHETIC, walk.draft.tokens[child]) < rate

    def _rates_of(self, drafter: str) -> tuple[float, ...]:
        for name in ("",) if self._is_global else (drafter, family_of(drafter)):
            if name in self._rates:
                return self._rates[name]
        raise UnknownName(
            f"no synthetic acceptance rates for drafter {drafter!r}; there are some for "
            f"{sorted(self._rates)}"
        )


def _checked_rates(rates: Rates) -> tuple[float, ...]:
    checked = tuple(rates) if isinstance(rates, Sequence) else (float(rates),)
    if not checked or not all(0.0 <= rate <= 1.0 for rate in checked):
        raise ConfigError(f"acceptance rates {checked}: give at least one, each in [0, 1]")
    return checked


def build_verifier(name: str, **settings: Rates | Mapping[str, Rates]) -> Verifier:
    """The verifier of this name: "coupled", "rejection", or "synthetic" with `rates=...`.

    Raises `UnknownName` for another name, `ConfigError` for settings that it does not take.
    """
    takes = {"coupled": [], "rejection": [], "synthetic": ["rates"]}
    if name not in takes:
        raise UnknownName(f"no verification is called {name!r}; choose one of {sorted(takes)}")
    if sorted(settings) != takes[name]:
        raise ConfigError(
            f"verification {name!r} takes the settings {takes[name]}, not {sorted(settings)}"
        )
    if name == "synthetic":
        return SyntheticVerifier(settings["rates"])
    return CoupledVerifier() if name == "coupled" else RejectionVerifier()


def verifier_of(verification: str | Verifier) -> Verifier:
    """The verifier itself, or the one of this name."""
    return build_verifier(verification) if isinstance(verification, str) else verification
