"""One self-contained HTML page about a comparison."""

from sdcontrol.experiments.report.page import render, write_report

__all__ = ["render", "write_report"]
