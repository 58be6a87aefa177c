# SPDX-License-Identifier: Apache-2.0
"""What must hold for every tracked file: licence lines, no trace of one machine, and commands that exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Public sites that a reader may be sent to. A host that is not here may be somebody's own.
PUBLIC_HOSTS = {
    "127.0.0.1",
    "arxiv.org",
    "download.pytorch.org",
    "github.com",
    "huggingface.co",
    "localhost",
    "prometheus-operated.monitoring.svc",  # within a cluster, by the Prometheus operator's convention
    "www.apache.org",
}
# Folders of one machine or one person; a place for the user's own files is written ~, $HOME or FOLDER.
OWN_FOLDERS = re.compile(r"(?<![\w.~$}])/(?:work|root|home|Users|mnt)/\w")
LICENSED = {".py", ".sh", ".c", ".h", ".cpp", ".cu", ".cuh", ".toml"}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Path -> content of every tracked text file that exists."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    found = {}
    for name in listed.stdout.splitlines():
        try:
            found[name] = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
    return found


def test_no_file_names_a_folder_of_one_machine(texts: dict[str, str]) -> None:
    assert [name for name, text in texts.items() if OWN_FOLDERS.search(text)] == []


def test_every_host_is_a_public_one(texts: dict[str, str]) -> None:
    hosts = {
        (name, host.rstrip("."))
        for name, text in texts.items()
        for host in re.findall(r"https?://([A-Za-z0-9][A-Za-z0-9.-]*)", text)
    }
    assert sorted(pair for pair in hosts if pair[1] not in PUBLIC_HOSTS) == []


def test_every_source_file_names_its_licence(texts: dict[str, str]) -> None:
    sources = [name for name in texts if Path(name).suffix in LICENSED or name in ("Makefile", ".ci/run")]
    bare = [
        name
        for name in sources
        if texts[name].strip() and "SPDX-License-Identifier: Apache-2.0" not in texts[name][:200]
    ]
    assert bare == []


def test_every_make_command_in_the_documents_exists(texts: dict[str, str]) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", texts["Makefile"], flags=re.MULTILINE))
    promised = {
        (name, target)
        for name, text in texts.items()
        if name.endswith(".md")
        for target in re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", text, flags=re.MULTILINE)
    }
    assert sorted(pair for pair in promised if pair[1] not in targets) == []


def test_every_test_that_make_test_v2_names_exists(texts: dict[str, str]) -> None:
    names = [line.partition("[")[0].partition("::") for line in texts["tests/engine/v2_tests.txt"].splitlines()]
    assert len(names) > 20
    assert [(file, test) for file, _, test in names if f"def {test}" not in texts.get(file, "")] == []
