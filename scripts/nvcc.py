# SPDX-License-Identifier: Apache-2.0
"""nvcc for machines without a CUDA toolkit: NVIDIA's wheels from PyPI (300 MB), in build/nvcc, apart from .venv.

Only compiling needs it: kernels are checked by it on machines that have no GPU to run them.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "nvcc"
# Debian's own nvidia-cuda-toolkit is too old for compute_100 and compute_120.
PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
)


def installed() -> Path | None:
    """The toolkit's folder, as CUDA_HOME would name it, where `install` has finished."""
    found = sorted(FOLDER.glob("lib/python*/site-packages/nvidia/cu13/bin/nvcc"))
    return found[0].parents[1] if found and (FOLDER / "finished").exists() else None


def install() -> Path:
    if (there := installed()) is None:
        venv.create(FOLDER, clear=True, with_pip=True)
        pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        if subprocess.run([*pip, "--no-deps", *PACKAGES]).returncode:
            sys.exit("nvcc: its wheels could not be installed (see above).")
        (FOLDER / "finished").touch()
        there = installed()
    assert there is not None
    return there


if __name__ == "__main__":
    print(install())
