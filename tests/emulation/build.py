# SPDX-License-Identifier: Apache-2.0
"""Builds csrc's CUDA part for the CPU under cuda_emulation.h, as torch.ops.vllm_dflash_emulated: the same
checks, the same launchers, the same kernels that nvcc compiles."""

from __future__ import annotations

import functools
import sys
import sysconfig
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).parent.resolve()
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "csrc"))
import toolchain  # noqa: E402

FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-c", f"-I{HERE}"]
FLAGS += ["-DDFLASH_CUDA", "-DDFLASH_EMULATION", "-DDFLASH_NAMESPACE=vllm_dflash_emulated"]


def jobs() -> list[toolchain.Job]:
    """The CUDA part, to be compiled for a processor."""
    cxx = [*toolchain.compiler(), *FLAGS, *toolchain.torch_flags([sysconfig.get_path("include")])]
    host = [path for path in toolchain.sources(".cpp") if "cpu" not in path.parts]
    return [(path, cxx) for path in host] + [(path, [*cxx, "-x", "c++"]) for path in toolchain.sources(".cu")]


@functools.cache
def emulated() -> SimpleNamespace:
    """The operations of the CUDA code, on CPU tensors, with the public functions' arguments."""
    header = HERE / "cuda_emulation.h"
    objects = toolchain.compile_all(jobs(), ROOT / "build" / "emulation", [header])
    names = " ".join(path.name for path in objects)
    library = ROOT / "build" / "emulation" / f"emulated-{zlib.crc32(names.encode()):08x}.so"
    if not library.exists():
        toolchain.link(objects, library)
    torch.ops.load_library(str(library))
    return torch.ops.vllm_dflash_emulated
