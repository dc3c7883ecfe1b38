"""What an engine has done so far: counts and seconds, added up over steps.

Knows observations only.
"""

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from sdcontrol.core import Observation
from sdcontrol.engine.history import RequestHistory, RequestLog

__all__ = ["DrafterStats", "EngineStats", "GraphStats", "Tally"]

_MOST_WAITING = 16  # steps
_MOST_FAULTS = 1000  # kept in words, the first ones: a planner may fail in every step


@dataclass(slots=True)
class DrafterStats:
    """One drafter arm."""

    steps: int = 0  # requests times steps in which a draft of it was verified
    drafted: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted per submitted draft token."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification of a draft, the bonus token included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


@dataclass(slots=True)
class GraphStats:
    """CUDA graphs of all models of an engine; all zero where none are used."""

    tried: int = 0  # captures, failed ones included
    captured: int = 0
    replayed: int = 0
    eager: dict[str, int] = field(default_factory=dict)  # forwards without a graph, by reason
    capture_seconds: float = 0.0
    reserved_bytes: int = 0  # device memory that captures took
    expected_bytes: int = 0  # that they were left when the pool was sized


@dataclass(slots=True)
class EngineStats:
    """Sums over the steps of an engine."""

    steps: int = 0
    decoded_requests: int = 0  # requests times steps
    launched_ahead: int = 0  # steps, before the tokens of the one before were known
    emitted: int = 0  # tokens of decoding steps; not what the step that ends a prompt gives
    prefill_tokens: int = 0
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    lengths: dict[tuple[str, int], int] = field(default_factory=dict)  # (arm, length): times chosen
    seconds: dict[str, float] = field(default_factory=dict)
    num_faults: int = 0
    faults: list[str] = field(default_factory=list)  # the first thousand
    shadows: dict[str, DrafterStats] = field(default_factory=dict)  # free drafters, while unused
    graphs: GraphStats = field(default_factory=GraphStats)
    history: RequestLog = field(default_factory=RequestLog)

    @property
    def requests(self) -> Mapping[str, RequestHistory]:
        """What was chosen for each of the latest requests, and why."""
        return self.history.requests

    def add(self, observation: Observation) -> None:
        """Count one step."""
        self.steps += 1
        self.decoded_requests += len(observation.view.requests)
        self.emitted += sum(observation.emitted)
        self.prefill_tokens += observation.view.prefill_tokens
        self.num_faults += len(observation.faults)
        self.faults.extend(observation.faults[: _MOST_FAULTS - len(self.faults)])
        self._add_choices(observation)
        self._add_shadows(observation)
        self.history.add(observation)
        timing = observation.timing
        self._add_seconds({f"draft {name}": s for name, s in timing.draft_seconds.items()})
        self._add_seconds(
            {
                "verify": timing.verify_seconds,
                "controller": timing.controller_seconds,
                "overhead": timing.overhead_seconds,
            }
        )

    @property
    def tokens_per_step(self) -> float:
        """Tokens per request and step: 1 without speculation."""
        return self.emitted / self.decoded_requests if self.decoded_requests else 0.0

    def _add_choices(self, observation: Observation) -> None:
        for row, choice in enumerate(observation.plan.choices):
            arm = choice.drafter or "off"
            key = (arm, choice.num_draft_tokens)
            self.lengths[key] = self.lengths.get(key, 0) + 1
            if choice.drafter is None:
                continue
            stats = self.drafters.setdefault(arm, DrafterStats())
            stats.steps += observation.proposed[row] > 0
            stats.drafted += observation.drafted[row]
            stats.proposed += observation.proposed[row]
            stats.accepted += observation.accepted[row]

    def _add_shadows(self, observation: Observation) -> None:
        """Of the emitted tokens, those that an unused free drafter would have had accepted."""
        for arm, counts in observation.shadow.items():
            known = [
                (count, emitted)
                for count, emitted in zip(counts, observation.emitted, strict=True)
                if count is not None
            ]
            if known:
                stats = self.shadows.setdefault(arm, DrafterStats())
                stats.steps += len(known)
                stats.proposed += sum(emitted for _, emitted in known)
                stats.accepted += sum(count for count, _ in known)

    def _add_seconds(self, seconds: Mapping[str, float]) -> None:
        for name, spent in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


class Tally:
    """An engine's stats, added up when they are asked for, or several steps at once.

    One step alone takes twice as long: right after a forward little of it is in the processor's caches.
    """

    def __init__(self, graphs: GraphStats | None = None) -> None:
        self._stats = EngineStats(graphs=graphs if graphs is not None else GraphStats())
        self._waiting: list[Observation] = []
        self._lock = threading.Lock()  # whoever asks may be another thread

    def add(self, observation: Observation) -> None:
        """Count one step, now or later."""
        self._waiting.append(observation)
        if len(self._waiting) >= _MOST_WAITING:
            self._add_up()

    def count_ahead(self) -> None:
        """Count a launch before the tokens of the step before were known."""
        self._stats.launched_ahead += 1

    @property
    def steps(self) -> int:
        """How many were counted."""
        return self._stats.steps + len(self._waiting)

    @property
    def stats(self) -> EngineStats:
        """Of all steps so far: the object itself, which later steps change."""
        self._add_up()
        return self._stats

    def copy(self) -> EngineStats:
        """Of all steps so far, whole, also while another thread counts steps."""
        self._add_up()
        with self._lock:
            return copy.deepcopy(self._stats)

    def _add_up(self) -> None:
        with self._lock:
            while self._waiting:
                self._stats.add(self._waiting.pop(0))
