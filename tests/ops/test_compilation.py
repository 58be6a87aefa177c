# SPDX-License-Identifier: Apache-2.0
"""nvcc compiles every kernel for every architecture of the wheel, without spills and without local memory; Triton
compiles its kernels for GPUs of both makers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import nvcc

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "csrc"))
import toolchain  # noqa: E402


@pytest.mark.slow  # two minutes on two cores: `make check-cuda`
def test_kernels_fit_the_registers() -> None:
    cuda = toolchain.toolkit() or nvcc.installed()
    if cuda is None:
        missing = "nvcc is not installed: `python scripts/nvcc.py` brings it (300 MB)"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    jobs = toolchain.device_jobs(cuda, toolchain.ARCHITECTURES, ["-Xptxas", "-v"])
    objects = toolchain.compile_all(jobs, ROOT / "build" / "ptxas")
    for built in objects:
        said = built.with_suffix(".log").read_text()
        kernels = re.findall(r"Compiling entry function '(\S+)' for '(\S+)'", said)
        assert {target for _, target in kernels} >= {f"sm_{arch}" for arch in toolchain.ARCHITECTURES}
        usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
        assert len(usage) >= len(kernels)
        assert set(usage) == {("0", "0", "0")}, f"{built.name}: see its .log"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["75", "80", "90", "120", "gfx942"])
def test_triton_compiles_its_kernels(target: str) -> None:
    command = [sys.executable, "-m", "tests.ops.compiled", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = {line.split(" for ")[0] for line in done.stdout.splitlines()}
    assert named >= {
        "convolution_kernel", "path_kernel", "chunk_kernel", "decide_kernel", "context_kernel", "projection_kernel",
        "attention_kernel",
    }  # fmt: skip
