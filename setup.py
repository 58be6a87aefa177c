# SPDX-License-Identifier: Apache-2.0
"""Builds vllm_dflash._C: the CPU part with any C++17 compiler, the CUDA part too where nvcc is found.

Environment: VLLM_DFLASH_CUDA=0 leaves CUDA out, =1 insists on it; VLLM_DFLASH_CUDA_ARCHS="80;90" builds for
these only; VLLM_DFLASH_NATIVE=0 installs without the extension; CXX is the compiler. Objects are kept in
build/objects, so only what changed is compiled again.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "csrc"))
import toolchain  # noqa: E402


class BuildExtension(build_ext):
    """Compiles with csrc/toolchain.py: torch's own build classes refuse CUDA on a CPU build of torch."""

    def build_extension(self, ext: Extension) -> None:
        try:
            import torch  # noqa: F401
        except ImportError:
            sys.exit(
                "vllm-dflash: torch is needed to build the extension. Install torch first and use"
                " pip install --no-build-isolation, or set VLLM_DFLASH_NATIVE=0 to install without the"
                " extension."
            )
        wanted = os.environ.get("VLLM_DFLASH_CUDA")
        cuda = None if wanted == "0" else toolchain.toolkit()
        if cuda is None and wanted == "1":
            sys.exit("vllm-dflash: VLLM_DFLASH_CUDA=1, but nvcc is not on the PATH and CUDA_HOME is not set.")
        if cuda is None and wanted is None:
            print("vllm-dflash: nvcc not found, building the CPU part only.", flush=True)
        flags = toolchain.torch_flags(self.include_dirs)
        jobs = toolchain.host_jobs([*flags, *["-DDFLASH_CUDA"] * bool(cuda)])
        if cuda:
            named = os.environ.get("VLLM_DFLASH_CUDA_ARCHS", "").replace(",", ";")
            chosen = [arch for arch in named.split(";") if arch] or toolchain.architectures(cuda)
            jobs += toolchain.device_jobs(cuda, chosen)
        objects = toolchain.compile_all(jobs, ROOT / "build" / "objects")
        toolchain.link(objects, Path(self.get_ext_fullpath(ext.name)), cuda)


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


extension = Extension(
    "vllm_dflash._C",
    relative([*toolchain.sources(".cpp"), *toolchain.sources(".cu")]),
    depends=relative([*toolchain.headers(), *toolchain.sources(".py")]),
    py_limited_api=True,
)

setup(
    ext_modules=[] if os.environ.get("VLLM_DFLASH_NATIVE") == "0" else [extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
