# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench` end to end: a tiny pair, interrupted and gone on with; the demo pair with a small matrix."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.browser import WIDTHS, open_page
from tests.bench.running import finish, start
from tests.support.checkpoints import Pair


def finished(out: Path) -> list[str]:
    file = out / "cells.jsonl"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.engine
@pytest.mark.parametrize("after", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["a group", "half a group"])
def test_a_tiny_run_is_interrupted_and_goes_on(trained: Callable[[str], Pair], tmp_path: Path, after: int) -> None:
    """Two groups of two cells; half a group costs one more start of its server."""
    pair, out = trained("dflash2"), tmp_path / "out"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "t5 t6 t7"}\n{"prompt": "t9 t8"}\n')
    arguments = [pair.target, pair.drafter, "--out", out, "--groups", "dflash2", "--prompts", prompts]
    arguments += ["--output-tokens", 16, "--concurrency", 2, "--temperature", 0, "--count", 2, "--repeats", 1]
    # Every step drafts: so short a run says nothing of what the controller would choose.
    fixed = '{"dflash": {"block_length": 7}}'
    arguments += ["--raw", "--ignore-eos", "--", "--dtype", "float32", "--enforce-eager", "--max-model-len", 128]
    arguments += ["--additional-config", fixed]

    first = start(*arguments)
    until = time.monotonic() + 600
    while len(finished(out)) < after and first.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=120)
    kept = finished(out)
    assert first.returncode == 130, said
    assert f"interrupted; {len(kept)} cells are in {out}, the same command goes on." in said
    assert after <= len(kept) < 4
    assert (out / "result.json").exists()

    said = finish(start(*arguments), within=1200)
    assert finished(out)[: len(kept)] == kept
    cells = [json.loads(line)["cell"] for line in finished(out)]
    assert len(cells) == len({json.dumps(cell) for cell in cells}) == 4
    result = json.loads((out / "result.json").read_text())
    assert result["failures"] == {}
    assert result["agreement"]["dflash2"]["same"] == result["agreement"]["dflash2"]["answers"] == 1
    for row in result["summary"]:
        assert row["output_tokens_per_second"]["median"] > 0
        assert row["peak_memory_bytes"]["median"] > 100 << 20
        assert row["kv_tokens"]["median"] > 1000
        assert row["tpot_p99_ms"]["median"] >= row["tpot_p50_ms"]["median"] > 0
    drafted = [row for row in result["summary"] if row["group"] == "dflash2"]
    assert all(row["acceptance_length"]["median"] > 1.2 and len(row["acceptance_by_position"]) == 7 for row in drafted)
    assert "prompts are sent as they are (--raw)" in said
    assert (out / "result.html").read_text().count("<figure>") >= 3


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.pair
def test_the_demo_pair_in_under_twenty_minutes(pytestconfig: pytest.Config, browser: Any, tmp_path: Path) -> None:
    demo, out = pytestconfig.getoption("--demo-pair"), tmp_path / "out"
    arguments = [demo / "target", demo / "drafter", "--out", out, "--groups", "ngram,dflash2"]
    arguments += ["--workloads", "code,chat,prose", "--output-tokens", 64, "--concurrency", "1,4", "--temperature", 0]
    arguments += ["--count", 4, "--repeats", 1, "--break-even", "--", "--enforce-eager", "--max-model-len", 2048]
    finish(start(*arguments), within=1200)
    result = json.loads((out / "result.json").read_text())
    assert result["failures"] == {}
    assert set(result["groups"]) == {"plain", "ngram", "dflash2"}
    assert len(result["summary"]) == 3 * 3 * 2
    assert all(row["break_even_length"] > 0 for row in result["summary"] if row["group"] == "dflash2")
    assert "which has no thinking mode" in result["settings"]["template"]
    for width in WIDTHS:
        open_page(browser, out / "result.html", width, plots=6).close()
