# SPDX-License-Identifier: Apache-2.0
"""The most memory that a server held: of the GPUs where there are some, else of its processes."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from types import TracebackType

EVERY = 1.0  # seconds


def gpu_bytes() -> int | None:
    """Bytes in use on all visible GPUs together, None without one."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return sum(int(line) for line in run.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def group_bytes(leader: int) -> int:
    """Proportional resident bytes of all processes of the process group `leader`; shared pages count once."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[2]) != leader:
                continue
            rollup = stat.with_name("smaps_rollup").read_text()
        except (OSError, ValueError):
            continue
        total += next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


class PeakMemory:
    """`with PeakMemory(pid) as peak:` samples once a second; `peak.bytes` is the most that was seen."""

    def __init__(self, leader: int) -> None:
        self.leader, self.bytes = leader, 0
        self._on_gpu = gpu_bytes() is not None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, (gpu_bytes() or 0) if self._on_gpu else group_bytes(self.leader))
            if self._done.wait(EVERY):
                return

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
