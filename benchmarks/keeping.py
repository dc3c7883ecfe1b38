"""A controller that keeps what it observes, for benchmarks that learn or replay from it afterwards."""

from collections.abc import Mapping

from sdcontrol.controller import Controller
from sdcontrol.core import Observation

__all__ = ["Keeping"]


class Keeping(Controller):
    """Decides as any controller of its policy."""

    def __init__(self, policy: str | Mapping[str, object]) -> None:
        super().__init__(policy)
        self.observations: list[Observation] = []

    def observe(self, observation: Observation) -> None:
        """Learn, and keep."""
        self.observations.append(observation)
        super().observe(observation)
