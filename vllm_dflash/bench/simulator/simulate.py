# SPDX-License-Identifier: Apache-2.0
"""A simulated engine: steps whose times come from a cost table and whose acceptance is drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dflash.spec_decode.block_length import BlockLength
from vllm_dflash.spec_decode.cost import CycleCost, constant_acceptance, expected_tokens
from vllm_dflash.spec_decode.step_costs import Step


@dataclass(frozen=True)
class Load:
    """requests decoding at once, context tokens each, and their acceptance length at `most` drafts (1.0: none)."""

    requests: int
    context: int
    length: float

    def acceptance(self, most: int) -> float:
        """The same at every position."""
        return constant_acceptance(min(self.length, 1 + most), most)


@dataclass(frozen=True)
class Outcome:
    """Tokens a second under one load: the controller's after it has settled, plain decoding's and the best fixed K's.

    drafts: the K of the best fixed one. mean_drafts: the controller's, a request and step.
    """

    load: Load
    controller: float
    plain: float
    fixed: float
    drafts: int
    mean_drafts: float

    @property
    def ratio(self) -> float:
        return self.controller / max(self.plain, self.fixed)


class Simulator:
    """Runs a controller over loads, one after the other. noise: the standard deviation of a step's time, relative.

    outliers: the share of times that are five times as long. pauses: how many in a row, one of these. drift: how far
    the machine's pace wanders within some hundred steps, a standard deviation, relative.
    """

    def __init__(
        self,
        cost: CycleCost,
        most: int,
        seed: int = 0,
        noise: float = 0.03,
        outliers: float = 0.005,
        drift: float = 0.0,
        pauses: Sequence[int] = (1,),
    ) -> None:
        self.cost = cost
        self.most = most
        self.noise = noise
        self.outliers = outliers
        self.drift = drift
        self.pauses = pauses
        self.pace = 0.0
        self.draw = random.Random(seed)
        self.controller = BlockLength(most, cost.block)
        self._drafts: list[int] = []
        self._names = 0
        self._paused = 0

    def run(self, load: Load, settle: int = 200, steps: int = 600) -> Outcome:
        """`settle` steps that do not count, then `steps` that do. Requests keep their length, as in a steady server.

        The noise is left out of the counted time: it is the controller's choices that are compared, not luck.
        """
        names = [f"r{self._names + i}" for i in range(load.requests)]
        self._names += load.requests
        self.controller.forget(set(names))
        self._drafts = [0] * load.requests
        rate = load.acceptance(self.most)
        self._expected = [expected_tokens([rate], count) for count in range(self.most + 1)]
        tokens = seconds = drafted = 0.0
        for step in range(settle + steps):
            got, took = self._step(load, names, rate)
            if step >= settle:
                tokens, seconds = tokens + got, seconds + took
                drafted += sum(self._drafts) / load.requests
        plain = self.cost.tokens_per_second([rate], 0, load.requests, load.context)
        drafts = max(
            range(1, self.most + 1),
            key=lambda k: self.cost.tokens_per_second([rate], k, load.requests, load.context),
        )
        fixed = self.cost.tokens_per_second([rate], drafts, load.requests, load.context)
        return Outcome(load, tokens / seconds, plain, fixed, drafts, drafted / steps)

    def _step(self, load: Load, names: Sequence[str], rate: float) -> tuple[float, float]:
        """One step: verify what was drafted in the last one, draft for the next. -> (expected tokens, true seconds)."""
        drafts = self._drafts
        accepted = [self._accepted(count, rate) for count in drafts]
        self.controller.verified(names, drafts, accepted)
        rows = load.requests + sum(drafts)
        self._drafts = self.controller.plan(names, load.requests * load.context)
        drafting = sum(1 for count in self._drafts if count)
        block = self.cost.block or 1 + max(self._drafts)
        draft = self.cost.draft.seconds(drafting * block, drafting, load.context)
        seconds = self.cost.step + self.cost.target.seconds(rows, load.requests, load.context)
        if sum(drafts):
            busy = load.requests if all(drafts) else sum(1 for count in drafts if count)
            seconds += self.cost.speculation + self.cost.speculation_row * (busy + sum(drafts))
        if self.drift:
            self.pace += -self.pace / 150 + self.draw.gauss(0.0, self.drift * math.sqrt(2 / 150))
        # A clock that stops around the draft stops within the step: what disturbs the draft disturbs its step.
        timed = self._noisy(draft)
        self.controller.observe(
            Step(
                self._noisy(seconds) + timed,
                rows,
                load.requests,
                load.requests * load.context,
                timed,
                drafting * block,
                drafting,
            )
        )
        return sum(self._expected[count] for count in drafts), seconds + draft

    def _accepted(self, drafts: int, rate: float) -> int:
        count = 0
        while count < drafts and self.draw.random() < rate:
            count += 1
        return count

    def _noisy(self, seconds: float) -> float:
        seconds *= math.exp(self.pace)
        if not self._paused and self.draw.random() < self.outliers:
            self._paused = self.draw.choice(self.pauses) if len(self.pauses) > 1 else self.pauses[0]
        if self._paused:
            self._paused -= 1
            return 5 * seconds
        return seconds * max(self.draw.gauss(1.0, self.noise), 0.5)
