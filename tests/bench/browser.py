# SPDX-License-Identifier: Apache-2.0
"""What must hold of a result's page in a browser: plots drawn, nothing fetched, nothing wrong, readable."""

from pathlib import Path
from typing import Any

WIDTHS = (1280, 390)
MEASURE = """() => [...document.querySelectorAll('svg.plot')].map(svg => ({
    width: svg.getBoundingClientRect().width, height: svg.getBoundingClientRect().height,
    marks: svg.querySelectorAll('polyline, rect, circle').length,
    drawn: [...svg.querySelectorAll('polyline, rect')].every(mark => mark.getBBox().width > 0),
    inside: [...svg.querySelectorAll('text, rect, circle')].every(mark => {
        const a = mark.getBoundingClientRect(), b = svg.getBoundingClientRect();
        return a.left >= b.left - 1 && a.right <= b.right + 1 && a.bottom <= b.bottom + 1;
    }),
    smallest: Math.min(...[...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect().height)),
}))"""


def open_page(browser: Any, file: Path, width: int, plots: int) -> Any:
    """The checked page, with at least so many plots, in a window of that width."""
    html = file.read_text()
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{file}")
    page.wait_for_load_state("load")
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.locator("svg.plot").count() == html.count('class="plot"') >= plots
    for box in page.evaluate(MEASURE):
        assert box["marks"] > 0 and box["drawn"] and box["inside"], box
        assert 300 <= box["width"] <= width
        assert box["smallest"] >= 11
    # Nothing but the tables, each in a frame of its own, is wider than the screen.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    assert page.locator("td", has_text="dflash2").first.is_visible()
    return page
