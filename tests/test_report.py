"""The page of a comparison: what it says, what it escapes, what it never loads."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.report import render, write_report
from sdcontrol.experiments.report.quantities import DASH, label_of, scale_of
from sdcontrol.experiments.report.timeline import bin_seconds, bins_of, choice_of, own_seconds
from sdcontrol.experiments.report.verdict import verdict_of
from sdcontrol.experiments.results import Results
from tests.report_support import POLICIES, make_results

TEMPLATES = Path(__file__).resolve().parent.parent / "sdcontrol/experiments/report/templates"
STYLE = TEMPLATES / "style.css"
NASTY = "</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}<!--"


class Page(HTMLParser):
    """The tags, ids, links and words of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        """All words, one space between them."""
        return " ".join(" ".join(self.words).split())

    @property
    def ids(self) -> list[str]:
        """Every id, in order."""
        return [i for _, attributes in self.tags if (i := attributes.get("id"))]

    def count(self, tag: str) -> int:
        """How many there are."""
        return sum(name == tag for name, _ in self.tags)


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def html() -> str:
    return render(make_results(num_steps=400))


def test_it_says_the_verdict_first_and_once(html: str) -> None:
    page = Page(html)
    assert page.count("h1") == 1
    start = html.index("<h1")
    heading = " ".join(Page(html[start : html.index("</h1>")]).text.split())
    assert heading.startswith("The adaptive policy ran 1.42 times as fast")
    assert start < html.index('id="ratios"')


def test_every_link_leads_to_a_place_in_the_page_and_every_id_is_its_own(html: str) -> None:
    page = Page(html)
    targets = [a["href"] for tag, a in page.tags if tag == "a"]
    assert len(targets) > 20
    assert all(target and target.startswith("#") for target in targets)
    assert {target[1:] for target in targets if target} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)


def test_what_describes_an_element_exists(html: str) -> None:
    page = Page(html)
    named = [a["aria-labelledby"] for _, a in page.tags if a.get("aria-labelledby")]
    assert len(named) > 10
    assert {name for names in named if names for name in names.split()} <= set(page.ids)


def test_the_claim_stands_beside_its_numbers(html: str) -> None:
    results = make_results(num_steps=400)
    first = results.comparisons[0]
    row = html[html.index('id="comparison-0"') :]
    words = Page(row[: row.index("</tr>")]).text
    assert first.arm in words
    assert f"{first.ratio.value:.3f}" in words
    assert f"{first.ratio.low:.3f} to {first.ratio.high:.3f}" in words
    assert "faster" in words


def test_every_plot_has_its_table(html: str) -> None:
    plots = data_of(html)["plots"]
    assert set(plots) == {
        "ratios", "throughput", "choices", "blocks", "lengths", "ttft", "tpot", "e2e", "time",
        "steptime", "roofline",
    }  # fmt: skip
    ids = Page(html).ids
    assert all(f"{name}-table-1" in ids for name in plots)


