# SPDX-License-Identifier: Apache-2.0
"""The emulation shows what it is there for: missing barriers and deadlocks."""

import subprocess
from pathlib import Path

from tests.emulation.build import HERE, toolchain


def test_faults_show(tmp_path: Path) -> None:
    program = tmp_path / "faults"
    command = [*toolchain.compiler(), "-std=c++17", "-O1", f"-I{HERE}", str(HERE / "faults.cpp"), "-o", str(program)]
    subprocess.check_call([*command, "-lpthread"])
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line for line in said if "with barrier" in line and "right" in line] == said[0:6:2]
    assert all(line.endswith("wrong") for line in said[1:6:2])
    assert said[6].startswith("emulation: deadlock")
