# SPDX-License-Identifier: Apache-2.0
"""Builds csrc under AddressSanitizer and UndefinedBehaviorSanitizer: the processor's part as it is installed, and the
CUDA part under the emulation. Prints the two libraries and the sanitizer's runtime, which must be loaded first."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

from tests.emulation import build as emulation
from tests.emulation.build import HERE, ROOT, toolchain

FOLDER = ROOT / "build" / "sanitize"
# A shift or a division that is undefined ends the program too, as an access out of bounds does.
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1"]


def runtime() -> Path | None:
    """The sanitizer's library of this compiler, to be preloaded; None where it has none."""
    return _library("libasan.so")


def standard_library() -> Path | None:
    """C++'s, to be preloaded too: the sanitizer looks for its exceptions at the start, and Python is written in C."""
    return _library("libstdc++.so.6")


def _library(name: str) -> Path | None:
    said = subprocess.run([*toolchain.compiler(), f"-print-file-name={name}"], capture_output=True, text=True)
    path = Path(said.stdout.strip())
    return path.resolve() if path.is_absolute() and path.exists() else None


def link(objects: list[Path], name: str) -> Path:
    library = FOLDER / f"{name}.so"
    if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in objects):
        toolchain.link(objects, library, extra=["-fsanitize=address,undefined"])
    return library


def native() -> Path:
    """torch.ops.vllm_dflash without CUDA."""
    python = sysconfig.get_path("include")
    jobs = toolchain.host_jobs(toolchain.torch_flags([python]))
    return link(toolchain.compile_all([(path, [*flags, *SANITIZE]) for path, flags in jobs], FOLDER), "native")


def emulated() -> Path:
    """torch.ops.vllm_dflash_emulated: the CUDA kernels, whose every access to a buffer is checked."""
    jobs = [(path, [*flags, *SANITIZE]) for path, flags in emulation.jobs()]
    return link(toolchain.compile_all(jobs, FOLDER, [HERE / "cuda_emulation.h"]), "emulated")


if __name__ == "__main__":
    print(native(), emulated(), runtime())
