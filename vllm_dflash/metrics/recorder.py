# SPDX-License-Identifier: Apache-2.0
"""Accumulates in the worker what the steps since the last `take` did. Memory does not grow with load or uptime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm_dflash.metrics.speedup import Speedup
from vllm_dflash.spec_decode.outcome import StepOutcome, Tally
from vllm_dflash.spec_decode.timing import Timing

Delta = dict[str, Any]
"""What `take` gives, of plain types that msgpack and pickle carry; a key is missing where there is nothing to say.

verified: {workload: [[drafted, accepted, requests], ...]}, one entry a pair that occurred. undrafted: requests a step
that had nothing to verify.
seconds: [[stage, seconds], ...], one entry a stage and step. skipped, faults: {reason or kind: n}. restored: positions.
enabled: 0 or 1. speedup: ratio. facts: see `Recorder.facts`.
"""

STATE_EVERY = 64


class Recorder:
    """Subscribes to a worker: `on_outcome` to its observers, `on_timings` to its timing observers.

    Args:
        tally: the worker's.
        workload_of: request id -> the label of its workload.
        facts: what does not change while the engine runs, sent along now and then: {"info": {label: value},
            "weights_bytes": n, "kv_bytes": n, "q_bytes": n}.
    """

    def __init__(self, tally: Tally, workload_of: Callable[[str], str], facts: dict[str, Any] | None = None) -> None:
        self.tally = tally
        self.workload_of = workload_of
        self.facts = facts or {}
        self.speedup = Speedup()
        self._verified: Counter[tuple[str, int, int]] = Counter()
        self._undrafted = 0
        self._seconds: dict[tuple[int, str], float] = {}
        self._skipped: Counter[str] = Counter()
        self._takes = 0
        self._enabled: bool | None = None

    def on_outcome(self, outcome: StepOutcome) -> None:
        requests = len(outcome.request_ids)
        if any(outcome.drafted):
            labels = map(self.workload_of, outcome.request_ids)
            self._verified.update(zip(labels, outcome.drafted, outcome.accepted, strict=True))
        else:
            self._undrafted += requests
        self._skipped.update(outcome.skipped)
        if requests:
            self.speedup.tokens(outcome.step, requests, requests + sum(outcome.accepted))

    def on_timings(self, timings: Sequence[Timing]) -> None:
        for timing in timings:
            key = timing.step, timing.stage
            self._seconds[key] = self._seconds.get(key, 0.0) + timing.seconds
            self.speedup.timing(timing)
        if timings:
            self.speedup.end_step(timings[-1].step)

    def take(self) -> Delta:
        """What is new since the last call. The state (enabled, facts) comes with some calls, and when it changes."""
        delta: Delta = {}
        if self._verified:
            verified: dict[str, list[list[int]]] = {}
            for (workload, drafted, accepted), requests in self._verified.items():
                verified.setdefault(workload, []).append([drafted, accepted, requests])
            delta["verified"] = verified
            self._verified.clear()
        if self._undrafted:
            delta["undrafted"], self._undrafted = self._undrafted, 0
        if self._seconds:
            delta["seconds"] = [[stage, seconds] for (_, stage), seconds in self._seconds.items()]
            self._seconds = {}
        if self._skipped:
            delta["skipped"] = dict(self._skipped)
            self._skipped.clear()
        if self.tally.faults:
            delta["faults"] = dict(self.tally.faults)
            self.tally.faults.clear()
        if self.tally.restored_context:
            delta["restored"] = self.tally.restored_context
            self.tally.restored_context = 0
        if self._takes % STATE_EVERY == 0:
            delta["facts"] = self.facts
        if self._takes % STATE_EVERY == 0 or self.tally.enabled != self._enabled:
            delta["enabled"] = int(self.tally.enabled)
            self._enabled = self.tally.enabled
        ratio = self.speedup.ratio()
        if ratio is not None:
            delta["speedup"] = ratio
        self._takes += 1
        return delta
