# SPDX-License-Identifier: Apache-2.0
"""One `vllm serve` process: started on a free port, waited for in plain sight, and ended with the demo."""

from __future__ import annotations

import os
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

from vllm_dflash.bench.child import NotHealthy, end_group, in_brackets, last_lines, start, wait_until_healthy

HEALTHY_WITHIN = 600.0  # seconds; a first start on a GPU compiles


class ServerFailed(Exception):
    """The server died or never became healthy; the message is what to show."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return version("vllm").endswith("+cpu")


class Server:
    """`with Server(...) as server:` is a healthy server at `server.url`, gone afterwards."""

    def __init__(self, model: Path, name: str, log: Path, arguments: list[str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.name = name
        self.log = log
        self.command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
        self.command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", *arguments]
        self.environment = dict(os.environ)
        if is_cpu_build():
            self.command += ["--enforce-eager"]
            self.environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

    def __enter__(self) -> Server:
        self.process = start(self.command, self.environment, self.log)
        try:
            self.wait_until_healthy()
        except BaseException as error:
            self.stop()
            if isinstance(error, NotHealthy):
                raise ServerFailed(self.last_words(str(error))) from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_healthy(self) -> None:
        """Wait, showing the seconds and the log's last line."""
        shown = 0.0
        terminal = sys.stdout.isatty()

        def show(seconds: float) -> None:
            nonlocal shown
            if terminal:
                last = self.tail(1)[:70]
                print(f"\r\x1b[K  {self.name}: starting, {seconds:3.0f} s  {last}", end="", flush=True)
            elif seconds - shown >= 10:
                shown = seconds
                print(f"  {self.name}: starting, {seconds:.0f} s", flush=True)

        seconds = wait_until_healthy(self.process, self.url, HEALTHY_WITHIN, show)
        clear = "\r\x1b[K" if terminal else ""
        print(f"{clear}  {self.name}: healthy after {seconds:.0f} s", flush=True)

    def tail(self, lines: int) -> str:
        """The last lines of the server's log that are not blank."""
        return last_lines(self.log, lines)

    def last_words(self, what: str) -> str:
        why = in_brackets(self.log)
        return f"{self.tail(20)}\n\nThe server ({self.name}) {what}{why}. All that it said is in {self.log}."

    def stop(self) -> None:
        """Ask the server to end, and then end it and the processes that it started."""
        end_group(self.process)
