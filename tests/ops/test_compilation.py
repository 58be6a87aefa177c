# SPDX-License-Identifier: Apache-2.0
"""nvcc compiles every kernel for every architecture of the wheel, without spills and without local memory."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "csrc"))
import toolchain  # noqa: E402


@pytest.mark.slow
def test_kernels_fit_the_registers() -> None:
    cuda = toolchain.toolkit()
    if cuda is None:
        pytest.skip("nvcc is not installed: the CUDA part is not compiled here")
    jobs = toolchain.device_jobs(cuda, toolchain.ARCHITECTURES, ["-Xptxas", "-v"])
    objects = toolchain.compile_all(jobs, ROOT / "build" / "ptxas")
    for built in objects:
        said = built.with_suffix(".log").read_text()
        kernels = re.findall(r"Compiling entry function '(\S+)' for '(\S+)'", said)
        assert {target for _, target in kernels} >= {f"sm_{arch}" for arch in toolchain.ARCHITECTURES}
        usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
        assert len(usage) >= len(kernels)
        assert set(usage) == {("0", "0", "0")}, f"{built.name}: see its .log"
