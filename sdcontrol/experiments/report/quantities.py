"""Numbers as people read them: a fitting unit, three digits, a plain name.

Knows units and names of metrics; knows nothing of results or pages.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, isfinite, log10

__all__ = ["DASH", "TIMES_SIGN", "Scale", "label_of", "scale_of"]

DASH = "\N{EN DASH}"
TIMES_SIGN = "\N{MULTIPLICATION SIGN}"

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_STEPS = {  # unit: (size, shown as), the largest first
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes")),
    "share": ((0.01, "%"),),
    "FLOPs/s": (*((size, f"{prefix}FLOP/s") for size, prefix in _PREFIXES), (1.0, "FLOP/s")),
}
_ACRONYMS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "End-to-end latency", "slo": "SLO", "kv": "KV"}
_NAMES = {
    "tokens_per_second": "Output tokens per second",
    "slo_requests_per_second": "Goodput under SLO",
    "intensity": "Arithmetic intensity",
    "intensity_over_ridge": "Arithmetic intensity over the ridge",
}
_UNIT_ENDINGS = re.compile(r"_(seconds|bytes)(?=_p\d+$|$)")


@dataclass(frozen=True, slots=True)
class Scale:
    """One unit and number of decimals for numbers that stand together."""

    size: float
    unit: str
    decimals: int

    def text(self, value: float | None) -> str:
        """The number alone; a dash where there is none."""
        if value is None or not isfinite(value):
            return DASH
        return f"{value / self.size:,.{self.decimals}f}".replace("-", "\N{MINUS SIGN}")

    def text_with_unit(self, value: float | None) -> str:
        """The number and its unit."""
        return f"{self.text(value)} {self.unit}".rstrip()


def scale_of(values: Iterable[float | None], unit: str) -> Scale:
    """The scale at which the largest of `values` has three digits."""
    largest = max((abs(v) for v in values if v is not None and isfinite(v)), default=0.0)
    steps = _STEPS.get(unit, ((1.0, unit),))
    size, shown = next((step for step in steps if largest >= step[0]), steps[-1])
    if largest == 0:
        size, shown = steps[0]
    scaled = largest / size
    digits = floor(log10(scaled)) if scaled else 0
    return Scale(size, shown, max(0, min(6, 2 - digits)))


def label_of(name: str) -> str:
    """`ttft_seconds_p99` as TTFT p99, `tokens_per_second` as Output tokens per second."""
    if name in _NAMES:
        return _NAMES[name]
    words = _UNIT_ENDINGS.sub("", name).split("_")
    text = " ".join(_ACRONYMS.get(word, word) for word in words if word)
    return text[:1].upper() + text[1:]
