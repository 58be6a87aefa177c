# SPDX-License-Identifier: Apache-2.0
"""What the steps of an engine cost, learnt from its steps: the target's rows, the draft, what a draft takes beside."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_dflash.spec_decode.measured_cost import PAUSE, Beside, MeasuredCost
from vllm_dflash.spec_decode.pace import Pace

# Samples from which on a cost tells about the machine's pace, and plain steps what drafting takes beside the draft.
KNOWN, PLAIN_KNOWN = 8, 3
# A draft that was never measured is taken for so much of a plain step.
UNKNOWN = 0.5
# What drafting takes beside is told by few steps: so many of them in a row may be pauses of the machine.
MOST_PAUSES = 3


@dataclass(slots=True)
class Step:
    """One step of the engine as it was.

    seconds: the whole step, its draft included. rows: the target's, over `requests` requests with `context` tokens
    before them in all. draft_seconds, draft_rows, drafting: the draft's forward and selection in that step.
    """

    seconds: float
    rows: int
    requests: int
    context: float
    draft_seconds: float = 0.0
    draft_rows: int = 0
    drafting: int = 0

    @property
    def draft_context(self) -> float:
        """Context tokens of the drafting requests, the others' taken for as many each."""
        return self.context * self.drafting / self.requests


@dataclass(frozen=True)
class Load:
    """requests that decode, `context` tokens before them in all. members: of them those at each level of acceptance,
    without those that can have no drafts."""

    requests: int
    context: float
    members: tuple[int, ...]

    def differs(self, requests: int, context: float) -> bool:
        """Whether by more than an eighth in requests, or by half in context."""
        return abs(requests - self.requests) * 8 > self.requests or not (
            self.context / 1.5 - 1000 <= context <= self.context * 1.5 + 1000
        )


class StepCosts:
    """block: rows of the drafter a drafting request. Seconds are those of the pace at which they were recorded."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.target = MeasuredCost()
        self.draft = MeasuredCost()
        self.beside = Beside()
        self.pace = Pace()
        self._pauses = 0

    def observe(self, step: Step) -> float:
        """-> the step's seconds."""
        pace = self._follow(step)
        seconds = step.seconds / pace
        if step.drafting:
            self.draft.observe(step.draft_seconds / pace, step.draft_rows, step.drafting, step.draft_context)
        rest = max(seconds - step.draft_seconds / pace, 0.0)
        if step.drafting and step.rows == step.requests:
            # It is no plain step: plain decoding would look as much dearer as this is, and drafts as if they paid.
            if self.target.lately(step.rows, step.requests, step.context) >= PLAIN_KNOWN:
                usual = self.target.seconds(step.rows, step.requests, step.context)
                known = usual + self._beside(step.draft_rows, step.requests, step.context)
                self._pauses = self._pauses + 1 if rest > PAUSE * known else 0
                if not 0 < self._pauses <= MOST_PAUSES:
                    self.beside.observe(rest - usual, step.draft_rows, usual)
        else:
            rest = max(rest - self._beside(step.draft_rows, step.requests, step.context), 0.5 * rest)
            self.target.observe(rest, step.rows, step.requests, step.context)
        return seconds

    def _follow(self, step: Step) -> float:
        """How much slower the machine is than the records say, by steps that this load has had before."""
        known = self.target.lately(step.rows, step.requests, step.context)
        expected = self.target.seconds(step.rows, step.requests, step.context)
        if step.drafting:
            known = min(known, self.draft.lately(step.draft_rows, step.drafting, step.draft_context))
            expected += self.draft.seconds(step.draft_rows, step.drafting, step.draft_context)
            expected += self._beside(step.draft_rows, step.requests, step.context)
        if known >= KNOWN and expected > 0 and step.seconds > 0:
            self.pace.observe(step.seconds / expected)
        return self.pace.value

    def _beside(self, draft_rows: int, requests: int, context: float) -> float:
        if not self.beside.knows(draft_rows):
            return 0.0
        return self.beside.seconds(draft_rows, self.target.seconds(requests, requests, context))

    def changed(self) -> None:
        """The load is another one now, and so is the pace: a load that grew dearer looked like a slower machine."""
        self.target.changed()
        self.draft.changed()
        self.pace = Pace()

    def plain(self, load: Load | None) -> float:
        """Seconds of a step in which nobody drafts and nothing is verified."""
        return 0.0 if load is None else self.target.seconds(load.requests, load.requests, load.context)

    def seconds(self, load: Load, rows: float, drafting: int) -> float:
        """Seconds of a step over so many rows in which so many requests are drafted for."""
        seconds = self.target.seconds(rows, load.requests, load.context)
        if drafting:
            context = load.context * drafting / load.requests
            draft = self.draft.seconds(drafting * self.block, drafting, context)
            seconds += draft or UNKNOWN * self.plain(load)
            seconds += self._beside(drafting * self.block, load.requests, load.context)
        return seconds

    def row(self, load: Load, most: int) -> float:
        """Seconds of one more row to verify, of 1 to `most` a request."""
        few, many = 2 * load.requests, (1 + most) * load.requests
        if many == few:
            return 0.0
        more = self.target.seconds(many, load.requests, load.context)
        return max(more - self.target.seconds(few, load.requests, load.context), 0.0) / (many - few)