def test_nothing_is_loaded_and_only_the_pages_own_script_may_run(html: str) -> None:
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & {
        t for t, _ in page.tags
    }
    assert not any(name in a for _, a in page.tags for name in ("src", "style", "action", "srcset"))
    assert not any(name.startswith("on") for _, a in page.tags for name in a)
    addresses = set(re.findall(r"https?://[^\s\"'<]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nothing fetches
    assert "@import" not in html
    assert "url(" not in html
    [policy] = [a["content"] for _, a in page.tags if a.get("http-equiv")]
    assert policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        [source] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_equal_results_give_the_same_page(tmp_path: Path) -> None:
    results = make_results(num_steps=200)
    path = write_report(tmp_path / "deep" / "report.html", results)
    again = Results.load(results.dump(tmp_path / "results.json"))
    assert path.read_text("utf-8") == render(results) == render(again)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"{}", "is no comparison's results: "),
        (b"\xff\xfe", "is no UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_results_is_refused_in_one_line(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        Results.load(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


def test_five_arms_of_two_thousand_steps_fit_into_a_page_of_a_megabyte_and_a_half() -> None:
    results = make_results(POLICIES, num_steps=2000)
    assert sum(len(arm.steps.time_seconds) for arm in results.arms) > 9900
    assert len(render(results).encode()) < 1_500_000


def test_names_that_are_markup_stay_words() -> None:
    clean = Page(render(make_results(num_steps=100)))
    results = make_results(
        ("off", NASTY, "goodput", f"{NASTY} again"),
        num_steps=100,
        title=NASTY,
        verdict=f"{NASTY} ran faster.",
        notes=[NASTY],
        config={NASTY: [NASTY, {"deep": NASTY}]},
        stopping={"num_blocks": 1, "planned_blocks": 2, "reason": NASTY},
        texts={
            "num_compared": 3,
            "num_differing": 1,
            "first_differences": [{"arm": NASTY, "request": NASTY, "position": 2}],
        },
    )
    html = render(results)
    page = Page(html)
    assert page.count("script") == clean.count("script") == 2
    assert page.count("img") == 0
    assert data_of(html)["arms"][1]["name"] == NASTY
    assert NASTY in "".join(page.words)


@settings(max_examples=12, deadline=None)
@given(name=st.text(min_size=1, max_size=30))
def test_any_name_comes_through_as_it_was(name: str) -> None:
    results = make_results((name, f"other {name}"), num_blocks=2, num_steps=20)
    html = render(results)
    assert data_of(html)["arms"][0]["name"] == name
    assert Page(html).count("script") == 2


def test_a_simulated_run_says_so_and_a_measured_one_does_not(html: str) -> None:
    simulated = Page(render(make_results(num_steps=100, is_simulated=True)))
    assert "Simulated. These numbers come from a model" in simulated.text
    assert "How it was simulated" in simulated.text
    assert "imulated" not in Page(html).text


def test_a_partial_run_says_how_much_is_missing() -> None:
    stopping = {"num_blocks": 3, "planned_blocks": 12, "reason": "interrupted"}
    page = Page(render(make_results(num_steps=100, is_complete=False, stopping=stopping)))
    assert "Partial. 3 of 12 planned blocks so far" in page.text


def test_a_failed_arm_is_shown_with_its_reason() -> None:
    facts = make_results(num_steps=100).model_dump(mode="json")
    arm = {"name": "broken", "description": "", "policy": {}, "failed": "CacheExhausted: 9 blocks"}
    results = Results.model_validate(facts | {"arms": [*facts["arms"], arm]})
    html = render(results)
    assert "broken failed. CacheExhausted: 9 blocks" in Page(html).text
    assert data_of(html)["arms"][-1]["name"] == "broken"


def test_differing_texts_are_listed() -> None:
    texts = {
        "num_compared": 9,
        "num_differing": 2,
        "first_differences": [{"arm": "goodput", "request": "code-7", "position": 41}],
    }
    page = Page(render(make_results(num_steps=100, texts=texts)))
    assert "differs 2 of 9 outputs" in page.text
    assert "goodput code-7 41" in page.text


def test_a_run_that_has_barely_begun_has_a_page() -> None:
    bare = [{"name": "off", "description": "", "policy": {"kind": "off"}}]
    results = make_results(
        num_steps=100,
        arms=bare,
        comparisons=[],
        drift=None,
        texts={"num_compared": 0, "num_differing": 0},
        is_complete=False,
    )
    html = render(results)
    assert set(data_of(html)["plots"]) == {"ratios"}
    assert "No block has been counted yet." in Page(html).text
    render(results.model_copy(update={"arms": ()}))


def test_links_of_a_run_of_one_arm_lead_somewhere() -> None:
    page = Page(render(make_results(("off",), num_steps=100)))
    targets = {str(a["href"])[1:] for tag, a in page.tags if tag == "a"}
    assert targets <= set(page.ids)


def test_only_comparisons_with_the_baseline_mark_the_metrics() -> None:
    facts = make_results(num_steps=100).model_dump(mode="json")
    pair = facts["comparisons"][0] | {"arm": "goodput", "baseline": "static:ngram:4"}
    pair["ratio"] = {"value": 9.0, "low": 8.0, "high": 10.0}
    results = Results.model_validate(facts | {"comparisons": [*facts["comparisons"], pair]})
    html = render(results)
    plots = data_of(html)["plots"]
    assert [row["arm"] for row in plots["ratios"]["rows"]] == [1, 2, 3]
    drawn = [*plots["ratios"]["rows"], *plots["blocks"]["choices"][0]["intervals"]]
    assert all(row["value"] != 9 for row in drawn)
    row = html[html.index(f'id="comparison-{len(facts["comparisons"])}"') :]
    assert "9.000" in row[: row.index("</tr>")]


def test_a_ratio_is_printed_alike_in_the_plot_and_in_the_tables() -> None:
    """The page rounds what it is given: 1.305 for 1.30502 would be printed as 1.30."""
    facts = make_results(num_steps=100).model_dump(mode="json")
    facts["comparisons"][0]["ratio"] = {"value": 1.30502, "low": 1.09505, "high": 1.4}
    (row, *_) = data_of(render(Results.model_validate(facts)))["plots"]["ratios"]["rows"]
    assert (f"{row['low']:.2f}", f"{row['value']:.2f}") == ("1.10", "1.31")


def test_an_interval_is_said_to_be_as_sure_as_it_is() -> None:
    """Comparisons have what alpha leaves; metrics and drift have 95 %, whatever alpha is."""
    results = make_results(num_steps=100, config={"stopping": {"alpha": 0.01}})
    html = render(results)
    for table in ("ratios-table-1", "comparisons-table"):
        start = html.index(f'<table id="{table}"')
        assert "99 % interval" in Page(html[start : html.index("</thead>", start)]).text
    assert "with its 99 % interval over blocks" in Page(html).text
    assert data_of(html)["plots"]["ratios"]["confidence"] == "99 %"
    assert Page(html).text.count("95 % interval") == 3  # metrics, drift, the made-up verdict
    assert "99 % interval" not in render(make_results(num_steps=100))


def test_percentiles_of_one_metric_have_one_unit() -> None:
    facts = make_results(num_steps=100).model_dump(mode="json")
    for arm in facts["arms"]:
        like = next(iter(arm["metrics"].values())) | {"unit": "s", "higher_is_better": False}
        for name, value in (("p50", 0.55), ("p90", 0.8), ("p99", 1.2)):
            seconds = {"value": value, "low": value / 2, "high": value * 2}
            arm["metrics"][f"ttft_seconds_{name}"] = like | seconds
    text = Page(render(Results.model_validate(facts))).text
    assert len(re.findall(r"TTFT p\d+ s, lower is better", text)) == 3


# What is drawn


def test_the_drawn_shares_of_every_bin_add_up_to_one(html: str) -> None:
    rows = data_of(html)["plots"]["choices"]["rows"]
    sums = [sum(shares) for row in rows for _, shares in row["bins"]]
    assert len(sums) > 100
    np.testing.assert_allclose(sums, 1, atol=2e-3)


def test_an_arms_own_clock_holds_its_counted_blocks_end_to_end() -> None:
    arm = make_results(num_steps=500).arms[1]
    own = own_seconds(arm)
    counted = [block for block in arm.blocks if not block.is_warmup]
    known = own[np.isfinite(own)]
    assert np.isnan(own).sum() == own.size // len(arm.blocks)  # one warm-up block
    assert (np.diff(known) >= 0).all()
    assert known[0] == 0
    assert sum(b.seconds for b in counted[:-1]) < known[-1] < sum(b.seconds for b in counted)


def test_bins_of_all_arms_are_of_one_width_and_in_order() -> None:
    arms = make_results(num_steps=900).arms
    width = bin_seconds(arms)
    for arm in arms:
        starts = [b.start_seconds for b in bins_of(arm, width)]
        assert 5 < len(starts) <= 80
        assert all(later - earlier > width * 0.99 for earlier, later in pairwise(starts))


@given(drafter=st.text(min_size=1), length=st.integers(1, 99))
def test_a_choice_is_read_as_it_was_written(drafter: str, length: int) -> None:
    choice = choice_of(f"{drafter} {length}")
    assert (choice.drafter, choice.num_draft_tokens) == (drafter, length)
    assert choice_of("off").num_draft_tokens == 0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2e-5, "s", "20.0 µs"),
        (1234.5, "tokens/s", "1,234 tokens/s"),
        (0.421, "share", "42.1 %"),
        (3 * 2.0**30, "bytes", "3.00 GiB"),
        (5.4e10, "FLOPs/s", "54.0 GFLOP/s"),
        (None, "s", "\N{EN DASH} s"),
    ],
)
def test_numbers_have_three_digits_and_a_fitting_unit(
    value: float | None, unit: str, text: str
) -> None:
    assert scale_of([value], unit).text_with_unit(value) == text


