# SPDX-License-Identifier: Apache-2.0
"""Options over HTTP, and requests that nobody should send, at a real `vllm serve` with a drafter: it answers, goes on,
and leaks nothing.

After every attack the same harmless request must give the same text as before it, and the server must be idle.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from examples.demo.server import Server

pytestmark = pytest.mark.engine

CONNECTIONS = 500
LABELS = 16
HARMLESS = {"prompt": [3, 28, 23, 9, 27, 4, 20, 11], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
BAD_OPTIONS = {
    "no object": "yes",
    "a list": ["max_draft_tokens", 3],
    "text for a number": {"max_draft_tokens": "three"},
    "negative": {"max_draft_tokens": -1},
    "fraction": {"max_draft_tokens": 1.5},
    "null": {"max_draft_tokens": None, "block": 1},
    "truth value": {"max_draft_tokens": True},
    "unknown field": {"max_drafts": 3},
    "nested": {"max_draft_tokens": {"a": {"b": {}}}},
    "label of the wrong kind": {"workload": 7},
}

PROMPT = "t3 t9 t23 t17 t4 t3 t9"
ENDPOINTS = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 24},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 24},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24},
}


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory) -> Iterator[Server]:
    pair = trained("dflash2")
    speculative = {"method": "dflash", "model": str(pair.drafter)}
    arguments = ["--speculative-config", json.dumps(speculative), "--dtype", "float32", "--max-num-seqs", "64"]
    # Few blocks: cache that is touched for the first time would look like a leak.
    arguments += ["--max-model-len", "512", "--seed", "0", "--num-gpu-blocks-override", "300"]
    # Every step drafts, whatever pays on this machine.
    arguments += ["--served-model-name", "tiny", "--additional-config", json.dumps({"dflash": {"block_length": 7}})]
    with pytest.MonkeyPatch.context() as patch:
        # oneDNN keeps what it compiles for each number of rows that it meets: its cache, while it fills, is no leak.
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
        with Server(Path(pair.target), "hostile", tmp_path_factory.mktemp("server") / "log", arguments) as running:
            yield running


@pytest.fixture
def harmless(server) -> Iterator[str]:
    """The text of the harmless request, the same before and after the test."""
    before = complete(server)
    yield before
    wait_until_idle(server)
    assert server.process.poll() is None
    assert complete(server) == before


def complete(server: Server) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=HARMLESS, timeout=120)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


def gauge(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + 60
    while gauge(server, "vllm:num_requests_running") + gauge(server, "vllm:num_requests_waiting"):
        assert time.monotonic() < deadline, "requests that nobody waits for still run"
        time.sleep(0.2)


def resident(server: Server) -> int:
    """Bytes of the server's process and all below it."""
    total, waiting = 0, [server.process.pid]
    while waiting:
        pid = waiting.pop()
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue
    return total


def ask(server: Server, endpoint: str, xargs: dict, **more: object) -> httpx.Response:
    body = {"model": "tiny", "temperature": 0, "vllm_xargs": xargs} | ENDPOINTS[endpoint] | more
    return httpx.post(server.url + endpoint, json=body, timeout=120, trust_env=False)


def drafts(server: Server) -> float:
    """Draft tokens so far, those of the last step that ran among them."""
    wait_until_idle(server)
    return gauge(server, "vllm:spec_decode_num_draft_tokens_total")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_options_over_http_in_each_spelling(server, endpoint):
    before = drafts(server)
    plain = ask(server, endpoint, {})
    assert plain.status_code == 200 and drafts(server) > before
    for xargs in (
        {"dflash": {"max_draft_tokens": 0, "workload": "test"}},
        {"dflash": '{"max_draft_tokens": 0}'},
        {"dflash.max_draft_tokens": 0, "session_id": "a"},
    ):
        before = drafts(server)
        answer = ask(server, endpoint, xargs)
        assert answer.status_code == 200, answer.text
        assert drafts(server) == before


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    "xargs, field",
    [
        ({"dflash": {"max_draft_tokens": -1}}, "dflash.max_draft_tokens"),
        ({"dflash": {"max_draft_tokens": True}}, "dflash.max_draft_tokens"),
        ({"dflash": {"max_drafts": 3}}, "dflash.max_drafts"),
        ({"dflash.max_draft_tokens": "many"}, "dflash.max_draft_tokens"),
        ({"dflash": "off"}, "dflash"),
    ],
)
def test_a_bad_value_is_http_400_that_names_the_field(server, endpoint, xargs, field):
    answer = ask(server, endpoint, xargs)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert f"{field}: " in error["message"]
    if endpoint != "/v1/messages":
        assert error["param"] == f"vllm_xargs.{field}"
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_bad_value_is_http_400_whatever_was_to_come(server, endpoint):
    """No stream that begins with HTTP 200 and ends with the error, and no beam search that never looks."""
    more = [{"stream": True}]
    if endpoint in ("/v1/completions", "/v1/chat/completions"):
        more += [{"use_beam_search": True, "n": 2}, {"n": 2, "temperature": 1.0}]
    for one in more:
        answer = ask(server, endpoint, {"dflash": {"max_draft_tokens": -1}}, **one)
        assert answer.status_code == 400, (one, answer.text[:300])
        assert "dflash.max_draft_tokens: Input should be greater" in answer.json()["error"]["message"]
        assert ask(server, endpoint, {"dflash": {"max_draft_tokens": 1}}, **one).status_code == 200


