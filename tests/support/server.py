# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` of a pair, as a user starts it, for tests over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from vllm_dflash.bench.child import NotHealthy, end_group, start, wait_until_healthy

HEALTHY_WITHIN = 600.0
STOPS_WITHIN = 60.0
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Server:
    """`with Server(target, drafter, "--data-parallel-size", "2") as server:` is a healthy server at `server.url`.

    drafter: None is a server without speculation. speculative: more keys of --speculative-config. options: the "dflash"
    of --additional-config.
    """

    def __init__(
        self,
        target: Path,
        drafter: Path | None,
        *arguments: str,
        speculative: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [str(Path(sys.executable).with_name("vllm")), "serve", str(target), "--served-model-name", "m"]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-model-len", "1024"]
        if drafter is not None:
            config = {"method": "dflash", "model": str(drafter), **(speculative or {})}
            self.command += ["--speculative-config", json.dumps(config)]
        if options is not None:
            self.command += ["--additional-config", json.dumps({"dflash": options})]
        self.command += arguments
        stock = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        self.environment = stock | VARIABLES | (environment or {})
        self.log = tempfile.NamedTemporaryFile(prefix="serve-", suffix=".log")

    def __enter__(self) -> Server:
        self.process = start(self.command, self.environment, Path(self.log.name))
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=600.0)
        try:
            wait_until_healthy(self.process, self.url, HEALTHY_WITHIN)
        except BaseException as error:
            printed = self.printed(80)
            self.__exit__()
            if isinstance(error, NotHealthy):
                raise RuntimeError(f"the server {error}\n{printed}") from None
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        end_group(self.process, signal.SIGTERM, STOPS_WITHIN)
        self.log.close()

    def printed(self, last: int) -> str:
        """The last lines that the server printed."""
        return "\n".join(Path(self.log.name).read_text(errors="replace").splitlines()[-last:])

    def complete(self, prompt: str, **body: Any) -> dict[str, Any]:
        """One request to /v1/completions, greedy unless asked otherwise; its JSON answer. RuntimeError for an error."""
        answer = self.client.post("/v1/completions", json={"model": "m", "prompt": prompt, "temperature": 0} | body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text}\n{self.printed(40)}")
        return answer.json()

    def complete_all(self, requests: Sequence[dict[str, Any]], at_once: int = 8) -> list[dict[str, Any]]:
        """Several requests, given by `complete`'s keywords, `at_once` of them at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda body: self.complete(**body), requests))

    def metrics(self) -> str:
        """The text of /metrics."""
        return self.client.get("/metrics").raise_for_status().text
