# SPDX-License-Identifier: Apache-2.0
"""Requests of several workloads, some at a time, until it is enough."""

import threading
from typing import Any

import httpx

from tests.deploy.container import API_KEY

PROMPTS = {
    "chat": "Explain in a few sentences why the sky is blue.",
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "list": "List three things to check before a long bicycle ride.",
}
HEADERS = {"Authorization": f"Bearer {API_KEY}"}


def chat(workload: str, tokens: int, **more: Any) -> dict[str, Any]:
    """The body of one request at temperature 0."""
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": PROMPTS[workload]}],
        "max_tokens": tokens,
        "temperature": 0,
        "vllm_xargs": {"dflash": {"workload": workload}},
        **more,
    }


class Load:
    """`with Load(url) as load:` keeps `clients` requests running; `answers` and `failures` tell what came of them."""

    def __init__(self, url: str, clients: int = 3, tokens: int = 24) -> None:
        self.url, self.clients, self.tokens = url, clients, tokens
        self.answers = 0
        self.failures: list[str] = []
        self._enough = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(index,), daemon=True) for index in range(clients)]

    def _ask(self, index: int) -> None:
        workload = list(PROMPTS)[index % len(PROMPTS)]
        with httpx.Client(base_url=self.url, headers=HEADERS, trust_env=False, timeout=120) as client:
            while not self._enough.is_set():
                try:
                    answer = client.post("/v1/chat/completions", json=chat(workload, self.tokens)).raise_for_status()
                except httpx.HTTPError as failure:
                    self.failures.append(str(failure))
                    return
                with self._lock:
                    self.answers += answer.json()["usage"]["completion_tokens"] > 0

    def stop(self) -> None:
        """No further requests; returns when the running ones are answered."""
        self._enough.set()
        for thread in self._threads:
            thread.join(120)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
