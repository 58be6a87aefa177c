# SPDX-License-Identifier: Apache-2.0
"""The images' recipes, read by a parser (no engine builds them here), and the start command's decisions."""

import fnmatch
import os
import re
import subprocess
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from tests.deploy.tools import DEPLOY, ROOT
from vllm_dflash.engine.versions import SUPPORTED

DOCKER = DEPLOY / "docker"
RECIPES = ["Dockerfile", "Dockerfile.cpu"]
SERVE = DOCKER / "serve-dflash"


def parsed(name: str) -> list[dict[str, str]]:
    # Given the text itself: by path the parser would look for a file of its own name, and may write.
    parser = DockerfileParser(fileobj=(DOCKER / name).open("rb"))
    return [entry for entry in parser.structure if entry["instruction"] != "COMMENT"]


def last(entries: list[dict[str, str]], instruction: str) -> str:
    return [entry["value"] for entry in entries if entry["instruction"] == instruction][-1]


@pytest.mark.parametrize("name", RECIPES)
def test_the_base_is_vllms_image_of_one_supported_version(name: str) -> None:
    entries = parsed(name)
    assert [entry["value"] for entry in entries if entry["instruction"] == "FROM"] == ["${VLLM} AS wheel", "${VLLM}"]
    image, tag = last([entries[0]], "ARG").removeprefix("VLLM=").split(":")
    assert image == ("vllm/vllm-openai-cpu" if name.endswith(".cpu") else "vllm/vllm-openai")
    assert re.fullmatch(r"v\d+\.\d+\.\d+", tag)
    assert ".".join(tag[1:].split(".")[:2]) in SUPPORTED


@pytest.mark.parametrize("name", RECIPES)
def test_the_image_ends_as_another_user_than_root(name: str) -> None:
    entries = parsed(name)
    assert last(entries, "USER") == "10001:10001"
    assert last(entries, "ENTRYPOINT") == '["/usr/local/bin/serve-dflash"]'
    assert last(entries, "STOPSIGNAL") == "SIGTERM"
    assert "--shutdown-timeout" in last(entries, "CMD")
    assert any("--uid 10001 --gid 10001" in entry["value"] for entry in entries if entry["instruction"] == "RUN")


@pytest.mark.parametrize("name", RECIPES)
def test_instructions_are_ones_that_docker_knows_and_shells_accept(name: str, tmp_path: Path) -> None:
    known = {"ARG", "FROM", "USER", "SHELL", "RUN", "ENV", "WORKDIR", "COPY", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT"}
    for entry in parsed(name):
        assert entry["instruction"] in known | {"CMD"}
        if entry["instruction"] == "RUN":
            script = re.sub(r"^(--mount=\S+\s+)+", "", entry["value"])
            subprocess.run(["bash", "-n", "-c", script], check=True)
            assert "apt-get install" not in script or "rm -rf /var/lib/apt/lists/*" in script
            for install in re.findall(r"pip install ([^&]*)", script):
                assert "--no-deps /dist/" in install or re.fullmatch(
                    r"--no-cache-dir (\"[\w-]+==[\w.]+\"\s*)+", install
                ), f"not pinned: {install}"


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_copied_is_there_and_not_ignored(name: str) -> None:
    rules = (DOCKER / f"{name}.dockerignore").read_text().splitlines()
    assert rules[0] == "*"
    for entry in parsed(name):
        if entry["instruction"] != "COPY":
            continue
        *sources, _ = (part for part in entry["value"].split() if not part.startswith("--"))
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(source, rule[1:]) for rule in rules if rule.startswith("!")), source


@pytest.mark.parametrize("name", RECIPES)
def test_the_wheel_is_built_with_the_tools_of_the_lock(name: str) -> None:
    lock = (ROOT / "requirements-cpu.lock").read_text().splitlines()
    for pin in re.findall(r'"((?:setuptools|wheel)==[\w.]+)"', (DOCKER / name).read_text()):
        assert pin in lock


def serve(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The start command, with a `vllm` that prints what it was given."""
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "plugins=${VLLM_PLUGINS-unset}"\nprintf "%s\\n" "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
    return subprocess.run([str(SERVE), *arguments], env=environment, capture_output=True, text=True, timeout=30)


def test_serve_takes_the_catalogues_draft_or_the_one_named(tmp_path: Path) -> None:
    done = serve(tmp_path, "--dtype", "float32", MODEL="org/a model")
    assert done.stdout.splitlines() == [
        "plugins=unset",
        "serve",
        "org/a model",
        *("--host", "0.0.0.0", "--port", "8000"),
        *("--speculative-config.method", "dflash"),
        *("--dtype", "float32"),
    ]
    for empty in ({}, {"DRAFTER": ""}):
        assert "--speculative-config.model" not in serve(tmp_path, MODEL="m", **empty).stdout
    named = serve(tmp_path, MODEL="m", DRAFTER="a b", PORT="81").stdout.splitlines()
    assert named[named.index("--speculative-config.model") + 1] == "a b"
    assert named[named.index("--port") + 1] == "81"


def test_one_variable_switches_off_draft_and_plugin(tmp_path: Path) -> None:
    done = serve(tmp_path, "--dtype", "float32", MODEL="m", DRAFTER="d", DFLASH="off")
    assert done.stdout.splitlines() == [
        "plugins=",
        *("serve", "m", "--host", "0.0.0.0", "--port", "8000", "--dtype", "float32"),
    ]


@pytest.mark.parametrize(
    ("environment", "said"), [({}, "MODEL is not set"), ({"MODEL": "m", "DFLASH": "no"}, 'DFLASH is "no"')]
)
def test_serve_says_what_is_wrong(tmp_path: Path, environment: dict[str, str], said: str) -> None:
    done = serve(tmp_path, **environment)
    assert (done.returncode, done.stdout) == (64, "")
    assert said in done.stderr
