# SPDX-License-Identifier: Apache-2.0
"""The benefit of the doubt that drafts have while requests are new, and what it may cost."""

from __future__ import annotations

from collections.abc import Callable

# For so many steps after most requests have changed drafts have the benefit of the doubt. They are tried all the time
# while they pay should the text be PLAUSIBLE standard deviations better than the record says, and for SHARE of the time
# should it be CONCEIVABLE ones.
STEPS, PLAUSIBLE, CONCEIVABLE, SHARE = 200, 1.5, 4.0, 0.15
# Anything is conceivable until so many verified requests of theirs: what the record holds is other texts' yet.
TRIES = 3
# After that time they are tried so where they are so little short of paying, and should the text be one standard
# deviation better pay by so much.
CLOSE, GAIN = 0.06, 0.03
# At any time probes may lose this share of what drafts would gain were the text so many standard deviations better:
# bad luck with few blocks is found out the sooner the more there is to gain, and where much is known nothing is tried.
STAKE, BETTER = 0.1, 2.0
# Share of all time that may be lost so, put by up to so many steps of plain decoding: over the square of the requests,
# and more for any number. The more requests, the more a step of tries tells, and the likelier the next are like these.
COST, RESERVE = (0.045, 0.003), (60.0, 1.0)
# No step of tries is taken for more than so many steps of plain decoding: it may be an outlier.
DEAREST = 8.0


class Search:
    """hopeful: drafts are tried all the time. conceivable: for SHARE of it. Steps are counted by whoever calls."""

    def __init__(self) -> None:
        self.hopeful = self.conceivable = False
        self.stake = 0.0
        self._began = 0
        self._tried = 0
        self._allowances: dict[int, tuple[float, int]] = {}

    def begin(self, step: int) -> None:
        """Most requests are new."""
        self._began, self._tried = step, 0

    def verified(self, blocks: int) -> None:
        """So many requests had drafts to verify."""
        self._tried += blocks

    def look(self, step: int, requests: int, deviation: float, short: float, gain: Callable[[float], float]) -> None:
        """Whether to go on. short: the share by which drafts fail to pay. deviation: how far off text may be, log-odds.
        gain: of text better by so many log-odds, the share by which drafts pay more than plain decoding.
        """
        self.stake = STAKE * max(gain(BETTER * deviation), 0.0)
        funded = self.allowance(step, requests) > 0
        new = funded and step - self._began < STEPS
        self.hopeful = new and gain(PLAUSIBLE * deviation) > 0
        if funded and not self.hopeful and short < CLOSE:
            self.hopeful = gain(deviation) > GAIN
        self.conceivable = self.hopeful or (new and (self._tried < TRIES or gain(CONCEIVABLE * deviation) > 0))

    def spend(self, step: int, requests: int, steps: float) -> None:
        """A step with drafts took as much longer as so many plain ones do; what was accepted is spent with a minus."""
        left = self.allowance(step, requests) - min(steps, DEAREST)
        self._allowances[requests.bit_length()] = left, step

    def allowance(self, step: int, requests: int) -> float:
        """What may still be lost with about so many requests, in steps of plain decoding."""
        cost, most = (one / requests**2 + more for one, more in (COST, RESERVE))
        left, at = self._allowances.get(requests.bit_length(), (most, step))
        left = min(left + cost * (step - at), most)
        self._allowances[requests.bit_length()] = left, step
        return left
