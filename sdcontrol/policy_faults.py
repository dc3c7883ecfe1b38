"""What a policy did wrong, and when it has done too much of it.

Faults are noted as they happen, handed to whoever closes the observation, and count when that is
observed: so a replay of the observations comes to the same end. Knows nothing of plans or engines.
"""

from collections import Counter
from collections.abc import Callable

from sdcontrol.core import BatchView, Observation
from sdcontrol.errors import ConfigError
from sdcontrol.interrupts import raise_interrupt
from sdcontrol.logs import EventLog

__all__ = ["PLAN_FAULTS", "PolicyFaults", "checked_budget"]

_log = EventLog(__name__)

PLAN_FAULTS = ("plan_raised", "plan_stalled", "plan_impossible")
_REFINE_FAULTS = ("refine_raised", "refine_stalled", "refine_impossible")
_FAULTS = (*PLAN_FAULTS, *_REFINE_FAULTS, "update_raised", "update_stalled")
_MOST_FAULTS = 3  # within `_FAULT_STEPS`, before a policy is replaced
_FAULT_STEPS = 200
_MOST_PENDING = 64  # faults that nobody collects or observes, of which more say nothing new


def checked_budget(seconds: float) -> float:
    """The seconds that a policy may take; `ConfigError` where every policy would take longer."""
    if seconds is None or not seconds > 0.0:  # True for NaN
        raise ConfigError(
            f"plan_budget_seconds is {seconds}; give seconds above 0, math.inf for no limit"
        )
    return seconds


class PolicyFaults:
    """The faults of one policy. Without a clock, as in a replay, nothing is measured again."""

    def __init__(self, policy_name: str, clock: Callable[[], float] | None) -> None:
        self.counts: Counter[str] = Counter()  # by kind, as observed
        self.is_quarantined = False
        self._name = policy_name
        self._clock = clock
        self._pending: list[str] = []
        self._num_observed = 0  # steps: a loop's own count may begin again
        self._steps: list[int] = []  # of the latest

    def now(self) -> float:
        """Seconds by the clock."""
        return self._clock() if self._clock is not None else 0.0

    def stalled(self, view: BatchView, kind: str, started: float, most_seconds: float) -> bool:
        """Whether more than `most_seconds` have passed, which is noted."""
        seconds = self.now() - started
        if not seconds > most_seconds:
            return False
        self.note(view, kind, TimeoutError(f"{seconds:.3f} s of {most_seconds} s"))
        return True

    def note(self, view: BatchView, kind: str, error: Exception) -> None:
        """A fault happened in the step of `view`. Raises what was no fault but an interrupt."""
        raise_interrupt(error)
        if len(self._pending) >= _MOST_PENDING:
            return
        said = _text(error)
        self._pending.append(f"{kind}: {type(error).__name__}: {said}")
        _log.warning("policy_faulted", policy=self._name, fault=kind, error=said, step=view.step)

    def take(self) -> tuple[str, ...]:
        """Those noted since the last call."""
        faults, self._pending = tuple(self._pending), []
        return faults

    def observe(self, observation: Observation) -> None:
        """Count what the observation says of the policy, and what nobody collected."""
        self._num_observed += 1
        if not (observation.faults or self._pending):
            return
        told = Counter(map(_kind, observation.faults))
        kinds = told | Counter(map(_kind, self.take()))  # in a replay the same are in both
        ours = {kind: number for kind, number in kinds.items() if kind in _FAULTS}
        now = self._num_observed
        self.counts.update(ours)
        self._steps = [step for step in self._steps if step > now - _FAULT_STEPS]
        self._steps += [now] * sum(ours.values())
        if len(self._steps) >= _MOST_FAULTS and not self.is_quarantined:
            self.is_quarantined = True
            _log.warning("policy_quarantined", policy=self._name, step=observation.view.step)

    def forgive(self) -> None:
        """Trust the policy again; the counts stay."""
        self.is_quarantined = False
        self._steps.clear()
        self._pending.clear()


def _text(error: Exception) -> str:
    """What it says, as files can hold it: names of files may have halves of characters."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception:  # an error that cannot say what it is
        return ""


def _kind(fault: str) -> str:
    return fault.partition(":")[0]
