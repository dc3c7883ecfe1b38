"""Which drafter, and how many tokens, without a GPU at hand: the roofline's advice.

Knows nothing of measured steps beyond the calibration in the forwards it is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sdcontrol.errors import ConfigError
from sdcontrol.estimators.price import sparse_budget
from sdcontrol.estimators.roofline import Forward

__all__ = ["Advice", "DrafterSpec", "Option", "Situation", "advise"]

_FREE_FAMILIES = frozenset({"ngram"})


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter to judge: an arm, its acceptance rate per token, and what drafts."""

    arm: str
    acceptance: float
    forward: Forward | None = None  # the draft model; None: the target itself, or no model at all
    kv_budget_tokens: int | None = None  # a draft model that reads no more of its KV; None: all

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise ConfigError(f"acceptance of {self.arm!r} is {self.acceptance}; give it in [0, 1]")


@dataclass(frozen=True, slots=True)
class Situation:
    """A batch of equal requests."""

    batch_size: int
    context_tokens: int  # of each request


@dataclass(frozen=True, slots=True)
class Option:
    """One drafter at one length, and what it is predicted to bring."""

    arm: str
    num_draft_tokens: int
    tokens_per_step: float  # per request, bonus included
    draft_round_seconds: float
    verify_seconds: float
    step_seconds: float
    speedup: float  # over decoding without drafts


@dataclass(frozen=True, slots=True)
class Advice:
    """Every option, best first, and the plain step that they are compared with."""

    plain_seconds: float
    options: tuple[Option, ...]

    @property
    def best(self) -> Option | None:
        """The option to take; None where no option beats plain decoding."""
        return self.options[0] if self.options and self.options[0].speedup > 1.0 else None


def advise(
    target: Forward,
    situation: Situation,
    drafters: Sequence[DrafterSpec],
    lengths: Sequence[int] = tuple(range(1, 9)),
) -> Advice:
    """Predicted speedup of every drafter at every length of `lengths`, best first.

    With acceptance rate `a` per token, `n` drafts yield `1 + a + ... + a^n` tokens (Leviathan et al.
    2023, equation 1). Raises `ConfigError` for devices that no link joins.
    """
    batch, kv_tokens = situation.batch_size, situation.batch_size * situation.context_tokens
    overhead = target.calibration.step_overhead_seconds
    plain = float(target.seconds(batch, kv_tokens, batch)) + overhead
    options = [
        _option(target, situation, drafter, length, plain)
        for drafter in drafters
        for length in lengths
    ]
    return Advice(plain, tuple(sorted(options, key=lambda option: -option.speedup)))


def _option(
    target: Forward, situation: Situation, drafter: DrafterSpec, length: int, plain: float
) -> Option:
    batch, kv_tokens = situation.batch_size, situation.batch_size * situation.context_tokens
    drafting = _round_seconds(target, situation, drafter)
    verify = float(target.seconds(batch * (1 + length), kv_tokens, batch))
    step = length * drafting + verify + target.calibration.step_overhead_seconds
    tokens = sum(drafter.acceptance**count for count in range(length + 1))
    return Option(drafter.arm, length, tokens, drafting, verify, step, tokens * plain / step)


def _round_seconds(target: Forward, situation: Situation, drafter: DrafterSpec) -> float:
    if drafter.forward is None and drafter.arm.partition(":")[0] in _FREE_FAMILIES:
        return 0.0
    budget = drafter.kv_budget_tokens or sparse_budget(drafter.arm) or situation.context_tokens
    kv_tokens = situation.batch_size * min(situation.context_tokens, budget)
    forward = drafter.forward or target
    return float(forward.seconds(situation.batch_size, kv_tokens, situation.batch_size))
