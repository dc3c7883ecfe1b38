"""One self-contained HTML page about a comparison; opens offline, on a phone, in the dark.

Knows the facts that it is handed, and nothing of how they were measured.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TypedDict

__all__ = ["ArmFacts", "RunFacts", "write_report"]


class ArmFacts(TypedDict):
    """One arm of a comparison."""

    policy: str
    description: str
    speed: Mapping[str, float]  # median, low, high
    tokens_per_second: Sequence[float]
    tokens_per_step: float
    seconds: Mapping[str, float]
    lengths: Mapping[str, int]


class RunFacts(TypedDict):
    """A comparison."""

    machine: str
    threads: int
    versions: Mapping[str, str]
    differing_texts: int
    verdict: str
    arms: Sequence[ArmFacts]


_STYLE = """
:root { color-scheme: light dark; --bar: #3b6ea5; --soft: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--soft); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: var(--bar); height: .8rem; display: inline-block; vertical-align: middle; }
figure { margin: 1rem 0; } figcaption { font-weight: 600; }
"""


def write_report(path: Path, facts: RunFacts) -> Path:
    """Write the page; returns its path."""
    body = "\n".join(
        (
            "<h1>What speculation did</h1>",
            f"<p><strong>{escape(facts['verdict'])}</strong></p>",
            _speeds(facts["arms"]),
            *(_choices(arm) for arm in facts["arms"] if len(arm["lengths"]) > 1),
            *(_times(arm) for arm in facts["arms"]),
            _setting(facts),
        )
    )
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>What speculation did</title><style>{_STYLE}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")
    return path


def _speeds(arms: Sequence[ArmFacts]) -> str:
    rows = [
        (
            escape(f"{arm['policy']} ({arm['description']})"),
            f"{arm['speed']['median']:.2f}x",
            f"{arm['speed']['low']:.2f} to {arm['speed']['high']:.2f}",
            f"{arm['tokens_per_step']:.2f}",
        )
        for arm in arms
    ]
    head = ("policy", "speed against none", "95 % interval", "tokens per step")
    return "<h2>Speed</h2>" + _table(head, rows)


def _choices(arm: ArmFacts) -> str:
    return _bars(f"What {arm['policy']} chose, requests times steps", arm["lengths"], "{:.0f}")


def _times(arm: ArmFacts) -> str:
    return _bars(f"Where the time of {arm['policy']} went, seconds", arm["seconds"], "{:.2f}")


def _bars(caption: str, values: Mapping[str, float], form: str) -> str:
    most = max(values.values(), default=0) or 1
    rows = [
        f"<tr><td>{escape(name)}</td><td class=number>{form.format(value)}</td>"
        f'<td style="width:60%"><span class=bar style="width:{100 * value / most:.1f}%"></span></td>'
        "</tr>"
        for name, value in values.items()
    ]
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption><table>{''.join(rows)}</table></figure>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    kinds = ["", *[" class=number"] * (len(head) - 1)]
    cells = [f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True)]
    body = [
        "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))
        for row in rows
    ]
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    return f"<table><tr>{''.join(cells)}</tr>{lines}</table>"


def _setting(facts: RunFacts) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"<h2>Measured on</h2><p>{escape(facts['machine'])}, {facts['threads']} threads, "
        f"{escape(versions)}. Arms took turns within each block; numbers are medians of ratios "
        "within blocks.</p>"
    )
