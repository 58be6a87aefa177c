# SPDX-License-Identifier: Apache-2.0
"""The machine's pace: how much slower or faster everything is than when it was measured."""

from __future__ import annotations

import math
from statistics import median_low

from vllm_dflash.spec_decode.measured_cost import LASTING

# The share of a deviation by which the pace moves, and the deviation (log) by which it moves as a whole.
SHARE, JUMP = 0.1, 0.15
# The share of it that is forgotten a step. A load that grows dearer while it lasts looks like a slower machine, and the
# next one of its kind corrects its record alone: each time the two would part further.
FORGOTTEN = 0.004
# Steps that are off by more (log) are a pause of the machine or its end, up to LASTING in a row.
PAUSE = 0.6


class Pace:
    """A machine shares its time and its clock with others, and a length is not to look good for having been measured in
    a better hour: what all loads have in common is taken out of the costs.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self._ratios: tuple[float, ...] = ()
        self._pauses = 0

    @property
    def value(self) -> float:
        """Seconds now over seconds as recorded."""
        return math.exp(self._log)

    def observe(self, ratio: float) -> None:
        """A step whose cost is well known took `ratio` times what was recorded."""
        self._log *= 1 - FORGOTTEN
        now = math.log(ratio) - self._log
        self._pauses = self._pauses + 1 if abs(now) > PAUSE else 0
        if 0 < self._pauses <= LASTING:
            return
        self._ratios = (*self._ratios[-2:], now)
        off = median_low(self._ratios)
        # Three steps in a row that are off by so much are no noise.
        if len(self._ratios) == 3 and (min(self._ratios) > JUMP or max(self._ratios) < -JUMP):
            self._ratios = ()
            self._log += off
        else:
            self._log += SHARE * min(max(off, -JUMP), JUMP)
