# SPDX-License-Identifier: Apache-2.0
"""Prints a table and writes build/bench-ops.json: a list of {op, shape, ours_us, stock_us, ratio, copy_us}."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from vllm_dflash import ops
from vllm_dflash.bench.ops.comparisons import all_comparisons
from vllm_dflash.bench.ops.measure import compare, copy_bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vllm_dflash.bench.ops", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each comparison (2)")
    parser.add_argument("--out", type=Path, default=Path("build/bench-ops.json"))
    arguments = parser.parse_args()
    backend = ops.backend("cpu")
    isa = f", {torch.ops.vllm_dflash.cpu_isa(None)}" if backend == "native" else ""
    bandwidth = copy_bandwidth()
    print(f"backend {backend}{isa}, {torch.get_num_threads()} threads, a copy moves {bandwidth / 1e9:.1f} GB/s")
    print(f"{'operation':20} {'ours us':>10} {'stock us':>10} {'ratio':>7} {'copy us':>9}  shape")
    results = []
    for comparison in all_comparisons():
        result = compare(comparison, bandwidth, arguments.seconds)
        results.append(dataclasses.asdict(result))
        print(
            f"{result.op:20} {result.ours_us:10.1f} {result.stock_us:10.1f} {result.ratio:6.1f}x"
            f" {result.copy_us:9.1f}  {result.shape}",
            flush=True,
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {arguments.out}")


main()
