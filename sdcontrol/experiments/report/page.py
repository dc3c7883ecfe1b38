"""One self-contained HTML page about a comparison; opens offline, on a phone, in the dark.

Knows the results that it is handed, and nothing of how they were measured. Names and texts in them
are not trusted: templates escape all of them, and a policy in the page's head lets nothing be
loaded, and no script run but the page's own, known by its hash.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import JsonValue

from sdcontrol.experiments.report.figures import (
    figures_of,
    headline_figure,
)
from sdcontrol.experiments.report.quantities import label_of
from sdcontrol.experiments.report.tables import (
    acceptance_table,
    comparison_table,
    metrics_table,
)
from sdcontrol.experiments.report.verdict import verdict_of
from sdcontrol.experiments.results import Results, write_atomically

__all__ = ["render", "write_report"]

_SCRIPTS = ("core.js", "axes.js", "marks.js", "plots.js", "page.js")
_NUM_COLORS = 8


def write_report(path: Path, results: Results) -> Path:
    """Write the page at one stroke; returns its path."""
    return write_atomically(path, render(results))


def render(results: Results) -> str:
    """The page; the same text for equal results."""
    headline, figures = headline_figure(results), figures_of(results)
    arms = _arms(results)
    data = {
        "arms": [{"name": arm["name"], "color": arm["color"]} for arm in arms],
        "plots": {figure.id: figure.plot for figure in (headline, *figures)},
    }
    style, script = _source("style.css"), "".join(map(_source, _SCRIPTS))
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    return (
        _environment()
        .get_template("page.html")
        .render(
            results=results,
            arms=arms,
            headline=headline,
            figures=figures,
            verdict=verdict_of(results),
            drift_metric=label_of(results.drift.metric) if results.drift else "",
            metrics=metrics_table(results),
            comparisons=comparison_table(results),
            acceptance=acceptance_table(results.arms),
            config=yaml.safe_dump(
                json.loads(results.model_dump_json(include={"config"}))["config"],
                sort_keys=False,
                allow_unicode=True,
            ),
            data=_as_data(data),
            style=Markup(style),
            script=Markup(script),
            policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
            "base-uri 'none'; form-action 'none'",
        )
    )


def _arms(results: Results) -> list[dict[str, JsonValue]]:
    """Arms with their colours: grey for the baseline, one each for the others."""
    others = [arm.name for arm in results.arms if arm.name != results.baseline]
    return [
        {
            "name": arm.name,
            "description": arm.description,
            "policy": json.dumps(arm.policy, ensure_ascii=False),
            "failed": arm.failed,
            "is_baseline": arm.name == results.baseline,
            "color": 1 + others.index(arm.name) % (_NUM_COLORS - 1) if arm.name in others else 0,
        }
        for arm in results.arms
    ]


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("sdcontrol.experiments.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _source(name: str) -> str:
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _as_data(value: Mapping[str, object]) -> Markup:
    """JSON inside a script element: nothing in it can end the element or open another."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
