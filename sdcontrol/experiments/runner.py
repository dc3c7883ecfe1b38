"""The seam between a comparison and what decodes: live on the engine, or simulated.

Knows what a block is; nothing of how one is run.
"""

from collections.abc import Mapping
from typing import Protocol

from sdcontrol.experiments.records import Place, RunRecord

__all__ = ["Outputs", "Runner"]

Outputs = Mapping[str, tuple[int, ...]]
"""Output tokens by request, for the comparison of texts."""


class Runner(Protocol):
    """Runs one arm through one block. What an adaptive arm learns it keeps until `close`."""

    @property
    def place(self) -> Place:
        """Where it runs."""
        ...

    def run_block(self, arm: str, block: int, *, start_seconds: float) -> tuple[RunRecord, Outputs]:
        """Decode the block's requests; may raise anything, which costs this arm alone."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...
