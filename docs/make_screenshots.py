"""Make the README's pictures of a report, in a headless Chromium.

    python docs/make_screenshots.py runs/demo/report.html [--output docs/images]

Needs playwright (`pip install playwright`) and a Chromium: `SDCONTROL_CHROMIUM` may name it,
otherwise it is looked for. Knows the page's ids, nothing of what it says.
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FloatRect, Page

SIZES = {"desktop": (1280, 900), "phone": (360, 800)}
SCHEMES = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main() -> None:
    """Make all pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path, help="a run's report.html")
    parser.add_argument("--output", type=Path, default=Path("docs/images"), help="folder")
    options = parser.parse_args()
    if not options.report.is_file():
        parser.error(f"{options.report} does not exist; make it with `make demo`")
    chromium = os.environ.get("SDCONTROL_CHROMIUM") or next(
        filter(None, map(shutil.which, BROWSERS)), ""
    )
    if not chromium:
        parser.error("no Chromium found; install it, or name it in SDCONTROL_CHROMIUM")
    options.output.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path in take(browser, options.report.resolve(), options.output):
            print(path)
        browser.close()


def take(browser: "Browser", report: Path, folder: Path) -> list[Path]:
    """The top of the page at each size, and the choices over time; all in light and dark."""
    made = []
    for scheme in SCHEMES:
        for size, (width, height) in SIZES.items():
            page = browser.new_page(
                viewport={"width": width, "height": height},
                device_scale_factor=2 if size == "phone" else 1,
                color_scheme=scheme,  # type: ignore[arg-type]  # one of two literals
            )
            page.goto(report.as_uri())
            made.append(folder / f"report-{size}-{scheme}.png")
            page.screenshot(path=made[-1])
            if size == "desktop" and page.locator("#choices").count():
                made.append(folder / f"report-choices-{scheme}.png")
                page.screenshot(path=made[-1], full_page=True, clip=_over_time(page))
            page.close()
    return made


def _over_time(page: "Page") -> "FloatRect":
    """The throughput and, beneath it, the choices."""
    boxes = [page.locator(f"#{name}").bounding_box() for name in ("throughput", "choices")]
    top, bottom = boxes
    assert top
    assert bottom
    end = bottom["y"] + bottom["height"]
    margin = 24
    return {
        "x": top["x"] - margin,
        "y": top["y"] - margin,
        "width": top["width"] + 2 * margin,
        "height": end - top["y"] + 2 * margin,
    }


if __name__ == "__main__":
    main()
