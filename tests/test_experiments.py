"""Comparisons: the statistics, the page, and the demonstration as a whole."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.compare import paired_ratio
from sdcontrol.experiments.report import RunFacts, write_report

positive = st.floats(0.01, 100.0)


@given(st.lists(positive, min_size=1, max_size=20), st.floats(0.1, 10.0))
def test_a_constant_speedup_is_found_exactly(times: list[float], factor: float) -> None:
    ratio = paired_ratio([t * factor for t in times], times)
    assert ratio.median == pytest.approx(factor)
    assert ratio.low == pytest.approx(factor)
    assert ratio.high == pytest.approx(factor)


def test_drift_that_slows_both_arms_alike_does_not_show() -> None:
    drift = np.linspace(1.0, 5.0, 12)
    assert paired_ratio(1.2 * drift, drift).median == pytest.approx(1.2)


def test_the_interval_covers_the_true_median() -> None:
    """200 simulated runs of 15 blocks; 95 % intervals must cover in at least 85 % (false alarm
    below 1e-6 were the coverage really 95 %)."""
    rng = np.random.default_rng(7)
    covered = 0
    for seed in range(200):
        noise = np.exp(rng.normal(0.0, 0.1, 15))
        ratio = paired_ratio(1.1 * noise, np.ones(15), seed=seed)
        covered += ratio.low <= 1.1 <= ratio.high
    assert covered >= 170


@pytest.mark.parametrize("bad", [[0.0], [float("nan")], [-1.0], [], [1.0, 2.0]])
def test_measurements_that_cannot_be_paired_are_refused(bad: list[float]) -> None:
    with pytest.raises(ConfigError):
        paired_ratio(bad, [1.0])


class _Page(HTMLParser):
    """Collects text, and whatever the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def _facts() -> RunFacts:
    return {
        "machine": "x",
        "threads": 2,
        "versions": {"torch": "1"},
        "differing_texts": 0,
        "verdict": "faster <script>alert(1)</script>",
        "arms": [
            {
                "policy": "goodput",
                "description": "adaptive",
                "speed": {"median": 1.5, "low": 1.4, "high": 1.6},
                "tokens_per_second": [1.0],
                "tokens_per_step": 2.0,
                "seconds": {"verify": 1.0},
                "lengths": {"off": 3, "ngram 4": 2},
            }
        ],
    }


def test_the_report_stands_alone_and_escapes_what_it_shows(tmp_path: Path) -> None:
    page = _Page()
    html = write_report(tmp_path / "report.html", _facts()).read_text(encoding="utf-8")
    page.feed(html)
    assert "<script" not in html
    assert page.fetched == []
    assert "1.50x" in page.text
    assert "ngram 4" in page.text


def test_the_demonstration_compares_all_policies_and_finds_the_same_text(tmp_path: Path) -> None:
    from sdcontrol.experiments import demo

    code = demo.main(["--blocks", "1", "--tokens", "6", "--output", str(tmp_path)])
    facts = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert code == 0
    assert [arm["policy"] for arm in facts["arms"]] == list(demo.ARMS)
    assert facts["differing_texts"] == 0
    assert all(arm["speed"]["num_blocks"] == 1 for arm in facts["arms"])
    assert (tmp_path / "report.html").stat().st_size > 1000
