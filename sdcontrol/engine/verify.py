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

from sdcontrol.engine.coupled import CoupledVerifier
from sdcontrol.engine.rejection import RejectionVerifier
from sdcontrol.engine.synthetic import Rates, SyntheticVerifier
from sdcontrol.engine.walk import Asked, Verdict, VerifyTask
from sdcontrol.errors import ConfigError, UnknownName

__all__ = [
    "Asked",
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
