"""The metrics of a comparison: what each is called, in what unit, and which way is better.

Knows names only; values come from `meter`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ["COMPARABLE", "DEFAULT_METRICS", "METRICS", "Measured", "Metric", "ratio_of"]

_GOODPUT = "slo_requests_per_second"


@dataclass(frozen=True, slots=True)
class Metric:
    """One number per arm and block."""

    unit: str
    higher_is_better: bool | None
    is_comparable: bool = False  # positive for every arm, so that a ratio means something


def _latencies() -> dict[str, Metric]:
    kinds = ("ttft_seconds", "tpot_seconds", "e2e_seconds")
    return {f"{kind}_p{q}": Metric("s", False, True) for kind in kinds for q in (50, 90, 99)}


METRICS: Mapping[str, Metric] = {
    "tokens_per_second": Metric("tokens/s", True, True),
    _GOODPUT: Metric("requests/s", True, True),  # goodput: those within the SLOs
    **_latencies(),
    "acceptance_length": Metric("tokens", None),  # per verification of a draft, bonus included
    "acceptance_rate": Metric("share", None),  # of submitted draft tokens
    "wasted_draft_tokens": Metric("per token", None),  # computed and not kept, per output token
    "draft_share": Metric("share", None),  # of the time of the steps
    "verify_share": Metric("share", None),
    "controller_share": Metric("share", None),
    "overhead_share": Metric("share", None),
    "intensity": Metric("FLOPs/byte", None),
    "intensity_over_ridge": Metric("share", None),
    "peak_memory_bytes": Metric("bytes", False, True),
}

COMPARABLE = tuple(name for name, metric in METRICS.items() if metric.is_comparable)
DEFAULT_METRICS = ("tokens_per_second",)


class Measured(Protocol):
    """What one arm did in one block."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """By name."""
        ...

    @property
    def seconds(self) -> float:
        """Of the block."""
        ...


def ratio_of(name: str, mine: Measured, theirs: Measured) -> float | None:
    """Of a metric in one block; None where it is missing, or 0 in both.

    Where one of the two kept the limits of no request, it counts as half of one: such a block left
    out would flatter whoever failed in it.
    """
    values = [run.metrics.get(name, 0.0) for run in (mine, theirs)]
    if name == _GOODPUT and max(values) > 0:
        runs = zip(values, (mine, theirs), strict=True)
        values = [value or 0.5 / run.seconds for value, run in runs]
    return values[0] / values[1] if min(values) > 0 else None
