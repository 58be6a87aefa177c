# SPDX-License-Identifier: Apache-2.0
"""From cells to a result: medians, spreads, speedups, break-even, agreement, and the files that show them."""

import json
from pathlib import Path

import pytest

from tests.bench.results import SETTINGS, lines
from vllm_dflash.bench import report
from vllm_dflash.bench.agreement import compare
from vllm_dflash.bench.load import figures
from vllm_dflash.bench.plan_of_run import Cell, Group, synthetic
from vllm_dflash.bench.server import BenchError
from vllm_dflash.bench.store import Store
from vllm_dflash.bench.summary import crossing, spread, summarise
from vllm_dflash.plan.inputs import from_bench


@pytest.fixture(scope="module")
def result() -> dict:
    return summarise(lines(), SETTINGS, {"eagle3": "The server of the group eagle3 ended with code 1.\nValueError"})


def row(result: dict, group: str, concurrency: int, workload: str = "code") -> dict:
    (found,) = [
        r for r in result["summary"] if (r["group"], r["workload"], r["concurrency"]) == (group, workload, concurrency)
    ]
    return found


def test_medians_spreads_and_speedups(result: dict) -> None:
    speed = row(result, "plain", 1)["output_tokens_per_second"]
    assert (speed["median"], speed["low"], speed["high"]) == (pytest.approx(21.0), 20.0, pytest.approx(22.0))
    assert row(result, "dflash2", 8)["speedup"] == pytest.approx(2.0)
    assert row(result, "dflash2", 1)["acceptance_by_position"] == pytest.approx([0.9, 0.7, 0.4])
    assert spread([]) is None


def test_break_even_by_the_cycle_and_by_synthetic_acceptance(result: dict) -> None:
    # A cycle takes 3 tokens at half of plain decoding's time each.
    assert row(result, "dflash2", 1)["break_even_length"] == pytest.approx(1.5)
    # 16/21 of plain decoding's speed at length 1, 64/21 at 4.
    found = result["break_even"]["dflash2"]
    assert found["length"] == pytest.approx(1 + (1 - 16 / 21) * 3 / (48 / 21))
    assert crossing([(1.0, 0.5), (4.0, 0.4)]) is None


def test_agreement_counts_the_same_answers_and_measures_the_gap(result: dict) -> None:
    found = result["agreement"]["dflash2"]
    assert (found["answers"], found["same"], found["first_difference"]) == (2, 1, [1])
    assert found["largest_gap"] == pytest.approx(0.05)


def test_a_difference_beyond_the_best_twenty_or_in_length_has_no_gap() -> None:
    plain = [{"tokens": [1, 2], "logprobs": [{"1": -0.1}, {"2": -0.1}]}] * 2
    found = compare(plain, [{"tokens": [1, 9]}, {"tokens": [1]}])
    assert (found["same"], found["outside"], found["logit_gaps"]) == (0, 2, [])


def test_markdown_tells_everything(result: dict) -> None:
    text = report.as_markdown(result)
    assert "- template: the target's own (sha256 0123456789ab), thinking off" in text
    load = "code, short context, 64 tokens, 1 at once, T=0"
    assert f"| dflash2 | {load} | 42.0 (40.0 to 44.0) | 2.00 | 3.00 | 4.00 | 60.00 |" in text
    assert "| dflash2 | 1 of 2 | 0.0500 | 1 |" in text
    assert "- eagle3: The server of the group eagle3 ended with code 1." in text
    assert "it pays from 1.31 on" in text


def test_plan_reads_the_result(result: dict, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result))
    inputs = from_bench(tmp_path / "result.json", None)
    assert (inputs.source.rpartition(" ")[2], inputs.drafts) == ("dflash2", 3)
    assert inputs.cost.seconds(0, 1, 0) == pytest.approx(row(result, "plain", 1)["tpot_p50_ms"]["median"] / 1e3)
    assert inputs.cost.seconds(3, 1, 0) == pytest.approx(row(result, "dflash2", 1)["cycle_ms"] / 1e3)


def test_figures_of_a_load() -> None:
    load = {
        "completed": 2,
        "failed": 0,
        "total_input_tokens": 10,
        "total_output_tokens": 64,
        "duration": 2.0,
        "output_throughput": 32.0,
        "p50_tpot_ms": 30.0,
        "p95_tpot_ms": 31.0,
        "p99_tpot_ms": float("nan"),
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_per_position_acceptance_rates": [0.9, 0.6],
        "spec_decode_num_drafts": 40,
    }
    before = {("vllm_dflash:draft_seconds_sum", ""): 1.0, ("vllm_dflash:draft_seconds_count", ""): 10.0}
    after = {("vllm_dflash:draft_seconds_sum", ""): 1.2, ("vllm_dflash:draft_seconds_count", ""): 110.0}
    made = figures(load, before, after)
    assert made["draft_ms"] == pytest.approx(2.0)
    assert (made["tpot_p50_ms"], made["tpot_p99_ms"], made["acceptance_length"]) == (30.0, None, 2.5)
    assert "target_ms" not in made
    with pytest.raises(BenchError, match=r"^1 of 3 requests of a load failed\.$"):
        figures(load | {"failed": 1}, before, after)


def test_an_interrupted_store_goes_on_and_other_settings_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "out", {"target": "a"})
    done, cut = Cell("plain", 0), Cell("plain", 1)
    store.add(done, {"seconds": 1.0})
    store.add(cut, {"seconds": 2.0})
    lines = tmp_path / "out" / "cells.jsonl"
    lines.write_text(lines.read_text()[:-20])  # killed while it wrote
    again = Store(tmp_path / "out", {"target": "a"})
    assert done in again and cut not in again
    again.add(cut, {"seconds": 3.0})
    assert Store(tmp_path / "out", {"target": "a"}).figures(cut) == {"seconds": 3.0}
    with pytest.raises(BenchError, match=r"holds a run with other settings \(target differ\)\. Name another folder"):
        Store(tmp_path / "out", {"target": "b"})


def test_a_synthetic_group_drafts_in_every_step() -> None:
    group = synthetic(Group("dflash2", {"method": "dflash", "model": "d"}, stock=False), 1.0, 7)
    assert group.name == "dflash2@1"
    assert group.speculative is not None and group.speculative["synthetic_acceptance_length"] == 1.0
    assert group.serve_arguments()[-2:] == ["--additional-config", '{"dflash": {"block_length": 7}}']
