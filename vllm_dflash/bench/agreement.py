# SPDX-License-Identifier: Apache-2.0
"""Whether a group writes what plain decoding writes, and where not, how near the two tokens were.

In fp32 a speculating server gives plain decoding's tokens. In bf16 rows that are verified together round otherwise
than one by one, so near-ties fall otherwise: the logit gap at the first difference tells a near-tie from a fault.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from vllm_dflash.bench.load import Traffic
from vllm_dflash.bench.server import BenchError, Server

LOGPROBS = 20


def answers(
    server: Server, prompts: Sequence[str], tokens: int, traffic: Traffic, logprobs: bool
) -> list[dict[str, Any]]:
    """Greedy answers, one request at a time: {"tokens": [texts], "logprobs": [{text: logprob} a position]}."""
    return [_answer(server, prompt, tokens, traffic, logprobs) for prompt in prompts]


def _answer(server: Server, prompt: str, tokens: int, traffic: Traffic, logprobs: bool) -> dict[str, Any]:
    chat = traffic.template == "server"
    body: dict[str, Any] = {"model": "target", "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    body |= traffic.extra_body() | {"ignore_eos": traffic.ignore_eos, "return_tokens_as_token_ids": True}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
        body |= {"logprobs": True, "top_logprobs": LOGPROBS} if logprobs else {}
    else:
        body["prompt"] = prompt
        body |= {"logprobs": LOGPROBS} if logprobs else {}
    choice = _post(server, "/v1/chat/completions" if chat else "/v1/completions", body)["choices"][0]
    return {"tokens": choice["token_ids"], "logprobs": _by_id(choice, chat) if logprobs else []}


def _by_id(choice: dict[str, Any], chat: bool) -> list[dict[str, float]]:
    """Token id (as text) -> logprob, a position; vLLM writes "token_id:17" for the id 17."""
    listed = choice["logprobs"]
    if chat:
        tables = [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in listed["content"]]
    else:
        tables = listed["top_logprobs"]
    return [{name.removeprefix("token_id:"): value for name, value in table.items()} for table in tables]


def _post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=1800) as answer:
            return json.loads(answer.read())
    except (urllib.error.URLError, OSError) as error:
        server.require_alive()
        said = error.read().decode(errors="replace")[:300] if isinstance(error, urllib.error.HTTPError) else ""
        raise BenchError(f"The server of the group {server.name} refused a request: {error}. {said}") from None


def compare(plain: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many answers are the same tokens, and the logit gaps at the first difference of the rest.

    The gap is plain decoding's logprob of its own token less that of the other's, at that position, given the same
    tokens before; None where the other's is not among its 20 best (then `outside` counts it).
    """
    same, gaps, outside, at = 0, [], 0, []
    for ours, theirs in zip(plain, other, strict=True):
        pairs = list(zip(ours["tokens"], theirs["tokens"], strict=False))
        first = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
        if first is None and len(ours["tokens"]) == len(theirs["tokens"]):
            same += 1
            continue
        first = len(pairs) if first is None else first
        at.append(first)
        if first >= min(len(ours["tokens"]), len(theirs["tokens"])):
            outside += 1
            continue
        table = ours["logprobs"][first]
        mine, yours = table.get(str(ours["tokens"][first])), table.get(str(theirs["tokens"][first]))
        if mine is None or yours is None:
            outside += 1
        else:
            gaps.append(mine - yours)
    return {
        "answers": len(plain),
        "same": same,
        "first_difference": at,
        "logit_gaps": gaps,
        "largest_gap": max(gaps, default=None),
        "outside": outside,
    }
