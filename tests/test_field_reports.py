# SPDX-License-Identifier: Apache-2.0
"""docs/field-reports.md: each row has tests that exist, or a line that says why not."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "field-reports.md").read_text().splitlines()
    if re.match(r"\| [a-z0-9.-]+#\d", line)
]


def test_the_table_is_read() -> None:
    assert len(ROWS) == 48 and all(len(row) == 3 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split(",")[0])
def test_each_report_has_tests_that_exist_or_a_reason(row) -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", row[2])
    assert named or row[2].startswith("none"), row
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"
    if row[2].startswith("none"):
        assert row[2] == "none yet" or ":" in row[2], "say why"
