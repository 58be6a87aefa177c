# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench` as a child process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys; from vllm_dflash.cli import main; sys.exit(main())", "bench"]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, **ENVIRONMENT}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )


def finish(run: subprocess.Popen[str], within: float) -> str:
    """What it printed, once it has ended well; AssertionError where it has not within so many seconds."""
    try:
        said, _ = run.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)  # it ends its server
        said, _ = run.communicate(timeout=120)
        raise AssertionError(f"not done after {within:.0f} s\n{said}") from None
    assert run.returncode == 0, said
    return said
