# SPDX-License-Identifier: Apache-2.0
"""The other methods that `bench` measures, each once on a real server; one that stock refuses is told and left out."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.running import finish, start
from tests.support.checkpoints import Pair
from tests.support.eagle3 import make_eagle3

pytestmark = [pytest.mark.slow, pytest.mark.engine]

# Drafts of each: a cell's acceptance by position has so many entries.
DRAFTS = {"ngram": 4, "draft-model": 4, "eagle3": 4, "stock-dflash": 7, "dflash": 7}


@pytest.fixture(scope="module")
def folder(trained: Callable[[str], Pair], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run over all groups on a tiny target, which is its own draft model, and one more with a head that is broken."""
    pair, folder = trained("dflash"), tmp_path_factory.mktemp("groups")
    head = make_eagle3(folder / "eagle3", pair.target_shape)
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "t5 t6 t7 t5 t6 t7"}\n{"prompt": "t9 t8"}\n')
    fixed = '{"dflash": {"block_length": 7}}'  # every step drafts, in so short a run too
    load = ["--prompts", prompts, "--output-tokens", 16, "--concurrency", 2, "--temperature", 0, "--count", 2]
    load += ["--repeats", 1, "--raw", "--ignore-eos"]
    serve = ["--", "--dtype", "float32", "--enforce-eager", "--max-model-len", 128]
    every = ["--draft-model", pair.target, "--eagle3", head, *load, "--out", folder / "all", *serve]
    finish(start(pair.target, pair.drafter, *every, "--additional-config", fixed), within=2400)
    config = json.loads((head / "config.json").read_text()) | {"architectures": ["UnheardOfEagle3"]}
    (head / "config.json").write_text(json.dumps(config))
    broken = ["--groups", "eagle3,ngram", "--eagle3", head, *load, "--no-agreement", "--out", folder / "broken", *serve]
    finish(start(pair.target, pair.drafter, *broken), within=2400)
    yield folder


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("group", DRAFTS)
def test_a_group_is_measured_and_writes_what_plain_decoding_writes(folder: Path, group: str) -> None:
    found = result(folder / "all")
    assert found["failures"] == {}
    (row,) = [row for row in found["summary"] if row["group"] == group]
    assert row["output_tokens_per_second"]["median"] > 0 and row["speedup"] > 0
    assert found["agreement"][group] | {"first_difference": None} == {
        "answers": 1, "same": 1, "first_difference": None, "logit_gaps": [], "largest_gap": None, "outside": 0,
    }  # fmt: skip
    assert len(row["acceptance_by_position"]) == DRAFTS[group]
    assert 1 <= row["acceptance_length"]["median"] <= 1 + DRAFTS[group]


def test_a_model_that_drafts_for_itself_is_always_right(folder: Path) -> None:
    (row,) = [row for row in result(folder / "all")["summary"] if row["group"] == "draft-model"]
    assert row["acceptance_length"]["median"] > 4


def test_a_group_that_does_not_start_is_told_and_the_others_go_on(folder: Path) -> None:
    found = result(folder / "broken")
    assert set(found["groups"]) == {"plain", "ngram"}
    assert set(found["failures"]) == {"eagle3"}
    first = found["failures"]["eagle3"].splitlines()[0]
    assert first.startswith("The server of the group eagle3 ended with code ") and "UnheardOfEagle3" in first
    assert first in (folder / "broken" / "result.md").read_text()
