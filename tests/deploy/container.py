# SPDX-License-Identifier: Apache-2.0
"""A pod's container without a cluster: the rendered manifest's command, environment, user and mounts, run for real."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from dockerfile_parse import DockerfileParser

from examples.demo.server import free_port
from tests.deploy import manifests
from tests.deploy.manifests import Manifest
from tests.deploy.tools import DEPLOY, ROOT
from vllm_dflash.bench.child import die_with_parent

API_KEY = "key-of-the-test"


def image_environment(recipe: Path) -> dict[str, str]:
    """The variables that an image sets for what runs in it."""
    entries = DockerfileParser(fileobj=recipe.open("rb")).structure
    lines = [entry["value"] for entry in entries if entry["instruction"] == "ENV"]
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def confinement_is_possible() -> bool:
    """Whether this user may make mounts of its own: a test of the container needs root, or a machine that lets it."""
    probe = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    try:
        return os.getuid() == 0 and subprocess.run(probe, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Container:
    """`with Container(...) as container:` is a server started as the pod's container would start it.

    Args:
        documents: a rendered overlay.
        models: what the models' volume holds: a folder of checkpoints.
        work: an empty folder for the log and the container's root.
    """

    def __init__(self, documents: list[Manifest], models: Path, work: Path) -> None:
        self.pod = manifests.pod_templates(manifests.only(documents, "Deployment"))[0]["spec"]
        (self.container,) = self.pod["containers"]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = work / "container.log"
        root = work / "root"
        root.mkdir()
        self.specification = work / "container.json"
        self.specification.write_text(
            json.dumps(
                {
                    "root": str(root),
                    "visible": sorted({str(ROOT), sys.prefix, sys.base_prefix, *self._editable()}),
                    "volumes": self._volumes(models, work / "models"),
                    "memory": self._memory(),
                    "uid": self.pod["securityContext"]["runAsUser"],
                    "command": [str(DEPLOY / "docker" / "serve-dflash"), *self.container["args"]],
                    "environment": self._environment(documents),
                    "folder": "/cache",
                }
            )
        )

    @staticmethod
    def _editable() -> set[str]:
        """Where an editable installation of this package points to, if elsewhere than here."""
        import vllm_dflash

        return {str(Path(vllm_dflash.__file__).resolve().parents[1])}

    def _mount(self, volume: str) -> str:
        (path,) = (mount["mountPath"] for mount in self.container["volumeMounts"] if mount["name"] == volume)
        return path

    def _volumes(self, models: Path, volume: Path) -> dict[str, str]:
        volume.mkdir()
        volume.chmod(0o777)  # the pod's fsGroup may write
        mounted = {self._mount("models"): str(volume)}
        # Each checkpoint is mounted by itself: the demo's are links to other folders.
        inside = [entry for entry in models.iterdir() if (entry / "config.json").exists()]
        return mounted | {f"{self._mount('models')}/{entry.name}": str(entry.resolve()) for entry in inside}

    def _memory(self) -> dict[str, str]:
        sizes = {v["name"]: v["emptyDir"]["sizeLimit"] for v in self.pod["volumes"] if "emptyDir" in v}
        return {self._mount(name): size.removesuffix("i") for name, size in sizes.items()}

    def _environment(self, documents: list[Manifest]) -> dict[str, str]:
        named = {entry["name"]: entry["value"] for entry in self.container["env"] if "value" in entry}
        return {
            "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **image_environment(DEPLOY / "docker" / "Dockerfile.cpu"),
            **manifests.settings(documents)["data"],
            **named,
            "VLLM_API_KEY": API_KEY,
            # The pod has a network of its own; here every server takes a free port.
            "PORT": str(self.port),
        }

    def __enter__(self) -> "Container":
        script = str(Path(__file__).with_name("confine.py"))
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-I", script]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(self.specification)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def probe(self, name: str) -> bool:
        """One probe of the manifest, as the kubelet would send it: any status from 200 to 399 is success."""
        get = self.container[name]["httpGet"]
        (port,) = (port for port in self.container["ports"] if port["name"] == get["port"])
        assert port["containerPort"] == 8000
        try:
            timeout = self.container[name].get("timeoutSeconds", 1)
            status = httpx.get(self.url + get["path"], trust_env=False, timeout=timeout).status_code
        except httpx.TransportError:
            return False
        return 200 <= status < 400

    def wait_until_started(self) -> float:
        """Seconds until the startup probe succeeds; within its own limit, and more often than the kubelet asks."""
        probe = self.container["startupProbe"]
        began = time.monotonic()
        while not self.probe("startupProbe"):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() - began < probe["periodSeconds"] * probe["failureThreshold"], self.log.read_text()
            time.sleep(0.5)
        return time.monotonic() - began
