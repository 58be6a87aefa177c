# SPDX-License-Identifier: Apache-2.0
"""The native code under AddressSanitizer and UndefinedBehaviorSanitizer, over random shapes: `make sanitize`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sanitizers import build
from tests.sanitizers.build import ROOT

pytestmark = pytest.mark.slow  # the build takes minutes on two cores
SECONDS = os.environ.get("DFLASH_FUZZ_SECONDS", "30")


@pytest.fixture(scope="module")
def runtime() -> Path:
    path = build.runtime()
    if path is None:
        missing = "the compiler has no libasan; Debian's g++ brings it"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    return path


def fuzz(runtime: Path, library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Python and torch leak by design, and a fiber's stack is no stack of the system's.
    environment = os.environ | {
        "LD_PRELOAD": f"{runtime} {build.standard_library()}",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-m", "tests.sanitizers.fuzz", str(library), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_processor_s_code(runtime: Path) -> None:
    done = fuzz(runtime, build.native(), "--seconds", SECONDS)
    assert done.returncode == 0 and "no fault" in done.stdout, done.stdout + done.stderr


def test_the_cuda_kernels_emulated(runtime: Path) -> None:
    done = fuzz(runtime, build.emulated(), "--emulated", "--seconds", SECONDS)
    assert done.returncode == 0 and "no fault" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("emulated", [False, True])
def test_an_overrun_is_seen(runtime: Path, emulated: bool) -> None:
    library = build.emulated() if emulated else build.native()
    done = fuzz(runtime, library, "--overrun", *["--emulated"] * emulated)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stdout + done.stderr
