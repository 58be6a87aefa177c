# SPDX-License-Identifier: Apache-2.0
"""requirements-cpu.lock against pyproject.toml and against what the locked packages themselves ask for."""

import ast
import platform
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock import FILES_ONLY, LEFT_OUT, ROOT, project_roots, requirements_of

LINES = (ROOT / "requirements-cpu.lock").read_text().splitlines()
PINS = dict(line.split(" ;")[0].strip().split("==") for line in LINES if not line.startswith("#"))


def test_every_line_is_an_exact_version_and_nothing_else() -> None:
    pin = re.compile(r'[a-z0-9-]+==[A-Za-z0-9.+]+( ; platform_machine == "x86_64")?')
    assert [line for line in LINES if not line.startswith("#") and not pin.fullmatch(line)] == []
    assert PINS["torch"].endswith("+cpu")


@pytest.mark.parametrize("requirement", project_roots(), ids=str)
def test_the_lock_is_within_the_ranges(requirement: Requirement) -> None:
    pinned = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pinned, prereleases=True)


def test_the_build_tools_are_locked_within_their_ranges() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in map(Requirement, build):
        assert requirement.specifier.contains(PINS[requirement.name], prereleases=True), requirement


def test_the_lock_is_closed_over_its_own_requirements() -> None:
    """--no-deps installs exactly the lock, so what a package asks for must be in it, in a version that suits."""
    if not version("vllm").endswith("+cpu"):
        pytest.skip("the lock is for CPU machines, and this environment has a CUDA build of vLLM")
    python, machine = ".".join(platform.python_version_tuple()[:2]), platform.machine()
    unmet = []
    for name, pinned in PINS.items():
        assert version(name) == pinned, f"{name} {version(name)} is installed, {pinned} is locked: make setup"
        if name in FILES_ONLY:
            continue
        for requirement in requirements_of(name, "", python, machine):
            wanted = canonicalize_name(requirement.name)
            if wanted in LEFT_OUT:
                continue
            if wanted not in PINS or not requirement.specifier.contains(PINS[wanted], prereleases=True):
                unmet.append(f"{name} asks for {requirement}, the lock has {PINS.get(wanted)}")
    assert unmet == []


def test_everything_imported_is_locked() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    own = {part for file in files for part in (*file.relative_to(ROOT).parts[:-1], file.stem)}
    imported = set[str]()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    provided = {
        module
        for module, names in packages_distributions().items()
        if any(canonicalize_name(name) in PINS for name in names)
    }
    assert imported - own - provided - sys.stdlib_module_names == set()


def test_what_breaks_transformers_is_not_locked() -> None:
    assert LEFT_OUT.isdisjoint(PINS)
