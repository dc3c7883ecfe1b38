"""The page's figures: each a plot, what it shows in words, and the table with its numbers.

Knows which plots there are and in which order; knows nothing of HTML.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sdcontrol.experiments.report import numbers, plots
from sdcontrol.experiments.report.quantities import label_of
from sdcontrol.experiments.report.tables import Table, confidence_of, ratios_table
from sdcontrol.experiments.report.timeline import bin_seconds, bins_of
from sdcontrol.experiments.results import LATENCIES, ArmResult, Results

__all__ = ["Figure", "LegendEntry", "figures_of", "headline_figure", "headline_metric"]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A colour and its meaning; the colour is a class of the style sheet."""

    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, its words and its numbers."""

    id: str
    title: str
    summary: str
    plot: plots.Plot
    tables: Sequence[Table] = ()
    legend: Sequence[LegendEntry] = field(default_factory=tuple)
    choices: Sequence[str] = ()  # what the plot's selector offers
    width: str = "whole"  # of the page: whole, half or third
    is_continued: bool = False  # belongs to the figure above it


def headline_metric(results: Results) -> str:
    """The metric that the statistics put first."""
    return results.comparisons[0].metric if results.comparisons else "tokens_per_second"


def headline_figure(results: Results) -> Figure:
    """What every arm did against the baseline, at a glance."""
    metric = headline_metric(results)
    return Figure(
        "ratios",
        f"{label_of(metric)}, against {results.baseline}",
        f"Ratio inside each block, with its {confidence_of(results)} interval over blocks. A "
        "difference is claimed only where the test, corrected for the number of comparisons, agrees.",
        plots.ratios_plot(results, metric),
        [ratios_table(results, metric)],
    )


def figures_of(results: Results) -> list[Figure]:
    """All figures that have something to show, in the page's order."""
    arms = results.arms
    makers: Sequence[Callable[[Results], Sequence[Figure]]] = (
        _over_time,
        lambda found: [_blocks(found)],
        lambda found: [_lengths(found.arms)],
        lambda found: [_latency(found.arms, name) for name in LATENCIES],
        lambda found: [_times(found.arms), _step_time(found.arms), _roofline(found.arms)],
    )
    found = [figure for make in makers for figure in make(results)] if arms else []
    return [figure for figure in found if _has_something(figure.plot)]


def _has_something(plot: Mapping[str, object]) -> bool:
    return any(plot.get(key) for key in ("series", "rows", "choices"))


def _over_time(results: Results) -> list[Figure]:
    width = bin_seconds(results.arms)
    timelines = [bins_of(arm, width) for arm in results.arms]
    choices = plots.choices_plot(timelines, width)
    if not choices["rows"]:
        return []
    return [
        Figure(
            "throughput",
            "Throughput over time",
            "Output tokens per second of step time. Each arm's counted blocks stand end to end: "
            "arms took turns, so each has a clock of its own.",
            plots.throughput_plot(timelines, width),
            [numbers.throughput_table(results.arms, timelines)],
        ),
        Figure(
            "choices",
            "What was chosen when",
            "Shares of requests by drafter and number of draft tokens, over the same time. "
            "The fuller the colour, the more tokens.",
            choices,
            [numbers.choices_table(results.arms, timelines)],
            _legend(choices),
            is_continued=True,
        ),
    ]


def _legend(plot: plots.Plot) -> list[LegendEntry]:
    drafters = plot["drafters"]
    assert isinstance(drafters, list)
    return [LegendEntry(str(name), f"drafter-{i % 6}") for i, name in enumerate(drafters)]


def _blocks(results: Results) -> Figure:
    series = numbers.block_ratios(results, headline_metric(results))
    drift = results.drift is not None
    return Figure(
        "blocks",
        "Ratio by block",
        f"Each arm against {results.baseline} inside each block; the shaded stretch is the "
        "interval over blocks."
        + (" Open circles: the baseline against itself (A/A), the machine's drift." * drift),
        plots.block_plots(results, series),
        [numbers.block_table(results, series)],
        [LegendEntry("baseline against itself (A/A)", "drift")] if drift else [],
        choices=[label_of(metric) for metric in series],
    )


def _lengths(arms: Sequence[ArmResult]) -> Figure:
    plot = plots.lengths_plot(arms)
    return Figure(
        "lengths",
        "Draft lengths by drafter",
        "Share of requests times steps by number of draft tokens.",
        plot,
        [numbers.lengths_table(arms)],
        _legend(plot),
    )


def _latency(arms: Sequence[ArmResult], name: str) -> Figure:
    titles = {
        "ttft_seconds": ("Time to first token", "From submission to the first token."),
        "tpot_seconds": ("Time per output token", "Mean over a request, after its first."),
        "e2e_seconds": ("End-to-end latency", "From submission to the last token."),
    }
    title, meaning = titles[name]
    return Figure(
        name.removesuffix("_seconds"),
        title,
        f"{meaning} Share of requests that took at most so long; further left is better.",
        plots.latency_plot(arms, name),
        [numbers.latency_table(arms, name)],
        width="third",
    )


def _times(arms: Sequence[ArmResult]) -> Figure:
    return Figure(
        "time",
        "Where the time went",
        "Shares of the sampled steps' time. Overhead is what is neither drafting, verifying nor "
        "deciding: packing, sampling, the host.",
        plots.time_plot(arms),
        [numbers.time_table(arms)],
        [LegendEntry(name, f"part-{index}") for index, name in enumerate(plots.TIMES)],
    )


def _step_time(arms: Sequence[ArmResult]) -> Figure:
    return Figure(
        "steptime",
        "Predicted against measured step time",
        "One point per sampled step. On the line, the step took as long as the planner believed; "
        "above it, longer.",
        plots.step_time_plot(arms),
        [numbers.step_time_table(arms)],
        width="half",
    )


def _roofline(arms: Sequence[ArmResult]) -> Figure:
    source = next((arm.roofline.source for arm in arms if arm.roofline), "")
    return Figure(
        "roofline",
        "Roofline",
        "Achieved FLOP/s of the verifying forward by its arithmetic intensity, one point per "
        "sampled step. Left of the ridge memory limits, right of it arithmetic."
        + (f" Ceilings: {source}." if source else ""),
        plots.roofline_plot(arms),
        [numbers.roofline_table(arms)],
        width="half",
    )
