# SPDX-License-Identifier: Apache-2.0
"""One cell: the load by `vllm bench serve`, and what the server's metrics say of the time it took."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.bench.child import get
from vllm_dflash.bench.memory import PeakMemory
from vllm_dflash.bench.plan_of_run import Cell
from vllm_dflash.bench.server import BenchError, Server, vllm_command
from vllm_dflash.plan.inputs import STAGES, totals

QUANTILES = (50, 95, 99)
TIMES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Traffic:
    """What is the same for all cells. template: "server" (chat), or "none" (the prompt as it is).

    template_arguments: the chat template's keyword arguments, such as {"enable_thinking": false}.
    """

    tokenizer: str
    template: str = "server"
    template_arguments: dict[str, Any] | None = None
    ignore_eos: bool = False
    seed: int = 0

    def extra_body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"seed": self.seed}
        if self.template == "server" and self.template_arguments:
            body["chat_template_kwargs"] = self.template_arguments
        return body


def write_dataset(path: Path, prompts: Sequence[str]) -> Path:
    """The prompts as vLLM's custom dataset takes them."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def measure(server: Server, cell: Cell, prompts: Sequence[str], traffic: Traffic, folder: Path) -> dict[str, Any]:
    """Run the load of a cell; its figures, times in ms. Raises BenchError where the load or the server fails."""
    dataset = write_dataset(folder / "dataset.jsonl", prompts)
    result = folder / "load.json"
    result.unlink(missing_ok=True)
    before = totals(get(f"{server.url}/metrics"))
    with PeakMemory(server.process.pid) as peak:
        run = subprocess.run(
            command(server.url, cell, len(prompts), traffic, dataset, result),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ) | {"VLLM_PLUGINS": ""},
        )
    server.require_alive()
    if run.returncode != 0 or not result.exists():
        raise BenchError(_why_load_failed(run, cell))
    after = totals(get(f"{server.url}/metrics"))
    return figures(json.loads(result.read_text()), before, after) | {"peak_memory_bytes": peak.bytes}


def command(url: str, cell: Cell, count: int, traffic: Traffic, dataset: Path, result: Path) -> list[str]:
    """`vllm bench serve` for a cell; nothing is measured of its first requests, one a stream."""
    chat = traffic.template == "server"
    made = [vllm_command(), "bench", "serve", "--base-url", url, "--model", "target", "--tokenizer", traffic.tokenizer]
    made += ["--backend", "openai-chat" if chat else "openai"]
    made += ["--endpoint", "/v1/chat/completions" if chat else "/v1/completions"]
    made += ["--dataset-name", "custom", "--dataset-path", str(dataset), "--skip-chat-template", "--disable-shuffle"]
    made += ["--custom-output-len", str(cell.output), "--num-prompts", str(count)]
    made += ["--max-concurrency", str(cell.concurrency), "--temperature", f"{cell.temperature:g}"]
    made += ["--num-warmups", str(cell.concurrency), "--ready-check-timeout-sec", "0"]
    made += ["--percentile-metrics", ",".join(TIMES), "--metric-percentiles", ",".join(map(str, QUANTILES))]
    made += ["--extra-body", json.dumps(traffic.extra_body()), "--disable-tqdm", "--save-result"]
    made += ["--result-dir", str(result.parent), "--result-filename", result.name]
    return made + (["--ignore-eos"] if traffic.ignore_eos else [])


def _why_load_failed(run: subprocess.CompletedProcess[str], cell: Cell) -> str:
    lines = [line for line in (run.stdout + "\n" + run.stderr).splitlines() if line.strip()]
    if any("pandas" in line for line in lines[-15:]):
        return "`vllm bench serve` needs pandas to read prompts. Install it: pip install 'vllm-dflash[bench]'."
    last = "\n".join(lines[-8:])
    return f"The load of the cell ({cell}) failed with code {run.returncode}. The last it said:\n{last}"


Totals = dict[tuple[str, str], float]


def figures(load: dict[str, Any], before: Totals, after: Totals) -> dict[str, Any]:
    """A cell's figures from the result of `vllm bench serve` and two readings of /metrics around it."""
    if load.get("failed"):
        raise BenchError(f"{load['failed']} of {load['failed'] + load['completed']} requests of a load failed.")
    made: dict[str, Any] = {
        "completed": load["completed"],
        "input_tokens": load["total_input_tokens"],
        "output_tokens": load["total_output_tokens"],
        "seconds": load["duration"],
        "output_tokens_per_second": load["output_throughput"],
    }
    for name in TIMES:
        for quantile in QUANTILES:
            value = load.get(f"p{quantile}_{name}_ms")
            made[f"{name}_p{quantile}_ms"] = None if value is None or math.isnan(value) else value
    if "spec_decode_acceptance_length" in load:
        made["acceptance_length"] = load["spec_decode_acceptance_length"]
        made["acceptance_by_position"] = load["spec_decode_per_position_acceptance_rates"]
        made["drafts"] = load["spec_decode_num_drafts"]
    for stage in STAGES:
        count = _grown(f"vllm_dflash:{stage}_seconds_count", before, after)
        if count:
            made[f"{stage}_ms"] = _grown(f"vllm_dflash:{stage}_seconds_sum", before, after) / count * 1e3
    return made


def _grown(name: str, before: Totals, after: Totals) -> float:
    return after.get((name, ""), 0.0) - before.get((name, ""), 0.0)