def test_a_batch_of_conversations_has_options_too(server):
    """Stock's /v1/chat/completions/batch names no such field, and hands it on."""
    messages = ENDPOINTS["/v1/chat/completions"]["messages"]
    body = {"model": "tiny", "temperature": 0, "max_tokens": 24, "messages": [messages, messages]}
    for value, status in ((0, 200), (-1, 400)):
        before = drafts(server)
        body["vllm_xargs"] = {"dflash": {"max_draft_tokens": value}}
        answer = httpx.post(f"{server.url}/v1/chat/completions/batch", json=body, timeout=120, trust_env=False)
        assert answer.status_code == status, answer.text
        assert drafts(server) == before
    assert answer.json()["error"]["param"] == "vllm_xargs.dflash.max_draft_tokens"


@pytest.mark.parametrize("case", BAD_OPTIONS)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_bad_options_are_refused_by_name(server, harmless, case, route):
    prompt = {"prompt": [3, 4]} if route == "completions" else {"messages": [{"role": "user", "content": "t3 t4"}]}
    body = prompt | {"max_tokens": 4, "vllm_xargs": {"dflash": BAD_OPTIONS[case]}}
    answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "dflash" in message
    if isinstance(BAD_OPTIONS[case], dict):
        assert list(BAD_OPTIONS[case])[-1] in message


@pytest.mark.parametrize(
    "given",
    ["[" * 100_000, '{"a":' * 50_000, "x" * 2_000_000, {"y" * 300_000: 1}, {"max_draft_tokens": "z" * 300_000}],
    ids=["deep list", "deep object", "long text", "long name", "long value"],
)
def test_what_is_refused_is_shown_in_short(server, harmless, given):
    answer = httpx.post(f"{server.url}/v1/completions", json=HARMLESS | {"vllm_xargs": {"dflash": given}}, timeout=60)
    assert answer.status_code == 400, answer.text[:500]
    assert "dflash" in answer.json()["error"]["message"] and len(answer.text) < 2000


def test_a_number_beyond_any_integer_is_refused(server, harmless):
    """By vLLM itself, which names the parameter."""
    body = HARMLESS | {"vllm_xargs": {"dflash": {"max_draft_tokens": 10**30}}}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "extra_args" in answer.json()["error"]["message"]


def test_labels_of_any_size_and_number(server, harmless):
    """A label a request: metrics stay bounded, whatever the labels hold."""
    odd = ["x" * 200_000, 'quote" and \n line', "\u0000", "", "läßt grüßen"]
    labels = [f"label-{index}" for index in range(60)] + odd
    with httpx.Client(timeout=120) as client:
        for label in labels:
            body = HARMLESS | {"max_tokens": 2, "vllm_xargs": {"dflash": {"workload": label}}}
            answer = client.post(f"{server.url}/v1/completions", json=body)
            assert answer.status_code in (200, 400), answer.text[:500]
        text = client.get(f"{server.url}/metrics").text
    ours = [line for line in text.splitlines() if line.startswith("vllm_dflash:")]
    found = set(re.findall(r'workload="((?:[^"\\]|\\.)*)"', text))
    assert 2 <= len(found) <= LABELS + 2
    assert max(len(line) for line in ours) < 1000


def test_bodies_that_are_no_requests(server, harmless):
    deep = '{"a":' * 20_000 + "1" + "}" * 20_000
    bodies = [b"", b"{", b"null", b"[]", b"\xff\xfe", deep.encode(), json.dumps(HARMLESS | {"max_tokens": -1}).encode()]
    bodies += [json.dumps(HARMLESS | {"prompt": [10**12]}).encode(), json.dumps(HARMLESS | {"prompt": [-1]}).encode()]
    bodies += [json.dumps(HARMLESS | {"prompt": [3] * 100_000}).encode()]
    for body in bodies:
        answer = httpx.post(
            f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=60
        )
        assert 400 <= answer.status_code < 600, (body[:40], answer.text[:300])
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200


def test_streams_cut_off_mid_block(server, harmless):
    """Clients leave after a few tokens; a request that stays gets exactly its own tokens."""

    async def attack() -> list[str]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=80)) as client:

            async def leave(index: int) -> None:
                body = HARMLESS | {"stream": True, "max_tokens": 400, "prompt": [3 + index % 20, 9, 4]}
                async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                    lines = 0
                    async for _ in answer.aiter_lines():
                        lines += 1
                        if lines > index % 7:
                            return

            async def stay() -> str:
                answer = await client.post(f"{server.url}/v1/completions", json=HARMLESS)
                return answer.json()["choices"][0]["text"]

            results = await asyncio.gather(*(leave(index) for index in range(60)), *(stay() for _ in range(6)))
            return results[60:]

    assert asyncio.run(attack()) == [harmless] * 6


def test_five_hundred_connections(server, harmless):
    """All are answered with their own text, and rounds of them stop taking memory: a leak would grow by each."""

    async def round_of(count: int) -> list[str]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:

            async def one(index: int) -> str:
                options = {"max_tokens": 16, "vllm_xargs": {"dflash": {"max_draft_tokens": index % 8}}}
                answer = await client.post(f"{server.url}/v1/completions", json=HARMLESS | options)
                answer.raise_for_status()
                return answer.json()["choices"][0]["text"]

            return await asyncio.gather(*(one(index) for index in range(count)))

    growth = []
    before = resident(server)
    # The first rounds fill caches and heaps.
    for count in (CONNECTIONS, *[CONNECTIONS // 2] * 7):
        texts = set(asyncio.run(round_of(count)))
        assert len(texts) == 1 and harmless.startswith(texts.pop())
        wait_until_idle(server)
        growth.append(resident(server) - before)
        before += growth[-1]
    assert min(growth[1:]) < 8 * 2**20, growth
