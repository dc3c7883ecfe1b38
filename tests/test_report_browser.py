"""The page in a real browser: what it logs, loads and draws, and how its controls react.

Needs playwright and a Chromium: `SDCONTROL_CHROMIUM` may name it, otherwise it is looked for.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sdcontrol.experiments.report import write_report
from tests.report_support import POLICIES, make_results

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE = {"width": 360, "height": 800}
DESKTOP = {"width": 1280, "height": 900}
PATIENCE_MS = 120_000  # other work may have the machine
NASTY = "</script><img src=x onerror=alert(1)>"
LINES = "path.line, path.dots, path.area, rect.area, rect.slice, circle.knob"

Open = Callable[..., "Page"]


def chromium_path() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = (shutil.which(name) for name in names)
    return os.environ.get("SDCONTROL_CHROMIUM") or next(filter(None, found), "")


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not chromium_path():
        pytest.skip("no Chromium found; install it, or name it in SDCONTROL_CHROMIUM")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(
            executable_path=chromium_path(),
            args=["--no-sandbox", "--disable-gpu"],
            timeout=PATIENCE_MS,
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(
        tmp_path_factory.mktemp("report") / "report.html", make_results(num_steps=600)
    )


@pytest.fixture
def opened(browser: "Browser", report: Path) -> Iterator[Open]:
    """Opens a page; at the end it must have logged and requested nothing."""
    noise: list[str] = []
    contexts = []

    def opened(path: Path = report, viewport: Any = DESKTOP, **settings: Any) -> "Page":
        context = browser.new_context(viewport=viewport, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: noise.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: noise.append(f"error: {error}"))
        page.on("dialog", lambda dialog: noise.append(f"dialog: {dialog.message}"))
        page.on("request", lambda asked: asked.url == path.as_uri() or noise.append(asked.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not noise


def shapes(page: "Page") -> dict[str, str]:
    """What every plot has drawn."""
    return dict(
        page.eval_on_selector_all(".plot", "all => all.map(plot => [plot.id, plot.innerHTML])")
    )


def overflow(page: "Page") -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_every_plot_is_drawn_and_nothing_is_wider_than_the_screen(
    opened: Open, viewport: Any
) -> None:
    page = opened(viewport=viewport)
    assert page.locator(".plot").count() == 11
    for plot in page.locator(".plot").all():
        assert plot.locator(LINES).count() > 0, plot.get_attribute("id")
    assert overflow(page) <= 0
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    assert overflow(page) <= 0


def test_long_names_do_not_widen_a_phones_page(opened: Open, tmp_path: Path) -> None:
    results = make_results(("off", "x" * 90, NASTY * 3, "goodput"), num_steps=100)
    page = opened(write_report(tmp_path / "r.html", results), viewport=PHONE)
    assert overflow(page) <= 0
    bar = page.locator(".arms").bounding_box()
    button = page.locator("button.arm").first.bounding_box()
    assert bar
    assert button
    assert bar["y"] <= button["y"]


def test_names_that_are_markup_run_nothing(opened: Open, tmp_path: Path) -> None:
    results = make_results(
        ("off", NASTY, "goodput"),
        num_steps=200,
        title=NASTY,
        verdict=f"{NASTY} won.",
        notes=[NASTY],
    )
    page = opened(write_report(tmp_path / "r.html", results))
    assert page.locator("img").count() == 0
    assert page.locator("button.arm").nth(1).inner_text() == NASTY
    page.locator("#throughput-plot").hover()
    assert NASTY in page.locator("#tip").inner_text()


def test_a_button_takes_its_arm_out_of_every_plot_and_brings_it_back(opened: Open) -> None:
    page = opened()
    before = shapes(page)
    button = page.locator("button.arm", has_text="goodput")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    after = shapes(page)
    assert {name for name in before if before[name] != after[name]} == set(before)
    assert page.locator('.plot [data-arm="2"]').count() == 0
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert shapes(page) == before


def test_without_any_arm_the_plots_say_so(opened: Open) -> None:
    page = opened()
    for button in page.locator("button.arm").all():
        button.click()
    assert page.locator(".plot .empty").count() == page.locator(".plot").count()


def test_the_metric_of_the_plot_by_block_can_be_chosen(opened: Open) -> None:
    page = opened()
    before = shapes(page)
    page.get_by_label("Metric", exact=True).select_option(label="TPOT p50")
    after = shapes(page)
    assert {name for name in before if before[name] != after[name]} == {"blocks-plot"}
    assert "TPOT p50, ratio to off" in page.locator("#blocks-plot").inner_text()


def test_arrow_keys_read_a_plot_and_escape_leaves_it(opened: Open) -> None:
    page = opened()
    plot, tip = page.locator("#blocks-plot"), page.locator("#tip")
    plot.focus()
    assert tip.is_hidden()
    page.keyboard.press("ArrowRight")
    assert tip.is_visible()
    first = tip.inner_text()
    assert first.startswith("Block 1\n")
    assert "goodput" in first
    assert "baseline repeated" in first
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("Block 2\n")
    page.keyboard.press("End")
    assert tip.inner_text().startswith("Block 12\n")
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_the_pointer_reads_every_plot(opened: Open) -> None:
    page = opened()
    tip = page.locator("#tip")
    for plot, words in {
        "throughput": "tokens/s",
        "choices": "%",
        "ttft": "ms",
        "lengths": "%",
        "time": "verify",
        "steptime": "Predicted",
        "roofline": "FLOPs/byte",
    }.items():
        page.locator(f"#{plot}-plot").hover()
        assert tip.is_visible()
        assert words in tip.inner_text(), plot
        page.mouse.move(1, 1)
        assert tip.is_hidden()


def test_the_reading_stays_on_the_screen_of_a_phone(opened: Open) -> None:
    page = opened(viewport=PHONE, has_touch=True)
    for name in ("throughput", "roofline", "blocks"):
        page.locator(f"#{name}-plot").focus()
        for key in ("Home", "End"):
            page.keyboard.press(key)
            box = page.locator("#tip").bounding_box()
            assert box
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= PHONE["width"]
    page.locator("#blocks-plot").tap()
    assert page.locator("#tip").is_visible()
    page.locator("h1").tap()
    assert page.locator("#tip").is_hidden()
    assert overflow(page) <= 0


def test_a_press_on_a_head_sorts_the_table_and_another_turns_it_round(opened: Open) -> None:
    page = opened()
    table = page.locator("#comparisons-table")
    head = table.locator("th", has_text="Ratio")

    def ratios() -> list[float]:
        return [float(text) for text in table.locator("tbody tr td:nth-child(4)").all_inner_texts()]

    unsorted = ratios()
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert ratios() == sorted(unsorted) != unsorted
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert ratios() == sorted(unsorted, reverse=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_until_the_button_is_pressed(opened: Open, scheme: Any) -> None:
    page = opened(color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('#throughput-plot .line')).stroke"
    colours = {"light": "rgb(252, 252, 250)", "dark": "rgb(20, 22, 26)"}
    assert page.evaluate(paper) == colours[scheme]
    drawn = page.evaluate(line)
    button = page.locator("#theme")
    assert button.get_attribute("aria-pressed") == str(scheme == "dark").lower()
    button.click()
    assert page.evaluate(paper) == colours["light" if scheme == "dark" else "dark"]
    assert page.evaluate(line) != drawn
    assert button.get_attribute("aria-pressed") == str(scheme != "dark").lower()


def test_the_tab_key_reaches_every_control_in_the_order_of_the_page(opened: Open) -> None:
    page = opened()
    reached, tops = [], []
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline, top = page.evaluate(
            "(() => { const e = document.activeElement; const s = getComputedStyle(e);"
            "return [e.id || e.textContent, s.outlineStyle, e.getBoundingClientRect().top + scrollY] })()"
        )
        assert outline != "none", name
        reached.append(name)
        tops.append(top)
    assert reached[:2] == ["To the content", "theme"]
    assert {*POLICIES[:4], "ratios-plot", "throughput-plot", "blocks-plot", "metric"} <= set(
        reached
    )
    plots = [top for name, top in zip(reached, tops, strict=True) if name.endswith("-plot")]
    assert plots == sorted(plots)


def test_a_link_opens_the_table_it_leads_into(opened: Open) -> None:
    page = opened()
    page.evaluate("location.hash = '#blocks-table-1'")
    page.wait_for_selector("#blocks-numbers[open]")
    page.get_by_role("link", name="The numbers behind this").click()
    assert page.evaluate("document.querySelector(':target').id") == "comparison-0"


def test_images_controls_and_tables_have_names(opened: Open) -> None:
    page = opened()
    unnamed = page.evaluate(
        """() => {
          const named = (e) => (e.getAttribute("aria-labelledby") ?? "").split(" ").some(
            (id) => document.getElementById(id)?.textContent.trim());
          const bad = [];
          for (const e of document.querySelectorAll("svg")) {
            if (e.getAttribute("role") !== "img" || !named(e) || !e.querySelector("title, desc")) bad.push(e);
          }
          for (const e of document.querySelectorAll("button, summary, a")) if (!e.textContent.trim()) bad.push(e);
          for (const e of document.querySelectorAll("select, input")) if (!e.labels.length) bad.push(e);
          for (const e of document.querySelectorAll("table, [role=group], [role=region]")) {
            if (!named(e) && !e.getAttribute("aria-label") && !e.closest("table")) bad.push(e);
          }
          for (const e of document.querySelectorAll("th")) if (!e.scope) bad.push(e);
          return bad.map((e) => e.outerHTML.slice(0, 120));
        }"""
    )
    assert unnamed == []
    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_reduced_motion_is_respected(opened: Open) -> None:
    scrolling = "getComputedStyle(document.documentElement).scrollBehavior"
    assert opened(reduced_motion="reduce").evaluate(scrolling) == "auto"
    assert opened(reduced_motion="no-preference").evaluate(scrolling) == "smooth"


def test_print_is_light_and_without_controls(opened: Open) -> None:
    page = opened(color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#theme").is_hidden()
    assert page.locator("#throughput-plot svg").is_visible()


def test_without_scripts_the_numbers_are_there(opened: Open) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator("h1").is_visible()
    assert page.locator("#metrics-table").is_visible()
    assert page.locator(".arms").is_hidden()
    assert page.get_by_text("The plot needs JavaScript").first.is_visible()


def test_five_arms_of_two_thousand_steps_are_redrawn_within_a_fifth_of_a_second(
    opened: Open, tmp_path: Path
) -> None:
    """Of the page's own CPU time, the best of five: what else the machine does is no fault of it."""
    path = write_report(tmp_path / "r.html", make_results(POLICIES, num_steps=2000))
    page = opened(path)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu_seconds() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        spent = {metric["name"]: metric["value"] for metric in metrics}
        return spent["ScriptDuration"] + spent["LayoutDuration"] + spent["RecalcStyleDuration"]

    took = []
    for _ in range(5):
        before = cpu_seconds()
        page.evaluate(
            """() => {
              document.querySelector("button.arm").click();
              document.body.getBoundingClientRect();
            }"""
        )
        took.append(cpu_seconds() - before)
    assert 0.0 < min(took) < 0.2
