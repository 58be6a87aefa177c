# SPDX-License-Identifier: Apache-2.0
"""How long the stages of a step take: a host clock on a CPU, device events elsewhere, never a synchronisation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

STAGES = ("target", "verify", "inject", "draft", "select")


@dataclass(frozen=True, slots=True)
class Timing:
    """One stage of one step.

    seconds: on a GPU between two events on its stream, so without what the host did meanwhile.
    rows: rows of that stage's batch (tokens). requests, context_tokens: of the whole step.
    """

    stage: str
    seconds: float
    rows: int
    requests: int
    context_tokens: int
    step: int


class StageClock:
    """`with clock.stage("draft", rows=n):` around the work of one stage; `take` gives what has completed.

    Args:
        device: where the work runs.
        now: seconds, the host's clock (CPU only).
        event: makes a device event with record(), query() and elapsed_time(other) in milliseconds (not on a CPU).
        most: timings kept when nobody takes them; the oldest go first.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        now: Callable[[], float] = time.perf_counter,
        event: Callable[[], Any] | None = None,
        most: int = 4096,
    ) -> None:
        self.device = torch.device(device)
        self.now = now
        self.step = 0
        self.requests = 0
        self.context_tokens = 0
        self.paused = False  # where the engine warms up: nothing is timed
        self._new_event = event or (lambda: torch.Event(self.device, enable_timing=True))
        self._events: list[Any] = []
        self._waiting: deque[tuple[Timing, Any, Any]] = deque()
        self._done: deque[Timing] = deque(maxlen=most)
        self.most = most

    def begin_step(self, requests: int, context_tokens: int) -> None:
        """A new step over `requests` requests, which hold `context_tokens` computed tokens in all."""
        self.step += 1
        self.requests = requests
        self.context_tokens = context_tokens

    def stage(self, name: str, rows: int = 0) -> _Span:
        """A context manager; work recorded into a CUDA graph is not timed."""
        return _Span(self, name, rows)

    def take(self) -> list[Timing]:
        """What has completed since the last call, in the order it was begun."""
        while self._waiting and self._waiting[0][2].query():
            timing, start, end = self._waiting.popleft()
            self._done.append(replace(timing, seconds=start.elapsed_time(end) / 1000))
            self._events += (start, end)
        taken = list(self._done)
        self._done.clear()
        return taken

    def _timing(self, stage: str, seconds: float, rows: int) -> Timing:
        return Timing(stage, seconds, rows, self.requests, self.context_tokens, self.step)

    def _event(self) -> Any:
        event = self._events.pop() if self._events else self._new_event()
        event.record()
        return event


class _Span:
    __slots__ = ("clock", "name", "rows", "start")

    def __init__(self, clock: StageClock, name: str, rows: int) -> None:
        self.clock = clock
        self.name = name
        self.rows = rows
        self.start: Any = None

    def __enter__(self) -> None:
        clock = self.clock
        if clock.paused:
            return
        if clock.device.type == "cpu":
            self.start = clock.now()
        elif not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self.start = clock._event()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clock = self.clock
        if kind is not None or self.start is None:
            return
        if clock.device.type == "cpu":
            clock._done.append(clock._timing(self.name, clock.now() - self.start, self.rows))
            return
        if len(clock._waiting) < clock.most:
            clock._waiting.append((clock._timing(self.name, 0.0, self.rows), self.start, clock._event()))
