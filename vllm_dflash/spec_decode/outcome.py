# SPDX-License-Identifier: Apache-2.0
"""What became of the drafts, step by step: told to observers on the host, without a synchronisation on GPUs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_dflash.spec_decode.timing import Timing

SKIP_REASONS = ("request", "range", "unprofitable", "prompt", "fault", "no_context")
FAULT_KINDS = ("exception", "non_finite", "load", "disabled")


@dataclass(frozen=True)
class StepOutcome:
    """Decoding requests of one step: drafts that were verified and how many of them were accepted.

    request_ids: B ids; a request without drafts counts 0 in both. drafted, accepted: B ints, accepted <= drafted.
    skipped: by reason, requests that got no draft since the last outcome. step: as in Timing.
    """

    request_ids: Sequence[str]
    drafted: Sequence[int]
    accepted: Sequence[int]
    skipped: dict[str, int] = field(default_factory=dict)
    step: int = 0


Observer = Callable[[StepOutcome], None]
TimingObserver = Callable[[Sequence[Timing]], None]


@dataclass
class Tally:
    """What has happened since it was last taken, beside verified drafts. Anyone on the worker's thread may add.

    skipped: by SKIP_REASONS, requests a step that got no draft. faults: by FAULT_KINDS.
    restored_context: positions whose draft context was computed anew. enabled: whether this worker drafts at all.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    restored_context: int = 0
    enabled: bool = True

    def skip(self, reason: str, requests: int = 1) -> None:
        assert reason in SKIP_REASONS, reason
        if requests:
            self.skipped[reason] += requests

    def fault(self, kind: str) -> None:
        assert kind in FAULT_KINDS, kind
        self.faults[kind] += 1


class Readback:
    """Numbers on their way from the device to the host: `then` is called with them once they are there, in order.

    On a CPU that is at once, unless `event` is given; it makes an event with record(), query() and synchronize().
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self.event = event
        self.after: int | None = None
        """The poll that hands over, counted from the read and waited for; None: the first that finds them there."""
        self._polls = 0
        self._waiting: deque[tuple[torch.Tensor, Any, Callable[[Any], None], int]] = deque()

    def read(self, numbers: torch.Tensor, then: Callable[[Any], None]) -> None:
        """numbers: any shape, integers. then: gets them as `tolist` gives them; called here or by a later `poll`."""
        on_cpu = numbers.device.type == "cpu"
        if on_cpu and self.event is None:
            then(numbers.tolist())
            return
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=not on_cpu)
        host.copy_(numbers, non_blocking=True)
        event = (self.event or torch.Event)()
        event.record()
        self._waiting.append((host, event, then, self._polls))

    def poll(self) -> None:
        """Calls `then` for all that has arrived, or is due."""
        self._polls += 1
        while self._waiting:
            host, event, then, polls = self._waiting[0]
            if self.after is None:
                if not event.query():
                    return
            elif self._polls - polls < self.after:
                return
            else:
                event.synchronize()
            self._waiting.popleft()
            then(host.tolist())
