# SPDX-License-Identifier: Apache-2.0
"""What a draft-and-verify cycle costs and yields. Plain Python: the controller, the simulator and `plan` share it.

A cycle with K drafts a request verifies 1 + K rows a request in one forward of the target, after one forward of the
drafter. It yields the accepted drafts and one token of the target's own, so that time per token is cycle over
acceptance length, and speculation pays while the acceptance length exceeds cycle(K) / cycle(0) (arXiv 2602.06036,
section 3: L = (T_draft + T_verify) / tau).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one forward of a network, by its rows and by the context that they attend.

    rows: row count -> seconds without context, at least one entry; linear between entries, and past the last one on by
        the last slope.
    context_token: seconds for each context token of each request (its KV is read once, however many rows attend it).
    row_context_token: seconds for each pair of a row and a context token (where attention is bound by arithmetic, as
        on a CPU).
    window: the most context tokens a row attends, None for all of them.
    """

    rows: Mapping[int, float]
    context_token: float = 0.0
    row_context_token: float = 0.0
    window: int | None = None
    _counts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 1 or min(self.rows.values()) < 0:
            raise ValueError(f"A forward's costs are seconds by row count from 1 up, given {dict(self.rows)!r}.")
        object.__setattr__(self, "_counts", tuple(sorted(self.rows)))

    def seconds(self, rows: float, requests: float, context: float) -> float:
        """Seconds of a forward over `rows` rows in all, of `requests` requests with `context` tokens before them."""
        if rows <= 0:
            return 0.0
        if self.window is not None:
            context = min(context, self.window)
        attention = requests * context * self.context_token + rows * context * self.row_context_token
        return self._without_context(rows) + attention

    def _without_context(self, rows: float) -> float:
        counts = self._counts
        if len(counts) == 1 or rows <= counts[0]:
            return self.rows[counts[0]]
        right = min(bisect_left(counts, rows), len(counts) - 1)
        low, high = counts[right - 1], counts[right]
        slope = (self.rows[high] - self.rows[low]) / (high - low)
        return self.rows[low] + slope * (rows - low)


@dataclass(frozen=True)
class CycleCost:
    """Seconds of a whole step of the engine.

    target, draft: their forwards. block: rows of the drafter a drafting request; None where the block is as long as
    its drafts, 1 + K. step: seconds that every step costs whatever it does (scheduling, sampling, sockets).
    speculation, speculation_row: what a step with drafts adds beside the two forwards (rejection, candidates, path,
    host), at all and a row that is verified.
    """

    target: ForwardCost
    draft: ForwardCost
    block: int | None = None
    step: float = 0.0
    speculation: float = 0.0
    speculation_row: float = 0.0

    def verify_seconds(self, drafts: float, requests: float, context: float) -> float:
        """The target's forward over 1 + drafts rows a request."""
        return self.target.seconds(requests * (1 + drafts), requests, context)

    def draft_seconds(self, drafts: float, requests: float, context: float) -> float:
        """The drafter's forward for all requests; 0 without drafts."""
        if drafts <= 0:
            return 0.0
        return self.draft.seconds(requests * (self.block or 1 + drafts), requests, context)

    def seconds(self, drafts: float, requests: float, context: float) -> float:
        """One step of `requests` requests with `context` tokens each and `drafts` drafts each; 0 is plain decoding."""
        total = self.step + self.verify_seconds(drafts, requests, context)
        if drafts > 0:
            total += self.draft_seconds(drafts, requests, context)
            total += self.speculation + self.speculation_row * requests * (1 + drafts)
        return total

    def break_even_length(self, drafts: int, requests: float, context: float) -> float:
        """The acceptance length from which `drafts` drafts beat plain decoding."""
        return self.seconds(drafts, requests, context) / self.seconds(0, requests, context)

    def seconds_per_token(self, acceptance: Sequence[float], drafts: int, requests: float, context: float) -> float:
        """Seconds between two tokens of one request, `acceptance` by position as in `expected_tokens`."""
        return self.seconds(drafts, requests, context) / expected_tokens(acceptance, drafts)

    def tokens_per_second(self, acceptance: Sequence[float], drafts: int, requests: float, context: float) -> float:
        """Tokens a second of all requests together."""
        return requests / self.seconds_per_token(acceptance, drafts, requests, context)

    def best_drafts(self, acceptance: Sequence[float], most: int, requests: float, context: float) -> int:
        """The number of drafts, 0 to `most`, with the least time a token; the smallest of equals."""
        return min(range(most + 1), key=lambda k: self.seconds_per_token(acceptance, k, requests, context))


def survival(acceptance: Sequence[float], drafts: int) -> list[float]:
    """Probabilities that draft 1, drafts 1 and 2, ... are accepted; positions past the last given repeat it."""
    if drafts and not acceptance:
        raise ValueError("Acceptance by position needs at least one value, e.g. [0.8, 0.7].")
    given = itertools.chain(acceptance, itertools.repeat(acceptance[-1] if acceptance else 0.0))
    return list(itertools.accumulate(itertools.islice(given, drafts), lambda a, b: a * b))


def expected_tokens(acceptance: Sequence[float], drafts: int) -> float:
    """Acceptance length, the target's own token counted: 1 + sum over k of the first k acceptances' product.

    acceptance[j]: probability that draft j + 1 is accepted when all before it were (Leviathan et al. 2023, section 3.1
    has it for one constant rate).
    """
    return 1.0 + math.fsum(survival(acceptance, drafts))


def constant_acceptance(length: float, drafts: int) -> float:
    """The acceptance probability, the same at every position, that gives this acceptance length with `drafts` drafts.

    Raises ValueError unless 1 <= length <= 1 + drafts.
    """
    if not 1 <= length <= 1 + drafts:
        raise ValueError(f"With {drafts} drafts the acceptance length is 1 to {1 + drafts}, it cannot be {length}.")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle], drafts) < length else (low, middle)
    return (low + high) / 2


def as_cycle_cost(table: Mapping[str, Any]) -> CycleCost:
    """A cost table as it stands in a JSON file: the fields of CycleCost, "rows" with keys that are strings."""

    def forward(entry: Mapping[str, Any]) -> ForwardCost:
        return ForwardCost(**{**entry, "rows": {int(rows): float(seconds) for rows, seconds in entry["rows"].items()}})

    scalars = {key: table[key] for key in ("block", "step", "speculation", "speculation_row") if key in table}
    return CycleCost(forward(table["target"]), forward(table["draft"]), **scalars)
