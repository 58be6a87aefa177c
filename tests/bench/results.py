# SPDX-License-Identifier: Apache-2.0
"""Cells as a run leaves them, with figures that are easy to follow."""

import json
from typing import Any

from vllm_dflash.bench.plan_of_run import Cell

SPEEDS = {"plain": 20.0, "ngram": 22.0, "stock-dflash2": 30.0, "dflash2": 40.0}
SETTINGS = {
    "target": "example/target",
    "drafts": ["example/draft"],
    "template": "the target's own (sha256 0123456789ab), thinking off",
    "machine": "CPU (2 cores)",
    "vllm": "0.32.0",
    "package": "0.1.0",
    "serve_arguments": ["--max-model-len", "2048"],
    "prompts": "shipped",
    "repeats": 2,
}


def figures(group: str, concurrency: int, factor: float = 1.0) -> dict[str, Any]:
    """A plain step takes 50 ms; speculating groups accept two drafts of three a cycle."""
    speed = SPEEDS[group] * concurrency**0.8 * factor
    made: dict[str, Any] = {"output_tokens_per_second": speed, "peak_memory_bytes": 2 << 30, "kv_tokens": 50_000}
    for name in ("ttft", "tpot", "itl", "e2el"):
        for quantile, more in ((50, 1.0), (95, 1.5), (99, 2.0)):
            made[f"{name}_p{quantile}_ms"] = 1000 / SPEEDS[group] * more / factor
    if group != "plain":
        made |= {"acceptance_length": 3.0, "acceptance_by_position": [0.9, 0.7, 0.4]}
    if group == "dflash2":
        made |= {"draft_ms": 4.0, "target_ms": 60.0}
    return made


def lines() -> list[dict[str, Any]]:
    """cells.jsonl of two repeats over two workloads and three loads, with agreement and break-even."""
    made = []

    def add(cell: Cell, numbers: dict[str, Any]) -> None:
        made.append({"key": cell.key, "cell": json.loads(cell.key), "figures": numbers})

    for repeat in range(2):
        for group in SPEEDS:
            for workload in ("code", "prose"):
                for concurrency in (1, 2, 8):
                    cell = Cell(group, repeat, "load", workload, ("short", 0), 64, concurrency, 0.0)
                    add(cell, figures(group, concurrency, 1.0 + 0.1 * repeat))
    table = [{"5": -0.1, "6": -0.3}, {"7": -0.2, "8": -0.25}]
    add(Cell("plain", 0, "agreement"), {"answers": [{"tokens": [5, 7], "logprobs": table}] * 2})
    same, other = {"tokens": [5, 7], "logprobs": []}, {"tokens": [5, 8], "logprobs": []}
    add(Cell("dflash2", 0, "agreement"), {"answers": [same, other]})
    add(Cell("dflash2@1", 0, "break_even"), figures("dflash2", 1, 0.4) | {"acceptance_length": 1.0})
    add(Cell("dflash2@4", 0, "break_even"), figures("dflash2", 1, 1.6) | {"acceptance_length": 4.0})
    return made
