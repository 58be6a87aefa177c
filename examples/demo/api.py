# SPDX-License-Identifier: Apache-2.0
"""The two things the demo asks of a server: a streamed chat completion, and its speculation counters."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True)
class Answer:
    """A finished completion: its text, how many tokens it has, and the seconds from request to end."""

    text: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Speculation:
    """Totals since the server's start: blocks verified, draft tokens proposed, draft tokens accepted."""

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0

    def since(self, earlier: Speculation) -> Speculation:
        return Speculation(
            self.drafts - earlier.drafts,
            self.proposed - earlier.proposed,
            self.accepted - earlier.accepted,
        )

    def acceptance_length(self) -> float:
        """Tokens a verification step, the verifier's own included; 1.0 where nothing was drafted."""
        return 1.0 + (self.accepted / self.drafts if self.drafts else 0.0)


def stream_answer(url: str, model: str, prompt: str, max_tokens: int, show: Callable[[str], None]) -> Answer:
    """Ask at temperature 0 through /v1/chat/completions, handing each piece of text to `show` as it arrives.

    Raises httpx.HTTPError where the server refuses or breaks off.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    tokens = 0
    began = time.perf_counter()
    with (
        httpx.Client(trust_env=False, timeout=300.0) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                pieces.append(piece)
                show(piece)
    return Answer("".join(pieces), tokens, time.perf_counter() - began)


def read_speculation(url: str) -> Speculation:
    """The server's own counters from /metrics, summed over engines; zeros where it does not speculate."""
    totals = dict.fromkeys(COUNTERS, 0.0)
    page = httpx.get(f"{url}/metrics", trust_env=False, timeout=30.0).raise_for_status().text
    for line in page.splitlines():
        for counter in COUNTERS:
            if line.startswith((f"vllm:spec_decode_{counter}_total{{", f"vllm:spec_decode_{counter}_total ")):
                totals[counter] += float(line.rsplit(" ", 1)[1])
    return Speculation(*(int(totals[counter]) for counter in COUNTERS))
