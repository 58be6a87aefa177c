# SPDX-License-Identifier: Apache-2.0
"""Runs tests/ops/interpreted.py in a process whose Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_triton_operations() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted.py")]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
