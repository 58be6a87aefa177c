# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus with this repository's configuration and rules, hurried: it scrapes and evaluates each second."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from examples.demo.server import free_port
from tests.deploy.tools import DEPLOY, PROMETHEUS, tool
from vllm_dflash.bench.child import die_with_parent

Series = dict[str, Any]


class Prometheus:
    """`with Prometheus(folder, target) as prometheus:` scrapes target ("host:port") until the end."""

    def __init__(self, folder: Path, target: str) -> None:
        configuration = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
        assert "localhost:8000" in configuration and "scrape_interval: 15s" in configuration
        configuration = configuration.replace("localhost:8000", target).replace("interval: 15s", "interval: 1s")
        (folder / "prometheus.yaml").write_text(configuration)
        rules = (DEPLOY / "prometheus" / "rules.yaml").read_text()
        (folder / "rules.yaml").write_text(re.sub(r"^(    interval:) 30s$", r"\1 1s", rules, flags=re.MULTILINE))
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.client = httpx.Client(base_url=f"http://{self.address}", trust_env=False, timeout=30)

    def __enter__(self) -> "Prometheus":
        program = tool("prometheus", PROMETHEUS)
        command = [program, f"--config.file={self.folder}/prometheus.yaml", f"--web.listen-address={self.address}"]
        command += [f"--storage.tsdb.path={self.folder}/data", "--log.level=warn"]
        with (self.folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )
        deadline = time.monotonic() + 60
        while not self._ready():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.2)
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.client.close()

    def _ready(self) -> bool:
        try:
            return self.client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return (self.folder / "prometheus.log").read_text()

    def _data(self, path: str, **parameters: str | float) -> Any:
        response = self.client.get(f"/api/v1/{path}", params=parameters)
        answer = response.json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def query(self, expression: str) -> list[Series]:
        """What an expression gives now: a list of series with their labels and values."""
        return self._data("query", query=expression)["result"]

    def over_time(self, expression: str, start: float, end: float, step: float = 1.0) -> list[Series]:
        return self._data("query_range", query=expression, start=start, end=end, step=step)["result"]

    def names(self) -> set[str]:
        """Every metric name that was scraped or recorded."""
        return set(self._data("label/__name__/values"))

    def rules(self) -> dict[str, str]:
        """Name -> health of every rule that is loaded."""
        return {rule["name"]: rule["health"] for group in self._data("rules")["groups"] for rule in group["rules"]}

    def target(self) -> dict[str, Any]:
        (target,) = self._data("targets")["activeTargets"]
        return target
