# SPDX-License-Identifier: Apache-2.0
"""A picture of the dashboard's panels with the data of a real Prometheus, for docs/operations.md.

`python -m tests.deploy.picture docs/dashboard.png` serves the demo pair in the CPU overlay's container, sends it two
minutes of requests and draws what each panel shows.
"""

import math
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from tests.deploy import queries
from tests.deploy.prometheus import Prometheus, Series

SECONDS = 150
FORMATS = {"percentunit": "{:.0%}", "bytes": "{:.2e} B", "s": "{:.3g} s"}


def legend(text: str, labels: dict[str, str]) -> str:
    """A series' name as Grafana writes it; one model is served, so its name is left out."""
    named = re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), text)
    return named.replace(labels.get("model_name", "\0"), "").strip() or "smollm2"


def points(series: Series) -> tuple[list[float], list[float]]:
    return [float(at) for at, _ in series["values"]], [float(value) for _, value in series["values"]]


def draw_series(axes: Axes, panel: dict[str, Any], prometheus: Prometheus, start: float, end: float) -> int:
    """Draws a panel's series over time, stacked where the panel stacks, and returns how many there are."""
    drawn: list[tuple[str, list[float], list[float]]] = []
    for target in panel["targets"]:
        for series in prometheus.over_time(queries.filled(target["expr"], interval="20s"), start, end):
            times, values = points(series)
            if any(map(math.isfinite, values)):
                drawn.append((legend(target["legendFormat"], series["metric"]), [at - start for at in times], values))
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    if custom.get("stacking", {}).get("mode") == "normal" and drawn:
        grid = [float(second) for second in range(int(end - start))]
        found = [dict(zip(map(round, times), values, strict=True)) for _, times, values in drawn]
        rows = [[values.get(round(second), 0.0) for second in grid] for values in found]
        axes.stackplot(grid, rows, labels=[name for name, _, _ in drawn], alpha=0.6)
    else:
        for name, times, values in drawn:
            axes.plot(times, values, linewidth=1, label=name)
    axes.legend(fontsize=5, loc="best", frameon=False)
    return len(drawn)


def draw_value(axes: Axes, panel: dict[str, Any], prometheus: Prometheus) -> int:
    """Writes a stat panel's value, or a table's labels."""
    series = prometheus.query(queries.filled(panel["targets"][0]["expr"], interval="20s"))
    axes.axis("off")
    if not series:
        return 0
    if panel["type"] == "table":
        labels = {name: value for name, value in series[0]["metric"].items() if name not in ("__name__", "instance")}
        axes.text(0, 0.5, "\n".join(f"{k}: {v.split('/')[-1]}" for k, v in labels.items()), fontsize=6, va="center")
    else:
        defaults = panel["fieldConfig"]["defaults"]
        value = float(series[0]["value"][1])
        text = FORMATS.get(defaults["unit"], f"{{:.{defaults.get('decimals', 0)}f}}").format(value)
        for mapping in defaults.get("mappings", []):
            text = mapping["options"].get(f"{value:.0f}", {}).get("text", text)
        axes.text(0.5, 0.5, text, fontsize=18, ha="center", va="center")
    return 1


def draw(prometheus: Prometheus, start: float, end: float, path: Path) -> dict[str, int]:
    """Draws every panel at its place on the dashboard; returns how many series each has."""
    everything = queries.dashboard()["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in everything)
    figure = pyplot.figure(figsize=(11, height * 0.2), dpi=72)
    counted = {}
    for panel in everything:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - place["y"] / height
        if panel["type"] == "row":
            figure.text(0.01, top - 0.6 / height, panel["title"], fontsize=9, weight="bold", va="center")
            continue
        bottom, width = 1 - (place["y"] + place["h"]) / height, place["w"] / 24
        room = (left + 0.05, bottom + 0.9 / height, width - 0.07, (place["h"] - 2.2) / height)
        axes = figure.add_axes(room)
        axes.set_title(panel["title"], fontsize=7)
        axes.tick_params(labelsize=5)
        if panel["type"] == "timeseries":
            counted[panel["title"]] = draw_series(axes, panel, prometheus, start, end)
        else:
            counted[panel["title"]] = draw_value(axes, panel, prometheus)
    figure.savefig(path, pil_kwargs={"optimize": True})
    pyplot.close(figure)
    return counted


def main() -> int:
    from tests.deploy import manifests
    from tests.deploy.container import Container
    from tests.deploy.load import Load

    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        documents = manifests.overlay("cpu-demo")
        container = running.enter_context(Container(documents, Path(".demo").absolute(), folder))
        container.wait_until_started()
        prometheus = running.enter_context(Prometheus(folder, f"127.0.0.1:{container.port}"))
        start = time.time()
        with Load(container.url, clients=1, tokens=128):
            time.sleep(SECONDS / 2)
        with Load(container.url, clients=3, tokens=128):
            time.sleep(SECONDS / 2)
        counted = draw(prometheus, start, time.time(), Path(sys.argv[1]))
    empty = [title for title, series in counted.items() if series == 0]
    print(f"{sys.argv[1]}: {len(counted)} panels, {len(empty)} of them empty {empty or ''}")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
