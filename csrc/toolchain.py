# SPDX-License-Identifier: Apache-2.0
"""How csrc is compiled, by plain commands: used by setup.py, and by the tests that run the CUDA source on a
CPU."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CSRC = Path(__file__).parent.resolve()
ARCHITECTURES = ["75", "80", "86", "89", "90", "100", "120"]
OLDEST_TORCH = "0x020a000000000000"  # 2.10: the wheel runs on it and on later ones
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {"baseline": [], "avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16"]}
if platform.machine() not in ("x86_64", "AMD64"):
    INSTRUCTION_SETS = {"baseline": []}

Job = tuple[Path, list[str]]  # a source and the command that compiles it, up to the source's name


def headers() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh"))


def sources(suffix: str, under: str = "") -> list[Path]:
    return sorted((CSRC / under).rglob(f"*{suffix}"))


def compiler() -> list[str]:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
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
    if home := os.environ.get("CUDA_HOME"):
        return Path(home)
    if not shutil.which("nvcc"):
        return None
    said = subprocess.run(["nvcc", "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    here = [line.split("=", 1)[1] for line in said.splitlines() if line.startswith("#$ _HERE_=")]
    return Path(here[0]).parent if here else None


def torch_flags(python_include: Iterable[str] = ()) -> list[str]:
    from torch.utils.cpp_extension import include_paths

    flags = [f"-DTORCH_TARGET_VERSION={OLDEST_TORCH}", "-DTORCH_STABLE_ONLY", "-DPy_LIMITED_API=0x030B0000"]
    return [*flags, *(f"-isystem{path}" for path in [*include_paths(), *python_include])]


def cxx_flags() -> list[str]:
    return ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-DNDEBUG", "-c"]


def host_jobs(flags: list[str]) -> list[Job]:
    """The processor's part: every .cpp once, the vectorised loops once an instruction set."""
    cxx, loops = compiler(), CSRC / "cpu" / "kernels.cpp"
    known = {name: machine for name, machine in INSTRUCTION_SETS.items() if accepts(cxx, machine)}
    flags = [*cxx_flags(), *flags, *(f"-DDFLASH_{name.upper()}" for name in known)]
    jobs = [(path, [*cxx, *flags]) for path in sources(".cpp") if path != loops]
    exact = ["-fno-math-errno", "-fno-trapping-math"]
    return jobs + [(loops, [*cxx, *cxx_flags(), *exact, *known[n], f"-DDFLASH_ISA={n}"]) for n in known]


def architectures(cuda: Path) -> list[str]:
    """Those of ARCHITECTURES that this nvcc knows."""
    said = subprocess.run([cuda / "bin" / "nvcc", "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    return [arch for arch in ARCHITECTURES if f"compute_{arch}" in said] or ARCHITECTURES


def device_jobs(cuda: Path, archs: Sequence[str], extra: Sequence[str] = ()) -> list[Job]:
    """The CUDA part: every .cu for all architectures, and PTX of the last for later ones."""
    last = archs[-1]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets += [f"-gencode=arch=compute_{last},code=compute_{last}"]
    nvcc = [str(cuda / "bin" / "nvcc"), "-std=c++17", "-O3", "-t0", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    return [(path, [*nvcc, *targets, *extra, "-c"]) for path in sources(".cu")]


def compile_all(jobs: Sequence[Job], folder: Path, depends: Sequence[Path] = ()) -> list[Path]:
    """Objects in `folder`, named by the hash of what made them: what has not changed is not compiled
    again."""
    common = b"".join(path.read_bytes() for path in [*headers(), *depends])
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(job: Job) -> Path:
        source, command = job
        key = hashlib.sha256(common + source.read_bytes() + "\0".join(command).encode()).hexdigest()[:20]
        built = folder / f"{source.stem}-{key}.o"
        if not built.exists():
            unfinished = folder / f"{source.stem}-{key}.{os.getpid()}.o"
            with built.with_suffix(".log").open("w") as log:
                done = subprocess.run([*command, str(source), "-o", str(unfinished)], stderr=log)
            if done.returncode:
                sys.exit(f"vllm-dflash: {source} does not compile:\n{built.with_suffix('.log').read_text()}")
            unfinished.replace(built)
        return built

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, jobs))


def link(objects: Sequence[Path], target: Path, cuda: Path | None = None, extra: Sequence[str] = ()) -> None:
    from torch.utils.cpp_extension import library_paths

    flags = [*extra, *(f"-L{path}" for path in library_paths()), "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--gc-sections"]
    if cuda:  # the CUDA runtime goes into the extension, its symbols kept private
        flags += [
            f"-L{cuda}/lib64",
            f"-L{cuda}/lib",
            "-lcudart_static",
            "-lrt",
            "-ldl",
            "-lpthread",
            "-Wl,--exclude-libs,ALL",
        ]
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")  # a running process keeps the library it has loaded
    subprocess.check_call([*compiler(), "-shared", *map(str, objects), *flags, "-o", str(unfinished)])
    unfinished.replace(target)
