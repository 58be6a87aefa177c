# SPDX-License-Identifier: Apache-2.0
"""Every query of the dashboard and the rules, and the metrics they name."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.deploy.tools import DEPLOY

# Recorded series begin with what they are summed by, the exported ones with their exporter.
EXPORTED = re.compile(r"(?<![\w:])vllm(?:_dflash)?:\w+")
RECORDED = re.compile(r"(?<![\w:])model(?:_\w+)?:\w+(?::\w+)?")


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels that ask for data."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def filled(expression: str, model: str = ".*", interval: str = "1m") -> str:
    """A panel's expression with Grafana's variables filled in."""
    text = expression.replace("$__rate_interval", interval).replace("$model", model)
    assert "$" not in text, text
    return text


def panel_queries() -> Iterator[tuple[str, str]]:
    """(panel and reference, expression) of every query of the dashboard."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


def rules(kind: str) -> dict[str, str]:
    """Name -> expression of the rules of a kind, "record" or "alert"."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]
    return {rule[kind]: rule["expr"] for group in groups for rule in group["rules"] if kind in rule}


def scaling_queries() -> list[str]:
    """The queries that KEDA scales by."""
    manifest = yaml.safe_load((DEPLOY / "kubernetes/overlays/autoscaling/scaledobject.yaml").read_text())
    return [trigger["metadata"]["query"] for trigger in manifest["spec"]["triggers"]]


def every_expression() -> list[str]:
    found = [filled(expression) for _, expression in panel_queries()]
    variables = [str(variable["query"]) for variable in dashboard()["templating"]["list"]]
    return found + variables + [*rules("record").values(), *rules("alert").values()] + scaling_queries()


def exported_names(expression: str) -> set[str]:
    """The names of exported series in an expression, as they stand there (with _bucket, _sum, _count, _total)."""
    return set(EXPORTED.findall(expression))


def recorded_names(expression: str) -> set[str]:
    return set(RECORDED.findall(expression))
