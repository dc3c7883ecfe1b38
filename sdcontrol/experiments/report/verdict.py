"""The verdict as the page sets it: one large sentence, the rest below, each with its numbers.

Says nothing of its own: the sentences come from the statistics, and all of their words are kept.
"""

import re
from dataclasses import dataclass

from sdcontrol.experiments.report.tables import comparison_id
from sdcontrol.experiments.results import Results

__all__ = ["Verdict", "verdict_of"]

_BRACKETED = re.compile(r"\s*\(([^()]*)\)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first sentence without its brackets, what stood in them, and further sentences."""

    headline: str
    aside: str
    link: str  # anchor of the headline's numbers
    rest: tuple[tuple[str, str], ...]  # (sentence, anchor of its numbers or "")


def verdict_of(results: Results) -> Verdict:
    """Links a sentence to the comparison that says the same, the headline at least to the first."""
    links = {c.sentence.strip(): comparison_id(c, results) for c in results.comparisons}
    first, *rest = _sentences(results)
    fallback = comparison_id(results.comparisons[0], results) if results.comparisons else "metrics"
    return Verdict(
        headline=_BRACKETED.sub("", first),
        aside="; ".join(_BRACKETED.findall(first)),
        link=links.get(first, fallback),
        rest=tuple((sentence, links.get(sentence, "")) for sentence in rest),
    )


def _sentences(results: Results) -> list[str]:
    """Those of the verdict; the full stop at the end of an arm's name ends none."""
    names = [arm.name for arm in results.arms if arm.name.endswith(".")]
    no_name = "".join(rf"(?<!\b{re.escape(name)})" for name in names)
    return re.split(rf"(?<=\.){no_name}\s+", results.verdict.strip())
