# SPDX-License-Identifier: Apache-2.0
"""An estimate of tokens a second over plain decoding's, from what the steps cost. Plain decoding need not run."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from vllm_dflash.spec_decode.timing import Timing

KEEPS = 0.995  # of the weight of past steps, a step: a half-life of 138 steps
LEARNS = 0.05  # weight of a new measurement in the mean of its bucket
OPEN_STEPS = 8  # steps whose parts may still arrive: on a GPU they come a few steps late
OVERHEADS = 32


@dataclass
class _Step:
    seconds: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    requests: int = 0
    decoding: int = 0
    tokens: int = 0


class TargetCost:
    """Seconds of the target's forward by its rows: means in buckets of powers of two, straight lines between."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float, int]] = {}  # exponent -> mean rows, mean seconds, measurements

    def add(self, rows: int, seconds: float) -> None:
        key = (rows - 1).bit_length()
        mean_rows, mean_seconds, count = self._buckets.get(key, (0.0, 0.0, 0))
        weight = max(LEARNS, 1 / (count + 1))
        self._buckets[key] = (
            mean_rows + weight * (rows - mean_rows),
            mean_seconds + weight * (seconds - mean_seconds),
            count + 1,
        )

    def seconds(self, rows: int) -> float | None:
        """None while one bucket alone has been measured, unless it is that of `rows`."""
        measured = self._buckets.get((rows - 1).bit_length())
        if measured is not None:
            return measured[1]
        points = sorted((mean_rows, mean_seconds) for mean_rows, mean_seconds, _ in self._buckets.values())
        if len(points) < 2:
            return None
        right = next((at for at, (count, _) in enumerate(points) if count >= rows), len(points) - 1)
        (r0, s0), (r1, s1) = points[max(right, 1) - 1], points[max(right, 1)]
        line = s0 + (s1 - s0) / (r1 - r0) * (rows - r0)
        # A forward over fewer rows costs no more than one over many, and never nothing: the weights are read.
        if rows < points[0][0]:
            return min(max(line, 0.1 * points[0][1]), points[0][1])
        return max(line, points[0][1]) if rows > points[-1][0] else line


class Speedup:
    """Sums over the last few hundred steps in which every request decoded.

    ratio = sum of (tokens a request) * (plain step) / sum of (step), the plain step being the target's forward over
    one row a request and what a step costs beside its stages. now: seconds, the host's clock.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.target = TargetCost()
        self.now = now
        self._steps: dict[int, _Step] = {}
        self._overheads: deque[float] = deque(maxlen=OVERHEADS)
        self._overhead = 0.0
        self._last = math.nan
        self._plain = 0.0
        self._spent = 0.0

    def timing(self, timing: Timing) -> None:
        step = self._steps.get(timing.step)
        if step is None:
            step = self._steps[timing.step] = _Step()
        step.seconds[timing.stage] = step.seconds.get(timing.stage, 0.0) + timing.seconds
        step.requests = timing.requests
        if timing.stage == "target":
            step.rows = timing.rows

    def tokens(self, step: int, requests: int, tokens: int) -> None:
        """What decoding requests got in a step; several calls add up."""
        entry = self._steps.get(step)
        if entry is None:
            entry = self._steps[step] = _Step()
        entry.decoding += requests
        entry.tokens += tokens

    def end_step(self, step: int) -> None:
        """The step of this number has ended on the host; its parts may still arrive."""
        now = self.now()
        seconds = sum(self._steps[step].seconds.values()) if step in self._steps else 0.0
        if seconds and not math.isnan(self._last):
            # Waiting for requests is in the gap too, so the middle one of many counts.
            self._overheads.append(max(now - self._last - seconds, 0.0))
            if step % 8 == 0 or len(self._overheads) < OVERHEADS:
                self._overhead = median(self._overheads)
        self._last = now
        for number in [number for number in self._steps if number <= step - OPEN_STEPS]:
            self._close(self._steps.pop(number))

    def _close(self, step: _Step) -> None:
        target = step.seconds.get("target")
        if target is None or not step.rows:
            return
        self.target.add(step.rows, target)
        if not step.requests or step.decoding != step.requests:
            return
        plain = self.target.seconds(step.requests)
        if plain is None:
            return
        self._plain = KEEPS * self._plain + step.tokens / step.requests * (plain + self._overhead)
        self._spent = KEEPS * self._spent + sum(step.seconds.values()) + self._overhead

    def ratio(self) -> float | None:
        """Tokens a second over plain decoding's; None before anything could be estimated."""
        return self._plain / self._spent if self._spent > 0 else None
