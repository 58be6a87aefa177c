# SPDX-License-Identifier: Apache-2.0
"""The side-by-side table: what is asked for, what is left to measure, what is printed. The engines run in `make`."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from examples.smollm2.results import Cell, main, parse_variant, read_state, tables

DRAFTERS = {"stock-dflash": None, "dflash": None, "dflash2": Path("drafter")}


def figures(tokens: int, seconds: float, drafts: int = 0, accepted: int = 0, texts: object = None) -> dict:
    return {"tokens": tokens, "seconds": seconds, "drafts": drafts, "accepted": accepted, "texts": texts or []}


MEASURED = [
    (Cell("plain", "code", 0.0, 1, 0, "bfloat16"), figures(100, 2.0, texts=[[1, 2], [3]])),
    (Cell("plain", "code", 0.0, 1, 1, "bfloat16"), figures(100, 3.0, texts=[[1, 2], [3]])),
    (Cell("dflash2:3", "code", 0.0, 1, 0, "bfloat16"), figures(100, 2.0, 40, 30, texts=[[1, 2], [4]])),
]


def test_table_has_rates_over_all_rounds_and_counts_equal_texts() -> None:
    text = tables(MEASURED)
    assert "### code, T=0, bfloat16" in text
    assert "| plain | 40 |  | 4 of 4 |" in text
    assert "| dflash2:3 | 50 (1.25×) | 1.75 | 1 of 2 |" in text


def test_state_is_read_back_and_printed_without_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.jsonl"
    state.write_text("".join(json.dumps({"cell": asdict(cell), "figures": f}) + "\n" for cell, f in MEASURED))
    assert read_state(state) == MEASURED
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nText.\n\n### old\n\n| a |\n")
    main(["--table", "--state", str(state), "--write", str(page)])
    assert page.read_text() == f"# Page\n\nText.\n\n{tables(MEASURED)}"
    assert capsys.readouterr().out.strip() == tables(MEASURED).strip()


def test_stock_variants_leave_this_package_out() -> None:
    ngram, own = parse_variant("ngram:3", DRAFTERS), parse_variant("dflash2:5", DRAFTERS)
    assert ngram.is_stock and ngram.engine_arguments()["speculative_config"]["method"] == "ngram"
    assert not own.is_stock and own.engine_arguments() == {
        "speculative_config": {"method": "dflash", "model": "drafter", "num_speculative_tokens": 5},
        "additional_config": {"dflash": {"block_length": 5}},
    }
    assert parse_variant("plain", DRAFTERS).engine_arguments() == {}


@pytest.mark.parametrize(
    ("text", "said"), [("plain:3", "give plain"), ("dflash2", "with a count"), ("dflash:3", "--dflash FOLDER")]
)
def test_wrong_variants_are_told(text: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        parse_variant(text, DRAFTERS)
