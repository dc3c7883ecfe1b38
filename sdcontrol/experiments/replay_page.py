"""One self-contained HTML page about replays: the table, and plots as inline SVG.

Knows what it is handed; nothing of how it was simulated. Names in it are not trusted: the template
escapes all of them, and a policy in the page's head lets nothing be loaded and no script run.
"""

from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sdcontrol.experiments.replay_cells import cells_of, columns_of
from sdcontrol.experiments.replay_plots import HEIGHT, WIDTH, plots_of
from sdcontrol.experiments.replay_summary import Comparison
from sdcontrol.traces.replay_result import ReplayResult

__all__ = ["render"]


def render(
    comparison: Comparison,
    results: Mapping[str, Sequence[ReplayResult]],
    title: str,
    notes: Sequence[str],
) -> str:
    """The page. `results` are by source, one of each policy; `title` says what was simulated."""
    environment = Environment(
        loader=PackageLoader("sdcontrol.experiments.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    assert environment.loader is not None
    style = environment.loader.get_source(environment, "style.css")[0]
    return environment.get_template("replay.html").render(
        comparison=comparison,
        columns=columns_of(comparison),
        rows=[(row, cells_of(row, comparison)) for row in comparison.rows],
        plots={source: plots_of(runs) for source, runs in results.items()},
        title=title,
        notes=notes,
        style=Markup(style),
        width=WIDTH,
        height=HEIGHT,
    )
