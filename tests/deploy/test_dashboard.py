# SPDX-License-Identifier: Apache-2.0
"""The dashboard: as Grafana's schema has it, in the order of an operator's questions, on metrics that exist."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.deploy import queries
from tests.deploy.tools import NODE, ROOT, tool
from vllm_dflash.metrics.exporter import PREFIX, Exporter, unregister

TYPES = ROOT / "tests" / "deploy" / "grafana"
QUESTIONS = [
    "Is it faster than without?",
    "Which workload loses?",
    "Where does the step's time go?",
    "What does the draft cost in memory?",
]


@pytest.fixture(scope="module")
def checker() -> Path:
    """A folder with Grafana's types and TypeScript, installed once (26 MB)."""
    npm = tool("npm", NODE)
    folder = ROOT / "build" / "grafana"
    lock = (TYPES / "package-lock.json").read_text()
    installed = folder / "installed.json"
    if not installed.exists() or installed.read_text() != lock:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(TYPES / name, folder)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        installed.write_text(lock)
    for name in ("types.ts", "tsconfig.json"):
        shutil.copy(TYPES / name, folder)
    return folder


def broken(change: str) -> dict[str, Any]:
    """The dashboard with one mistake."""
    dashboard = copy.deepcopy(queries.dashboard())
    series = next(panel for panel in dashboard["panels"] if panel["type"] == "timeseries")
    match change:
        case "a field that no dashboard has":
            dashboard["refreshing"] = "30s"
        case "a field that no panel has":
            series["datasources"] = series["datasource"]
        case "an option that the panel does not have":
            series["options"]["legend"]["position"] = "bottom"
        case "a value that the option does not have":
            series["fieldConfig"]["defaults"]["custom"]["drawStyle"] = "lines"
        case "a number as text":
            series["gridPos"]["w"] = "12"
        case "a query without an expression":
            del series["targets"][0]["expr"]
        case "a kind of panel that is not there":
            series["type"] = "graph"
    return dashboard


MISTAKES = [
    "a field that no dashboard has",
    "a field that no panel has",
    "an option that the panel does not have",
    "a value that the option does not have",
    "a number as text",
    "a query without an expression",
    "a kind of panel that is not there",
]


def test_grafanas_types_accept_the_dashboard_and_refuse_each_mistake(checker: Path) -> None:
    cases = {"check_good": queries.dashboard()} | {
        f"check_{index}": broken(change) for index, change in enumerate(MISTAKES)
    }
    for old in checker.glob("check_*.ts"):
        old.unlink()
    for name, case in cases.items():
        text = "import type { TypedDashboard } from './types';\nexport const dashboard: TypedDashboard = "
        (checker / f"{name}.ts").write_text(text + json.dumps(case, indent=1) + ";\n")
    node = tool("node", NODE)
    command = [node, "node_modules/typescript/bin/tsc", "-p", "."]
    done = subprocess.run(command, cwd=checker, capture_output=True, text=True, timeout=300)
    refused = {line.split(".ts(")[0] for line in done.stdout.splitlines() if line.startswith("check_")}
    assert refused == {f"check_{index}" for index in range(len(MISTAKES))}, done.stdout


def test_the_lock_names_versions_and_no_registry() -> None:
    lock = json.loads((TYPES / "package-lock.json").read_text())
    for name, package in lock["packages"].items():
        if name:
            assert package["integrity"].startswith("sha512-") and "resolved" not in package


def test_the_rows_are_the_operators_questions_in_order() -> None:
    rows = [panel["title"] for panel in queries.dashboard()["panels"] if panel["type"] == "row"]
    assert rows == QUESTIONS


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    dashboard = queries.dashboard()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_data_source_is_chosen_at_import() -> None:
    text = json.dumps(queries.dashboard())
    assert "__inputs" not in text
    sources = [part["datasource"]["uid"] for panel in queries.panels() for part in (panel, *panel["targets"])]
    assert set(sources) == {"${datasource}"}


def test_every_query_is_of_the_chosen_models() -> None:
    for name, expression in queries.panel_queries():
        selectors = len(queries.EXPORTED.findall(expression))
        assert expression.count('model_name=~"$model"') == selectors, name


def test_every_metric_of_this_package_is_one_it_exports() -> None:
    """The names alone, without a server; test_running.py asks a real Prometheus for all."""
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    Exporter("model", 7, engines=[0])
    try:
        families = [family for family in REGISTRY.collect() if family.name.startswith(PREFIX)]
    finally:
        unregister()
    exported = {family.name + suffix for family in families for suffix in suffixes[family.type]}
    used = {name for expression in queries.every_expression() for name in queries.exported_names(expression)}
    assert {name for name in used if name.startswith(PREFIX)} <= exported
    unseen = {family.name for family in families if not any(name.startswith(family.name) for name in used)}
    assert not unseen, "exported, and on no panel and in no rule"


def test_recorded_series_are_recorded() -> None:
    recorded = set(queries.rules("record"))
    used = {name for expression in queries.every_expression() for name in queries.recorded_names(expression)}
    assert used and used <= recorded