def test_names_of_metrics_are_words() -> None:
    assert label_of("ttft_seconds_p99") == "TTFT p99"
    assert label_of("tokens_per_second") == "Output tokens per second"
    assert label_of("peak_memory_bytes") == "Peak memory"


def test_many_arms_share_the_points_of_a_plot() -> None:
    arm = make_results(num_steps=2000).arms[2]
    arms = [arm.model_copy(update={"name": f"arm {i}"}) for i in range(12)]
    results = make_results(num_steps=20, arms=[one.model_dump() for one in arms])
    series = data_of(render(results))["plots"]["roofline"]["series"]
    drawn = [len(one["stretches"][0]) for one in series]
    assert len(drawn) == 12
    assert 5_000 < sum(drawn) <= 10_000 + len(drawn)


# Colours


def palette() -> dict[str, tuple[str, str]]:
    """Name of a colour to (in light, in dark)."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", STYLE.read_text("utf-8"))
    return {name: (light, dark) for name, light, dark in found}


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    """WCAG 2.2, from 1 to 21."""
    bright, dim = sorted(linear(c) @ (0.2126, 0.7152, 0.0722) for c in (first, second))[::-1]
    return float((bright + 0.05) / (dim + 0.05))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_marks_stand_out_from_the_paper(scheme: int) -> None:
    colours = {name: pair[scheme] for name, pair in palette().items()}
    words = {"ink-strong", "ink-soft", "link", "gain", "loss"}
    marks = {name for name in colours if re.match(r"(arm|drafter|part)-\d", name)}
    assert len(marks) == 8 + 6 + 4
    for paper in ("paper", "raised"):
        assert min(contrast(colours[name], colours[paper]) for name in words) >= 4.5
        assert min(contrast(colours[name], colours[paper]) for name in marks) >= 3


DEUTERANOPIA = np.array(  # this and the next: Machado, Oliveira, Fernandes (2009), severity 1
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)
PROTANOPIA = np.array(
    [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]
)
TO_CONES = np.array(  # this and the next: Oklab, Ottosson (2020)
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eye", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["all", "no M", "no L"])
def test_arms_are_told_apart_whatever_cones_an_eye_has(eye: np.ndarray, scheme: int) -> None:
    """Distances in Oklab, where white is 1 from black."""
    seen = [
        TO_OKLAB @ np.cbrt(TO_CONES @ np.clip(eye @ linear(palette()[f"arm-{i}"][scheme]), 0, 1))
        for i in range(8)
    ]
    apart = {(i, j): float(np.linalg.norm(seen[i] - seen[j])) for i, j in combinations(range(8), 2)}
    assert min(apart.values()) > 0.07
    assert min(distance for (_, j), distance in apart.items() if j < 5) > 0.12


def test_a_name_that_ends_in_a_full_stop_ends_no_sentence() -> None:
    verdict = "v1.2. is faster than off.: 1.2x (in 9 of 12). It ended. All is well."
    found = verdict_of(make_results(["off.", "v1.2."], num_steps=50, verdict=verdict))
    assert (found.headline, found.aside) == ("v1.2. is faster than off.: 1.2x.", "in 9 of 12")
    assert [sentence for sentence, _ in found.rest] == ["It ended.", "All is well."]


@pytest.mark.parametrize("metric", ["tokens_per_second", "ttft_seconds_p50"])
def test_the_baselines_second_run_stands_beside_the_metric_that_it_is_of(metric: str) -> None:
    results = make_results(num_steps=50)
    assert results.drift is not None
    drift = results.drift.model_copy(update={"metric": metric})
    page = render(results.model_copy(update={"drift": drift}))
    assert data_of(page)["plots"]["blocks"]["drift"]["metric"] == label_of(metric)
    assert f"{label_of(metric)}: the second run was at 1.0010" in Page(page).text
    table = page[page.index('<table id="blocks-table-1"') :]
    rows = [Page(row).text for row in table[: table.index("</table>")].split("<tr>")[2:]]
    of_drift = [row.startswith(label_of(metric)) for row in rows]
    assert 0 < sum(of_drift) < len(rows)
    assert [not row.endswith(DASH) for row in rows] == of_drift


DRAWN = """
const drawn = [];
const page = { data: JSON.parse(process.argv[1]), shown: { has: () => true } };
function canvas(host, width, height) { drawn.length = 0; return { height }; }
function draw(parent, tag, attributes = {}) {
  if (attributes.class?.endsWith(" label")) drawn.push([attributes.y, parent.height]);
  return {};
}
const [plot, width] = [page.data.plot, 1000];
PLOTS.chart({ clientWidth: width }, plot);
console.log(JSON.stringify(drawn));
"""


def names_beside(ends: list[float]) -> tuple[list[float], float]:
    """Where the names at the ends of an arm's lines stand, from above, and how high the plot is."""
    series = [{"arm": arm, "stretches": [[[0, 1], [1, end]]]} for arm, end in enumerate(ends)]
    axis = {"label": "Output", "unit": "tokens/s", "zero": True}
    arms = [{"name": f"arm-{arm}", "color": 1} for arm in range(len(ends))]
    plot = {"kind": "chart", "pick": "x", "x": axis, "y": axis, "series": series}
    sources = {name: (TEMPLATES / f"{name}.js").read_text("utf-8") for name in ("core", "axes")}
    scripts = [
        sources["core"].partition("function draw(")[0],
        "const px = (value) => Math.round(value * 10) / 10;\nconst shorten = (text) => text;\n",
        "function domainOf" + sources["axes"].partition("function domainOf")[2],
        *((TEMPLATES / f"{name}.js").read_text("utf-8") for name in ("marks", "plots")),
    ]
    data = json.dumps({"arms": arms, "plot": plot})
    command = [shutil.which("node") or "node", "-e", "\n".join([*scripts, DRAWN]), data]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    drawn = json.loads(found.stdout)
    return [y for y, _ in drawn], drawn[0][1]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(
    "ends",
    [[1.0] * 30, [9.0, *[0.1] * 8], [*[9.0] * 8, 0.1], [1.0, 2.0], [*range(1, 31)]],
    ids=["thirty", "one above", "one below", "two", "spread"],
)
def test_names_at_the_ends_of_lines_stand_apart_and_within_the_plot(ends: list[float]) -> None:
    places, height = names_beside(ends)
    assert len(places) == len(ends)
    assert all(after - before >= 15.8 for before, after in pairwise(places))
    assert places[0] > 30
    assert places[-1] < height - 30
