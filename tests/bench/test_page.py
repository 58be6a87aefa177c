# SPDX-License-Identifier: Apache-2.0
"""The result's page in a browser: plots drawn, nothing fetched, nothing wrong, readable when wide and when narrow."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.results import SETTINGS, lines
from vllm_dflash.bench import charts, report
from vllm_dflash.bench.summary import summarise

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        missing = "no Chromium here; on Debian: apt-get install chromium"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(browser: Any, tmp_path: Path, width: int) -> None:
    html = report.as_html(summarise(lines(), SETTINGS, {"eagle3": "It ended.\n<b>Error</b>"}))
    (tmp_path / "result.html").write_text(html)
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{tmp_path / 'result.html'}")
    page.wait_for_load_state("load")
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.locator("svg.plot").count() == html.count('class="plot"') >= 7
    boxes = page.evaluate(
        """() => [...document.querySelectorAll('svg.plot')].map(svg => ({
            width: svg.getBoundingClientRect().width, height: svg.getBoundingClientRect().height,
            marks: svg.querySelectorAll('polyline, rect, circle').length,
            drawn: [...svg.querySelectorAll('polyline, rect')].every(mark => mark.getBBox().width > 0),
            inside: [...svg.querySelectorAll('text, rect, circle')].every(mark => {
                const a = mark.getBoundingClientRect(), b = svg.getBoundingClientRect();
                return a.left >= b.left - 1 && a.right <= b.right + 1 && a.bottom <= b.bottom + 1;
            }),
            smallest: Math.min(...[...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect().height)),
        }))"""
    )
    for box in boxes:
        assert box["marks"] > 0 and box["drawn"] and box["inside"], box
        assert 300 <= box["width"] <= width
        assert box["smallest"] >= 11
    # Nothing but the tables, each in a frame of its own, is wider than the screen.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    assert page.locator("td", has_text="dflash2").first.is_visible()
    assert page.locator("pre").inner_text() == "It ended.\n<b>Error</b>"
    page.close()


def test_a_chart_places_its_points_where_they_belong() -> None:
    chart = charts.line_chart("t", {"a": [(1, 0.0), (2, 10.0), (4, 20.0)]}, "x", "y", log_x=True)
    points = chart.partition('polyline points="')[2].partition('"')[0].split()
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, point.split(","))) for point in points]
    assert (x0, x2) == (charts.LEFT, charts.WIDTH - charts.RIGHT)
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)  # by powers of two
    assert y0 == charts.HEIGHT - charts.BOTTOM
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert charts.line_chart("t", {"a": []}, "x", "y") == ""


def test_names_are_escaped() -> None:
    chart = charts.bar_chart("<script>", {"<b>": 1.0}, "&")
    assert "<script>" not in chart and "<b>" not in chart
