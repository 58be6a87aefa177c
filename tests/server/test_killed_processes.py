# SPDX-License-Identifier: Apache-2.0
"""A process of the server is killed while requests run: each of them ends soon, and so does the server, saying why."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.metrics.scrape import Scrape
from tests.support.server import Server

pytestmark = pytest.mark.engine

ENDS_WITHIN = 60.0  # seconds, on two cores that others use too
DRAFTS_WITHIN = 300.0  # two ranks that wait for each other need both cores
REQUESTS = 8
ENDLESS = {"model": "m", "prompt": [3, 28, 23, 9], "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
# With "auto" the requests may be done before anything is drafted.
FIXED = {"block_length": 7}
COUNTERS = ("vllm_dflash:draft_tokens_total", "vllm_dflash:accepted_tokens_total")


def descendants(pid: int) -> dict[int, str]:
    """Process id -> title of all that `pid` started, directly or not."""
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        here = waiting.pop()
        for children in Path(f"/proc/{here}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                waiting.append(child)
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
    return found


def ask(server: Server, index: int) -> str:
    """One request, every second one streamed; "answered" if it got all its tokens, else how it ended."""
    body = ENDLESS | {"stream": index % 2 == 0}
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300, trust_env=False) as answer:
            text = "".join(answer.iter_text())
    except httpx.TransportError as error:
        return type(error).__name__
    if answer.status_code != 200:
        return str(answer.status_code)
    if '"error"' in text:
        return "error"
    return "answered" if '"finish_reason":"length"' in text.replace(" ", "") else "cut off"


def ask_on(server: Server, index: int, ending: threading.Event) -> str | None:
    """How the request ended that ran when the event was set; None where there was none.

    One that is answered is followed by another, so that all are under way whenever the machine gets there.
    """
    while not ending.is_set():
        end = ask(server, index)
        if end != "answered":
            return end
    return None


def running_scrape(server: Server) -> Scrape:
    """/metrics while all requests run and have drafted."""
    until = time.monotonic() + DRAFTS_WITHIN
    while True:
        got = Scrape.parse(server.metrics())
        if got.sum("vllm:num_requests_running") == REQUESTS and got.sum(COUNTERS[0]):
            return got
        assert time.monotonic() < until, server.printed(40)
        time.sleep(0.05)


def check_killed(server: Server, title: str) -> None:
    (victim,) = [pid for pid, name in descendants(server.process.pid).items() if re.match(title, name)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        ending = threading.Event()
        asked = [pool.submit(ask_on, server, index, ending) for index in range(REQUESTS)]
        first = running_scrape(server)
        time.sleep(0.3)
        second = Scrape.parse(server.metrics())
        # What /metrics says is true as long as there is somebody to ask.
        for name in COUNTERS:
            assert second.sum(name) >= first.sum(name)
        assert second.sum(COUNTERS[1]) <= second.sum(COUNTERS[0])
        assert second.sum("vllm_dflash:speculation_enabled") == 1
        assert second.by("vllm_dflash:faults_total", "kind") == {}
        others = descendants(server.process.pid)
        ending.set()
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        ends = [future.result(timeout=ENDS_WITHIN) for future in asked]
        # An answer that began cannot become a 500 any more: its stream ends with an error.
        assert set(ends) - {None} <= {"error", "500"}, ends
        assert len(ends) - ends.count(None) >= REQUESTS // 2, ends
        server.process.wait(ENDS_WITHIN - (time.monotonic() - began))
    assert "EngineDeadError" in server.printed(10**6)
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        assert time.monotonic() - began < ENDS_WITHIN, others
        time.sleep(0.1)


@pytest.mark.parametrize("title", ["VLLM::Worker", pytest.param("VLLM::EngineCore", marks=pytest.mark.slow)])
def test_a_process_of_one_rank(trained, title: str) -> None:
    pair = trained("dflash2")
    with Server(pair.target, pair.drafter, "--dtype", "float32", options=FIXED) as server:
        check_killed(server, title)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_rank(trained, rank: int) -> None:
    pair = trained("dflash2")
    two = ("--tensor-parallel-size", "2")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Server(
        pair.target, pair.drafter, "--dtype", "float32", *two, options=FIXED, environment=environment
    ) as server:
        check_killed(server, f"VLLM::Worker_TP{rank}")
