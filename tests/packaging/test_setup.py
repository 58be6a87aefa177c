# SPDX-License-Identifier: Apache-2.0
"""`make setup`: what it refuses, what it repairs, and that a second run does nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import environment

SCRIPT = environment.ROOT / "scripts" / "setup.sh"


def run_setup(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", str(SCRIPT)], capture_output=True, text=True, timeout=600, env=os.environ | variables)


@pytest.fixture
def scratch_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The set-up's functions, pointed at an environment of their own."""
    venv = tmp_path / ".venv"
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "VENV", venv)
    monkeypatch.setattr(environment, "PYTHON", venv / "bin" / "python")
    for name, file in (("LOG", "setup.log"), ("STATE", "setup.json"), ("UNFINISHED", "setup.unfinished")):
        monkeypatch.setattr(environment, name, venv / file)
    return venv


def test_a_missing_python_is_named() -> None:
    run = run_setup(PYTHON="no-such-python")
    assert run.returncode == 1
    assert "no-such-python is not on the PATH; Python 3.11 or newer is needed" in run.stderr


def test_an_old_python_is_named(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    run = run_setup(PYTHON=str(old))
    assert run.returncode == 1
    assert "is Python 3.9.2; Python 3.11 or newer is needed" in run.stderr


def test_an_unknown_machine_is_refused() -> None:
    run = run_setup(PYTHON=sys.executable, MACHINE="tpu")
    assert run.returncode == 1
    assert "MACHINE is 'tpu'; it may be cpu or cuda." in run.stderr


def test_a_second_run_does_nothing() -> None:
    if Path(sys.prefix) != environment.VENV or "package" not in environment.read_state():
        pytest.skip("this environment was not made by `make setup`")
    before = environment.STATE.stat().st_mtime_ns
    run = run_setup(PYTHON=getattr(sys, "_base_executable", sys.executable))
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert environment.STATE.stat().st_mtime_ns == before


def test_a_half_made_environment_is_made_anew(scratch_venv: Path) -> None:
    (scratch_venv / "bin").mkdir(parents=True)
    (scratch_venv / "bin" / "python").symlink_to("/dev/null")
    (scratch_venv / "left-over").touch()
    environment.UNFINISHED.touch()
    assert environment.make_venv({"dependencies": "x"}, "here") == {}
    assert not (scratch_venv / "left-over").exists()
    assert environment.UNFINISHED.exists()  # until its packages are in
    assert subprocess.run([str(environment.PYTHON), "-m", "pip", "--version"]).returncode == 0


def test_a_whole_environment_is_kept_and_a_moved_one_is_not(scratch_venv: Path) -> None:
    environment.make_venv({}, "here")
    environment.UNFINISHED.unlink()
    mark = scratch_venv / "mark"
    mark.touch()
    state: dict[str, object] = {"made_for": "here", "dependencies": "x"}
    assert environment.make_venv(state, "here") == state
    assert mark.exists()
    assert environment.make_venv(state, "elsewhere") == {}
    assert not mark.exists()


def test_the_fingerprint_sees_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    folder = tmp_path / "csrc"
    (folder / "deep").mkdir(parents=True)
    file = folder / "deep" / "kernel.cuh"
    file.write_text("one")
    first = environment.fingerprint("cpu", folder)
    file.write_text("two")
    second = environment.fingerprint("cpu", folder)
    file.rename(folder / "deep" / "other.cuh")
    third = environment.fingerprint("cpu", folder)
    assert len({first, second, third, environment.fingerprint("cuda", folder)}) == 4
