# SPDX-License-Identifier: Apache-2.0
"""make gpu-check: builds for the GPU at hand, runs the operations' tests on it, and prints one table of times.

Each operation is timed against the bytes it must move at the measured bandwidth of a copy, and against the unfused
torch sequence that it replaces (the references, on the device).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.gpu.device import to
from tests.ops import cases
from tests.ops.implementations import REFERENCE

ROOT = Path(__file__).parents[2]
BF16 = torch.bfloat16


def build() -> None:
    major, minor = torch.cuda.get_device_capability()
    environment = os.environ | {"VLLM_DFLASH_CUDA": "1", "VLLM_DFLASH_CUDA_ARCHS": f"{major}{minor}"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.check_call(command, cwd=ROOT, env=environment)


def comparisons() -> Iterator[object]:
    """At the shapes of the Qwen3-8B and Qwen3.8-27B drafters."""
    from vllm_dflash import ops
    from vllm_dflash.bench.ops.measure import Comparison

    def compare(op: str, shape: str, case: cases.Arguments, moved: int) -> Comparison:
        moved_case = {name: to("cuda", value) for name, value in case.items()}
        ours, theirs = getattr(ops, op), getattr(REFERENCE, op)
        return Comparison(op, shape, lambda: ours(**moved_case), lambda: theirs(**moved_case), moved)

    case = cases.convolution(0, 32, 8, 320, 16, 2, BF16)
    yield compare("grouped_convolution", "32 blocks of 8, H 5120", case, 4 * case["x"].numel())
    for requests in (1, 32):
        case = cases.path(0, requests, 7, 16, 256, 50_000, BF16)
        yield compare("select_path", f"{requests} requests, K 7, C 16, R 256", case, requests * 7 * (18 * 512 + 256))
    for requests in (1, 32):
        case = cases.rejection(0, [7] * requests, 151_936, 16, BF16)
        moved = 2 * case["logits"].numel()
        yield compare("reject_sparse", f"{requests} requests, K 7, V 151936, bf16", case, moved)
    for rows in (8, 64, 2048):
        case = cases.context(0, rows, 5, 8, 128, BF16, True)
        blocks = rows // 16 + 1
        keys, values = cases.caches(0, 5, blocks, 16, 8, 128, BF16, "NHD")
        case |= {"key_caches": keys, "value_caches": values, "slot_mapping": torch.arange(rows), "block_size": 16}
        shape = f"{rows} rows, 5 layers, 8 heads of 128, bf16"
        yield compare("inject_context_kv", shape, case | {"k_scale": 1.0, "v_scale": 1.0}, 4 * case["kv"].numel())
    for rows in (1, 8, 16):
        case = cases.projection(0, rows, 5, 8, 128, 4096, BF16, "dense")
        keys, values = cases.caches(0, 5, 4, 16, 8, 128, BF16, "NHD")
        case |= {"key_caches": keys, "value_caches": values, "slot_mapping": torch.arange(rows), "block_size": 16}
        yield compare("project_context_kv", f"{rows} rows, H 4096, 5 layers", case, 2 * case["kv_weight"].numel())


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu-check needs an NVIDIA GPU and a CUDA build of torch; this machine has none. Nothing was run.")
        return 2
    build()
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    failed = subprocess.call(tests, cwd=ROOT)
    from vllm_dflash.bench.ops.measure import compare, copy_bandwidth

    bandwidth = copy_bandwidth("cuda", 1 << 30)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a copy moves {bandwidth / 1e9:.0f} GB/s")
    print(f"{'operation':20} {'us':>9} {'bytes us':>9} {'torch us':>10} {'ratio':>7}  shape")
    for comparison in comparisons():
        row = compare(comparison, bandwidth, seconds=1.0)
        print(
            f"{row.op:20} {row.ours_us:9.1f} {row.copy_us:9.1f} {row.stock_us:10.1f} {row.ratio:6.1f}x  {row.shape}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
