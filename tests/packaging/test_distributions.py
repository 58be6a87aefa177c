# SPDX-License-Identifier: Apache-2.0
"""What is in the source distribution and in the wheel built from it."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked: built from a copy of the tracked files, so that left-overs of other builds stay out."""
    work = tmp_path_factory.mktemp("sdist")
    for name in tracked():
        (work / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, work / "tree" / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(work)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=work / "tree", check=True, capture_output=True, timeout=300)
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    return unpacked


def build_wheel(source: Path, folder: Path, **environment: str) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(source)],
        check=True,
        capture_output=True,
        timeout=1800,
        env=os.environ | environment,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_sdist_has_all_that_a_build_needs(source_distribution: Path) -> None:
    needed = tracked("csrc", "vllm_dflash", "pyproject.toml", "setup.py", "README.md", "LICENSE")
    held = {str(p.relative_to(source_distribution)) for p in source_distribution.rglob("*") if p.is_file()}
    assert needed - held == set()


def test_the_wheel_has_the_package_and_nothing_else(source_distribution: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(source_distribution, tmp_path, VLLM_DFLASH_NATIVE="0")) as wheel:
        names = set(wheel.namelist())
        (entries,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        entry_points = wheel.read(entries).decode()
    info = entries.rpartition("/")[0]
    assert {name for name in names if not name.startswith(info)} == tracked("vllm_dflash")
    assert f"{info}/licenses/LICENSE" in names
    assert "dflash = vllm_dflash.plugin:register" in entry_points
    assert "vllm-dflash = vllm_dflash.cli:main" in entry_points


@pytest.mark.slow
def test_the_native_wheel_serves_every_python(source_distribution: Path, tmp_path: Path) -> None:
    wheel = build_wheel(source_distribution, tmp_path, VLLM_DFLASH_CUDA="0")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == ["vllm_dflash/_C.abi3.so"]
