# SPDX-License-Identifier: Apache-2.0
"""What a block's own q says of its acceptance, learnt while serving: how far down it is worth verifying."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

# q's mode in so many classes; those between 0.2 and 0.8 hold most drafts.
BOUNDS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
# What q says of a class by itself counts for so many judged drafts; the record reaches back over so many.
TRUST, MEMORY = 8.0, 500.0


class Confidence:
    """Acceptance probability of a draft, given that those before were accepted, by the mode of the q it was drawn from.

    q of slot j depends on the drafts before j alone, its mode too. A block that is cut before slot j because of q_1 to
    q_j is cut whatever draft j is, so that the output's distribution stays the target's. (By q of the draft itself,
    it would not: unlikely drafts would be dropped, and the target would draw again.)
    """

    def __init__(self) -> None:
        self._judged = [0.0] * (1 + len(BOUNDS))
        self._accepted = [0.0] * (1 + len(BOUNDS))

    def rates(self, modes: Sequence[float]) -> list[float]:
        """Modes of a block's q_1..q_k -> its drafts' acceptance probabilities."""
        found = []
        for mode in modes:
            at = bisect(BOUNDS, mode)
            found.append((self._accepted[at] + TRUST * mode) / (self._judged[at] + TRUST))
        return found

    def observe(self, modes: Sequence[float], drafted: int, accepted: int) -> None:
        """Of a block's first `drafted` drafts so many were accepted."""
        for slot, mode in enumerate(modes[: min(accepted + 1, drafted)]):
            at = bisect(BOUNDS, mode)
            keep = 1 - 1 / MEMORY
            self._judged[at] = keep * self._judged[at] + 1
            self._accepted[at] = keep * self._accepted[at] + (slot < accepted)


def worth_verifying(rates: Sequence[float], price: float) -> int:
    """How many of a block's drafts are verified where a row costs as much time as `price` tokens take.

    One at least, so that all classes of q are judged now and then.
    """
    survival = 1.0
    for slot, rate in enumerate(rates):
        survival *= rate
        if slot and survival < price:
            return slot
    return len(rates)


class Savings:
    """Of blocks that are cut at a price: rows and tokens by the number of drafts before the cut, means over blocks."""

    def __init__(self, most: int) -> None:
        self.rows = [float(n) for n in range(1 + most)]
        self.kept_share = [1.0] * (1 + most)
        """Expected tokens, the target's own counted, over those without the cut."""

    def observe(self, rates: Sequence[float], price: float, weight: float = 0.05) -> None:
        """rates: of all K drafts of a block."""
        cut = worth_verifying(rates, price)
        survival, tokens, kept = 1.0, 1.0, 1.0
        for n, rate in enumerate(rates, start=1):
            survival *= rate
            tokens += survival
            kept += survival if n <= cut else 0.0
            self.rows[n] += weight * (min(n, cut) - self.rows[n])
            self.kept_share[n] += weight * (kept / tokens - self.kept_share[n])
