"""What each drafter would have had accepted, at every position of a finished output.

The engine computes it, traces keep it, a what-if replay reads it. Knows nothing of how it is
computed or stored, nor of policies.

    output      t0  t1  t2  t3 ...
    accepted    3   2   1   0      drafting after t0 .. would have been right for 3 tokens
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdcontrol.errors import TraceError

__all__ = ["DEPTH", "MOST_DEPTH", "ArmOutcomes", "DraftConfidence"]

DEPTH = 16
"""Draft tokens (nodes of a tree) that a table answers for, and that may be chosen for a request in a
step, unless somebody says otherwise: a what-if replay must know of every draft that a policy may ask for."""

DraftConfidence = Mapping[str, Mapping[int, tuple[float, ...]]]
"""By arm and output position: the drafter's confidence in each token of a draft made there."""

MOST_DEPTH = 32
"""Draft tokens that any table answers for: a path has so many bits."""


@dataclass(frozen=True, slots=True, eq=False)
class ArmOutcomes:
    """One drafter arm over one output; every array is `[output_tokens]`.

    Entry `i` is for drafting when `i` tokens of the output are there. Exact for chains under greedy
    and coupled verification. A tree also has `path`: bit `j` says that node `j`, in the drafter's
    order, is on the accepted path; its first `chain_nodes` nodes form a chain.

    Raises `TraceError` for arrays that do not fit together.
    """

    accepted: NDArray[np.uint8]  # of the first `depth` draft tokens or nodes
    match_tokens: NDArray[np.uint8] | None = None  # what a look-up's hint said
    max_draft_tokens: NDArray[np.uint8] | None = None  # no more could be drafted
    confidence: NDArray[np.float32] | None = None  # in the first draft token; NaN: unknown
    path: NDArray[np.uint32] | None = None
    chain_nodes: NDArray[np.uint8] | None = None
    depth: int = DEPTH

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MOST_DEPTH:
            raise TraceError(f"acceptance to a depth of {self.depth}; give 1 to {MOST_DEPTH}")
        if (self.path is None) != (self.chain_nodes is None):
            raise TraceError("path and chain_nodes go together; give both for trees, else neither")
        for name in ("match_tokens", "max_draft_tokens", "confidence", "path", "chain_nodes"):
            values = getattr(self, name)
            if values is not None and values.shape != self.accepted.shape:
                raise TraceError(
                    f"{name} has the shape {values.shape}, accepted {self.accepted.shape}; "
                    "give one value per output position"
                )
        most = int(self.accepted.max(initial=0))
        if self.accepted.ndim != 1 or most > self.depth:
            raise TraceError(
                f"accepted has {self.accepted.ndim} dimensions and values up to {most}; give one "
                f"count per output position, each at most the depth of {self.depth}"
            )

    @property
    def output_tokens(self) -> int:
        """Positions that are answered for."""
        return int(self.accepted.shape[0])
