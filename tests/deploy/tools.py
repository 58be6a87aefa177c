# SPDX-License-Identifier: Apache-2.0
"""Programs that the deployment's tests run, and what to do where one is missing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = "install Prometheus and promtool (Debian: apt-get install prometheus)"
KUBECTL = "install kubectl 1.27 or newer (or: python scripts/kubectl.py)"
NODE = "install Node.js with npm (Debian: apt-get install nodejs npm)"


def missing(what: str) -> None:
    """Skips the test, or under CI, where .ci/run installs what is needed, fails it."""
    if os.environ.get("CI"):
        pytest.fail(f"missing in CI: {what}")
    pytest.skip(what)


def tool(name: str, how: str) -> str:
    """The path of a program; where it is missing, `how` says how to get it."""
    carried = ROOT / "build" / "kubectl" / "kubectl"
    found = str(carried) if name == "kubectl" and carried.exists() else shutil.which(name)
    if found is None:
        missing(how)
        raise AssertionError("not reached")
    return found


def output(*command: str, cwd: Path | None = None) -> str:
    """What a command prints; a failure shows all that it said."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
