# SPDX-License-Identifier: Apache-2.0
"""Without the extension the references run, and the log says so once."""

import subprocess
import sys

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
if {missing}:
    sys.modules["vllm_dflash._C"] = None
import torch
from vllm_dflash import ops
for _ in range(3):
    out = ops.grouped_convolution(torch.ones(4, 8), torch.zeros(4, 2, 2), torch.ones(2, 8), 4)
print(ops.backend("cpu"), out[:, 0].tolist())
"""


def run(missing: bool) -> tuple[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(missing=missing)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), [line for line in done.stderr.splitlines() if line.startswith("vllm_dflash.ops")]


def test_the_references_run_without_the_extension() -> None:
    said, log = run(missing=True)
    assert said == "torch [1.0, 2.0, 2.0, 2.0]"
    assert len(log) == 1 and log[0].startswith("vllm_dflash.ops WARNING dflash operations on cpu: torch references")


def test_the_extension_runs_where_it_is_built() -> None:
    said, log = run(missing=False)
    assert said.endswith("[1.0, 2.0, 2.0, 2.0]") and len(log) == 1
