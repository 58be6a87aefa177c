# SPDX-License-Identifier: Apache-2.0
"""Builds vllm_dflash._C: the CPU part with any C++17 compiler, the CUDA part too where nvcc is found.

Environment: VLLM_DFLASH_CUDA=0 leaves CUDA out, =1 insists on it; VLLM_DFLASH_CUDA_ARCHS="80;90" builds for
these only (default below, plus PTX of the last); VLLM_DFLASH_NATIVE=0 installs without the extension; CXX is
the compiler. Objects are kept in build/objects by the hash of what made them, so only what changed is
compiled again.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
ARCHS = ["75", "80", "86", "89", "90", "100", "120"]
OLDEST_TORCH = "0x020a000000000000"  # 2.10
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
ISAS = {"baseline": [], "avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16"]}
if platform.machine() not in ("x86_64", "AMD64"):
    ISAS = {"baseline": []}


def headers() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh"))


def sources(suffix: str) -> list[Path]:
    return sorted(CSRC.rglob(f"*{suffix}"))


def compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    sys.exit(
        "vllm-dflash: no C++ compiler found (CXX, g++, clang++). Install one, or set VLLM_DFLASH_NATIVE=0"
        " to install without the extension; its operations then run as slower torch code."
    )


def accepts(cxx: list[str], flags: list[str]) -> bool:
    """Whether the compiler knows these flags; an older one leaves the newer instruction sets out."""
    command = [*cxx, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return not flags or subprocess.run(command, capture_output=True).returncode == 0


def toolkit() -> Path | None:
    """The CUDA toolkit's folder: CUDA_HOME, or where nvcc itself says it is (a wrapper may be)."""
    if os.environ.get("VLLM_DFLASH_CUDA") == "0":
        return None
    if home := os.environ.get("CUDA_HOME"):
        return Path(home)
    if not shutil.which("nvcc"):
        if os.environ.get("VLLM_DFLASH_CUDA") == "1":
            sys.exit("vllm-dflash: VLLM_DFLASH_CUDA=1, but nvcc is not on the PATH and CUDA_HOME is not set.")
        print("vllm-dflash: nvcc not found, building the CPU part only.", flush=True)
        return None
    said = subprocess.run(["nvcc", "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    here = [line.split("=", 1)[1] for line in said.splitlines() if line.startswith("#$ _HERE_=")]
    return Path(here[0]).parent if here else None


def architectures() -> list[str]:
    archs = os.environ.get("VLLM_DFLASH_CUDA_ARCHS", ";".join(ARCHS)).replace(",", ";").split(";")
    last = archs[-1]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [*flags, f"-gencode=arch=compute_{last},code=compute_{last}"]


class BuildExtension(build_ext):
    """Compiles by plain commands: each file once, CPU loops once an instruction set, .cu files with nvcc."""

    def build_extension(self, ext: Extension) -> None:
        try:
            from torch.utils.cpp_extension import include_paths, library_paths
        except ImportError:
            sys.exit(
                "vllm-dflash: torch is needed to build the extension. Install torch first and use"
                " pip install --no-build-isolation, or set VLLM_DFLASH_NATIVE=0 to install without the"
                " extension."
            )
        cxx, cuda = shlex.split(compiler()), toolkit()
        flags = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-DNDEBUG"]
        torch_flags = [f"-DTORCH_TARGET_VERSION={OLDEST_TORCH}", "-DTORCH_STABLE_ONLY"]
        torch_flags += ["-DPy_LIMITED_API=0x030B0000"]
        torch_flags += [f"-isystem{path}" for path in [*include_paths(), *self.include_dirs]]
        isas = {isa: machine for isa, machine in ISAS.items() if accepts(cxx, machine)}
        torch_flags += [f"-DDFLASH_{isa.upper()}" for isa in isas] + ["-DDFLASH_CUDA"] * bool(cuda)
        loops = CSRC / "cpu" / "kernels.cpp"
        commands = [(path, [*cxx, *flags, *torch_flags, "-c"]) for path in sources(".cpp") if path != loops]
        for isa, machine in isas.items():
            exact = ["-fno-math-errno", "-fno-trapping-math", f"-DDFLASH_ISA={isa}"]
            commands.append((loops, [*cxx, *flags, *exact, *machine, "-c"]))
        link = []
        if cuda:
            nvcc = [str(cuda / "bin" / "nvcc"), "-std=c++17", "-O3", "-t0"]
            nvcc += ["-Xcompiler", "-fPIC,-fvisibility=hidden", *architectures(), "-c"]
            commands += [(path, nvcc) for path in sources(".cu")]
            # The runtime is linked in and its symbols kept private.
            link = [f"-L{cuda}/lib64", "-lcudart_static", "-lrt", "-ldl", "-lpthread"]
            link += ["-Wl,--exclude-libs,ALL"]
        common = b"".join(path.read_bytes() for path in headers())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: self.compile(*job, common), commands))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        link += [*(f"-L{path}" for path in library_paths()), "-ltorch", "-ltorch_cpu", "-lc10"]
        link += ["-Wl,--gc-sections"]
        subprocess.check_call([*cxx, "-shared", *map(str, objects), *link, "-o", str(target)])

    def compile(self, source: Path, command: list[str], common: bytes) -> Path:
        key = hashlib.sha256(common + source.read_bytes() + "\0".join(command).encode()).hexdigest()[:20]
        built = ROOT / "build" / "objects" / f"{source.stem}-{key}.o"
        if not built.exists():
            built.parent.mkdir(parents=True, exist_ok=True)
            unfinished = built.with_suffix(f".{os.getpid()}.tmp.o")
            subprocess.check_call([*command, str(source), "-o", str(unfinished)])
            unfinished.replace(built)
        return built


extension = Extension(
    "vllm_dflash._C",
    [str(path.relative_to(ROOT)) for path in [*sources(".cpp"), *sources(".cu")]],
    depends=[str(path.relative_to(ROOT)) for path in headers()],
    py_limited_api=True,
)

setup(
    ext_modules=[] if os.environ.get("VLLM_DFLASH_NATIVE") == "0" else [extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
