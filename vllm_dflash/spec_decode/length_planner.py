# SPDX-License-Identifier: Apache-2.0
"""The block length controller and its feed: a worker's timings and outcomes in, lengths out."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Literal

from vllm_dflash.spec_decode.block_length import BlockLength
from vllm_dflash.spec_decode.outcome import StepOutcome
from vllm_dflash.spec_decode.step_costs import Step
from vllm_dflash.spec_decode.timing import Timing

if TYPE_CHECKING:
    from vllm_dflash.spec_decode.worker import SpecDecodeWorker

# Steps between two looks for requests that have ended.
TIDIED = 256
# Blocks of a request that are kept beside the one drawn last, for outcomes that are on their way.
LATE = 3

# Modes of a block's slots, how many drafts of it were kept, and what was promised of those that were not.
Block = tuple[Sequence[float], int, Sequence[float]]
NO_BLOCK: Block = ((), 0, ())


class LengthPlanner:
    """Lengths for the requests of each step. An adapter calls `begin` and `plan` once a step, in that order.

    length: "auto", or the same number of drafts for everyone. now: the host's clock in seconds.
    agree: makes lengths the same on all ranks that run one model together (they measure different times).
    """

    def __init__(
        self,
        worker: SpecDecodeWorker,
        length: Literal["auto"] | int = "auto",
        now: Callable[[], float] = time.perf_counter,
        agree: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        self.worker = worker
        self.now = now
        self.agree = agree
        self.controller = BlockLength(worker.drafts, 1 + worker.drafts, None if length == "auto" else length)
        self._steps: dict[int, Step] = {}
        self._ended: float | None = None
        self._blocks: dict[str, list[tuple[int, Block]]] = {}
        if self.controller.fixed is None:
            worker.observers.append(self._verified)
            worker.timing_observers.append(self._timed)

    def begin(self, rows: int, decoding: bool) -> None:
        """The step at hand has `rows` target rows. decoding: no row of it belongs to a prompt."""
        clock = self.worker.clock
        if decoding and self.controller.fixed is None:
            self._steps[clock.step] = Step(0.0, rows, clock.requests, float(clock.context_tokens))

    def plan(self, request_ids: Sequence[str], context: float, requests: int | None = None) -> list[int]:
        """Drafts for each of these requests, as in `BlockLength.plan`. They are drawn in the step at hand."""
        lengths = self.choose(request_ids, context, requests)
        self.drafted(sum(1 for length in lengths if length))
        return lengths

    def choose(self, request_ids: Sequence[str], context: float, requests: int | None = None) -> list[int]:
        """The same where they are drawn in a later step, which `drafted` is told of then."""
        lengths = self.controller.plan(request_ids, context, requests)
        if self.agree is not None and self.controller.fixed is None:
            lengths = self.agree(lengths)
        return lengths

    def cut(self, request_ids: Sequence[str], lengths: Sequence[int], modes: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each block that was drawn are worth verifying, by its own q; `modes` as in `BlockLength`.

        For an engine whose rows are planned after the drafts are drawn.
        """
        kept, beyond = self.controller.cut(lengths, modes)
        if self.agree is not None:
            kept = self.agree(kept)
        step = self.worker.clock.step
        for request_id, block in zip(request_ids, zip(modes, kept, beyond, strict=True), strict=True):
            self._blocks[request_id] = [*self._blocks.get(request_id, ())[-LATE:], (step, block)]
        return kept

    def drafted(self, requests: int) -> None:
        """So many requests get drafts in the step at hand."""
        step = self.worker.clock.step
        if requests and step in self._steps:
            self._steps[step].draft_rows = requests * self.controller.costs.block
            self._steps[step].drafting = requests

    def forget(self, alive: Container[str]) -> None:
        """Now and then drops what is known of requests that have ended."""
        if self.worker.clock.step % TIDIED == 0:
            self.controller.forget(alive)
            self._blocks = {name: block for name, block in self._blocks.items() if name in alive}

    def _verified(self, outcome: StepOutcome) -> None:
        if not any(outcome.drafted):
            return
        beyond: list[Sequence[float]] = []
        for request_id, drafted, accepted in zip(outcome.request_ids, outcome.drafted, outcome.accepted, strict=True):
            modes, kept, rest = self._block(request_id, outcome.step) if drafted else NO_BLOCK
            self.controller.confidence.observe(modes, drafted, accepted)
            # What a grammar took out was not cut for its promise.
            beyond.append(rest if drafted == kept else ())
        self.controller.verified(outcome.request_ids, outcome.drafted, outcome.accepted, beyond)

    def _block(self, request_id: str, step: int) -> Block:
        """The one that this step verified: a device tells of it when the next one is drawn already."""
        drawn = self._blocks.pop(request_id, [])
        later = [(at, block) for at, block in drawn if at >= step]
        if later:
            self._blocks[request_id] = later
        return next((block for at, block in reversed(drawn) if at < step), NO_BLOCK)

    def _timed(self, timings: Sequence[Timing]) -> None:
        """The end of a step: how long it took, and the stages that have completed, of this one or of earlier ones."""
        ended, before = self.now(), self._ended
        self._ended = ended
        current = self.worker.clock.step
        step = self._steps.get(current)
        if step is not None:
            if before is None:
                del self._steps[current]
            else:
                step.seconds = ended - before
        for timing in timings:
            if timing.stage in ("draft", "select") and timing.step in self._steps:
                self._steps[timing.step].draft_seconds += timing.seconds
        # On a CPU this step's stages are all here; on a device a step's are once a later one's come.
        known = current if self.worker.clock.device.type == "cpu" else max((t.step for t in timings), default=0) - 1
        for number in [number for number in self._steps if number <= known]:
            self.controller.observe(self._steps.pop(number))
