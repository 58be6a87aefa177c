# SPDX-License-Identifier: Apache-2.0
"""The result's page in a browser: plots drawn, nothing fetched, nothing wrong, readable when wide and when narrow."""

from pathlib import Path
from typing import Any

import pytest

from tests.bench.browser import WIDTHS, open_page
from tests.bench.results import SETTINGS, lines
from vllm_dflash.bench import charts, report
from vllm_dflash.bench.summary import summarise


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_in_a_browser(browser: Any, tmp_path: Path, width: int) -> None:
    file = tmp_path / "result.html"
    file.write_text(report.as_html(summarise(lines(), SETTINGS, {"eagle3": "It ended.\n<b>Error</b>"})))
    page = open_page(browser, file, width, plots=7)
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
