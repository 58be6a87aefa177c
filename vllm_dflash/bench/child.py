# SPDX-License-Identifier: Apache-2.0
"""A child process with a log, such as a server: it ends with its parent, and is ended with all that it started."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

STOPS_WITHIN = 20.0  # seconds from a request to stop to the signal that cannot be refused
_RAISED = re.compile(r"(?:^|[\s\]])((?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (\S.*)$")
# What a vLLM process says when another of the same server has failed.
_ELSEWHERE = ("See root cause above", "EngineDeadError", "initialization failed due to")
PR_SET_PDEATHSIG = 1  # Linux: the signal a process gets when its parent dies


def die_with_parent() -> None:
    """In the child, before exec: end when the parent ends, killed or not. SIGINT may be inherited as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """The command in a session of its own, so that Ctrl-C reaches its parent alone, which then ends it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as text:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=text,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def get(url: str, timeout: float = 10.0) -> str:
    """The text at `url`, proxies of the environment left aside."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=timeout) as answer:
        return answer.read().decode()


class NotHealthy(Exception):
    """What a server did instead, such as "ended with code 1"."""


def wait_until_healthy(
    process: subprocess.Popen[bytes],
    url: str,
    within: float,
    waiting: Callable[[float], None] = lambda seconds: None,
) -> float:
    """Ask `url`/health twice a second, telling `waiting` the seconds so far; returns them. Raises NotHealthy."""
    began = time.monotonic()
    while True:
        seconds = time.monotonic() - began
        if process.poll() is not None:
            raise NotHealthy(f"ended with code {process.returncode}")
        if seconds > within:
            raise NotHealthy(f"was not healthy after {within:.0f} s")
        try:
            get(f"{url}/health", 5.0)
            return seconds
        except (urllib.error.URLError, OSError):
            waiting(seconds)
            time.sleep(0.5)


def end_group(
    process: subprocess.Popen[bytes], by: signal.Signals = signal.SIGINT, within: float = STOPS_WITHIN
) -> None:
    """Ask a process with a session of its own to end, and after `within` seconds end it and all that it started."""
    if process.poll() is None:
        process.send_signal(by)
        try:
            process.wait(within)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its own group: start_new_session
    except ProcessLookupError:
        pass
    process.wait()


def last_lines(log: Path, lines: int) -> str:
    """The last lines of a log that are not blank."""
    with log.open(errors="replace") as text:
        return "".join(deque((line for line in text if line.strip()), maxlen=lines)).rstrip()


def in_brackets(log: Path) -> str:
    """What the server raised, " (ValueError: ...)", to stand behind what it did; nothing where its log has none."""
    raised = cause(log)
    return f" ({raised.rstrip('.')})" if raised else ""


def cause(log: Path) -> str | None:
    """What the server raised, "ValueError: ...", as its log has it last; None where it has no such line.

    vLLM's processes fail one after the other: what the first one said stands far above the last lines.
    """
    found = None
    lines = log.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        match = _RAISED.search(line)
        if match is None or any(words in line for words in _ELSEWHERE):
            continue
        name, what = match[1].rpartition(".")[2], match[2].strip()
        if what.startswith("1 validation error") and number + 1 < len(lines):
            what = lines[number + 1].strip().removeprefix("Value error, ").partition(" [type=")[0]
        found = f"{name}: {what}"
    return found
