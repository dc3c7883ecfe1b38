"""The grid as one picture: per row the intervals of adaptive over best fixed and over off.

SVG by hand, readable on light and dark: colours change with the reader's scheme. Knows the scores in
a result; nothing of how they were measured.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.regret.results import TARGETS, misses, speed_misses

__all__ = ["svg"]

_LEFT, _WIDTH, _ROW, _TOP, _RIGHT = 250, 560, 34, 70, 24
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
.back { fill: #ffffff } .grid { stroke: #d1d9e0; stroke-width: 1 } .one { stroke: #59636e }
.target { stroke: #bc4c00; stroke-dasharray: 4 3 } .best { stroke: #0969da; fill: #0969da }
.off { stroke: #1a7f37; fill: #1a7f37 } .rival { stroke: #8250df; fill: #8250df }
.missed { fill: #cf222e; font-weight: 600 } .long { fill: #bc4c00 } line { stroke-width: 2 } .grid, .one { stroke-width: 1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .back { fill: #0d1117 } .grid { stroke: #30363d }
  .one { stroke: #9198a1 } .target { stroke: #f0883e } .best { stroke: #58a6ff; fill: #58a6ff }
  .off { stroke: #3fb950; fill: #3fb950 } .rival { stroke: #bc8cff; fill: #bc8cff }
  .missed { fill: #ff7b72 } .long { fill: #f0883e }
}"""
_TICKS = (0.1, 0.2, 0.35, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0)
_SERIES = {"to_best": "best", "to_off": "off", "to_rival": "rival"}
_LABELS = {"best": "over the best fixed", "off": "over off", "rival": "over the best rival"}


class _Scale:
    """From ratios to x; logarithmic, from a little under the smallest to a little over the largest."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low = 0.98 * min([0.9, *values])
        self.high = 1.02 * max([1.1, *values])

    def x(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(_LEFT + _WIDTH * share, 1)

    def ticks(self) -> list[float]:
        return [tick for tick in _TICKS if self.low <= tick <= self.high]


def svg(results: Sequence[Mapping[str, object]]) -> str:
    """The whole picture; what a row missed stands below its name.

    The name is red where that is speed or text, orange where the controller alone took too long.
    """
    ratios = [r[key] for r in results for key in _SERIES if key in r]
    scale = _Scale([v for ratio in ratios if isinstance(ratio, Mapping) for v in _ends(ratio)])
    height = _TOP + _ROW * len(results) + 30
    width = _LEFT + _WIDTH + _RIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-label="Adaptive policy against fixed settings, 95 % intervals">',
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{width}" height="{height}"/>',
            *_legend(),
            *_lines(scale, height),
            *(part for i, r in enumerate(results) for part in _row(r, _TOP + _ROW * i, scale)),
            "</svg>\n",
        ]
    )


def _ends(ratio: Mapping[str, float]) -> tuple[float, float]:
    return ratio["low"], ratio["high"]


def _legend() -> list[str]:
    title = "Tokens per second of the adaptive policy, median and 95 % interval"
    parts = [f'<text x="12" y="22" font-weight="600">{title}</text>']
    for i, (name, label) in enumerate(_LABELS.items()):
        x = _LEFT + 160 * i
        parts.append(f'<line class="{name}" x1="{x}" x2="{x + 22}" y1="42" y2="42"/>')
        parts.append(f'<text x="{x + 28}" y="46">{label}</text>')
    return parts


def _lines(scale: _Scale, height: int) -> list[str]:
    def line(value: float, kind: str) -> str:
        x = scale.x(value)
        return f'<line class="{kind}" x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{height - 26}"/>'

    parts = [line(tick, "grid") for tick in scale.ticks()]
    parts += [line(1.0, "one"), line(TARGETS["to_best"], "target")]
    return parts + [
        f'<text class="small" x="{scale.x(tick)}" y="{height - 10}" text-anchor="middle">'
        f"{tick:g}</text>"
        for tick in scale.ticks()
    ]


def _row(result: Mapping[str, object], y: int, scale: _Scale) -> list[str]:
    missed = misses(result)
    kind = ' class="missed"' if speed_misses(result) else ' class="long"' if missed else ""
    parts = [f'<text{kind} x="12" y="{y + 11}">{escape(str(result["name"]))}</text>']
    note = "; ".join(missed) if missed else str(result["best_fixed"])
    note = note if len(note) <= 44 else note[:43] + "…"
    parts.append(f'<text class="small" x="12" y="{y + 24}">{escape(note)}</text>')
    shown = [(key, name) for key, name in _SERIES.items() if key in result]
    for i, (key, name) in enumerate(shown):
        ratio = result[key]
        assert isinstance(ratio, Mapping)
        height = y + 5 + 8 * i
        low, high = (scale.x(end) for end in _ends(ratio))
        parts.append(f'<line class="{name}" x1="{low}" x2="{high}" y1="{height}" y2="{height}"/>')
        middle = scale.x(ratio["median"])
        parts.append(f'<circle class="{name}" cx="{middle}" cy="{height}" r="3.5"/>')
    return parts
