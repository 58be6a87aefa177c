# SPDX-License-Identifier: Apache-2.0
"""The demo's server: how its death is told, and that it never outlives the demo."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.demo.server import Server, ServerFailed

ROOT = Path(__file__).resolve().parents[2]
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
STARTS_WITHIN = 300.0


def start_demo(logs: Path) -> subprocess.Popen[str]:
    """The demo in a process of its own, speculating by a stock method; its logs in `logs`."""
    command = [sys.executable, "-m", "examples.demo", "--speculative-config", NGRAM, "--logs", str(logs)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def running_group(leader: int) -> set[int]:
    """Processes of the group of `leader` that are not zombies."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group) == leader and state != "Z":
            found.add(int(stat.parent.name))
    return found


def server_of(demo: subprocess.Popen[str], processes: int = 1) -> int:
    """The pid of the demo's server once its group has that many processes."""
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
    until = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < until and demo.poll() is None:
        pids = [int(pid) for pid in children.read_text().split()]
        if pids and len(running_group(pids[0])) >= processes:
            return pids[0]
        time.sleep(0.2)
    raise AssertionError("the demo started no server")


def wait_until_gone(leader: int) -> None:
    until = time.monotonic() + 60
    while running_group(leader):
        assert time.monotonic() < until, f"still running: {running_group(leader)}"
        time.sleep(0.2)


@pytest.mark.engine
def test_a_server_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    server = Server(tmp_path / "no-model", "a test", tmp_path / "server.log", [])
    with pytest.raises(ServerFailed) as failure, server:
        pass
    message = str(failure.value)
    assert "no-model" in message
    last = message.splitlines()[-1]
    assert last.startswith("The server (a test) ended with code 1 (") and "no-model" in last
    assert last.endswith(f"). All that it said is in {tmp_path / 'server.log'}.")
    assert not running_group(server.process.pid)


@pytest.mark.engine
@pytest.mark.pair
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_a_demo_stopped_while_it_starts(tmp_path: Path, signal_number: int) -> None:
    demo = start_demo(tmp_path)
    server = server_of(demo)
    os.kill(demo.pid, signal_number)
    output, _ = demo.communicate(timeout=60)
    wait_until_gone(server)
    if signal_number != signal.SIGKILL:
        assert demo.returncode == 130
        assert output.endswith("demo: interrupted; its server is stopped.\n")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.pair
def test_ctrl_c_ends_the_engine_processes_too(tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    server = server_of(demo, processes=3)  # the server, its resource tracker and the engine core
    os.kill(demo.pid, signal.SIGINT)
    demo.communicate(timeout=60)
    wait_until_gone(server)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.pair
def test_the_demo_shows_acceptance_above_one() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "examples.demo"], cwd=ROOT, capture_output=True, text=True, timeout=1500
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = {line.split()[0]: line.split()[-1] for line in run.stdout.splitlines() if line.startswith("  with")}
    assert float(rows["with"]) > 1.0
    assert float(rows["without"]) == 1.0
