# SPDX-License-Identifier: Apache-2.0
"""The Prometheus rules: valid, each alert shown to fire and to stay silent, each with a runbook."""

import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.tools import DEPLOY, PROMETHEUS, ROOT, output, tool

RULES = DEPLOY / "prometheus" / "rules.yaml"
TESTS = DEPLOY / "prometheus" / "tests.yaml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


def anchors(document: Path) -> set[str]:
    """The anchors of a Markdown document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_promtool_accepts_the_rules() -> None:
    output(tool("promtool", PROMETHEUS), "check", "rules", str(RULES))


def test_promtool_fires_and_silences_every_alert() -> None:
    output(tool("promtool", PROMETHEUS), "test", "rules", str(TESTS))


def test_promtool_would_see_a_changed_threshold(tmp_path: Path) -> None:
    promtool = tool("promtool", PROMETHEUS)
    for kept, name in ((1.2, "same"), (1.05, "lower")):
        folder = tmp_path / name
        folder.mkdir()
        text = RULES.read_text()
        assert "rate5m < 1.2\n" in text
        (folder / "rules.yaml").write_text(text.replace("rate5m < 1.2\n", f"rate5m < {kept}\n"))
        (folder / "tests.yaml").write_text(TESTS.read_text())
    output(promtool, "test", "rules", str(tmp_path / "same" / "tests.yaml"))
    with pytest.raises(AssertionError, match="VllmDflashAcceptanceLow"):
        output(promtool, "test", "rules", str(tmp_path / "lower" / "tests.yaml"))


def test_each_alert_is_tested_both_ways() -> None:
    tested = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test.get("alert_rule_test", [])]
    assert {case["alertname"] for case in tested if case["exp_alerts"]} == set(ALERTS)
    assert {case["alertname"] for case in tested if not case["exp_alerts"]} == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_has_a_runbook(name: str) -> None:
    document, anchor = ALERTS[name]["annotations"]["runbook"].split("#")
    assert anchor == name.lower()
    assert anchor in anchors(ROOT / document)


def test_the_operator_gets_the_same_rules() -> None:
    manifest = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "prometheusrule.yaml").read_text())
    assert manifest["spec"] == yaml.safe_load(RULES.read_text())
