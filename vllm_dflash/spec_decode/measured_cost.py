# SPDX-License-Identifier: Apache-2.0
"""Costs as they are measured: seconds by rows and context, learnt while serving."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

# New samples count for at least this share of a cell's mean. What all loads share, the machine's pace, is followed
# elsewhere and taken out before: means that ran after it would be worth nothing beside those of loads not run since.
SMOOTHING = 0.03
# What was measured before the load changed counts for so many samples: a cell's loads are nearly equal, not quite.
OLD_SAMPLES = 2
# A mean is of medians of so many: two of them in a row may be outliers.
MEDIAN_OF = 5
# If all of them are off by more than this to the same side, their median counts for half: it is no noise. Else it
# counts as if it were off by this.
JUMP = 0.08
# Of a cell's first samples the least is no less than this, over their median, once it is settled.
SETTLED = 0.75
# With fewer samples a cell is one voice among the others.
FEW = 3
# A sample so many times a cell's mean is a pause of the machine, unless it is one of so many in a row; the first of a
# cell that are so far from its neighbours may be, until there are so many or some from another time, so many steps off.
PAUSE, LASTING, APART = 1.8, 24, 20
# What the fit is held towards 0 by: cells that all have one context say nothing of what context costs.
RIDGE = (1e-6, 1e-6, 0.03, 0.03)
# What a draft takes beside is told by steps not longer than so many times the one at hand.
LIKE = 1.5
# Samples after which the fit to all cells is renewed; sooner where a cell is new.
RENEWED = 64


@dataclass
class _Cell:
    """Samples of nearly equal rows, rows a request and context a request."""

    rows: float
    requests: float
    context: float
    seconds: float
    recent: tuple[float, ...]
    samples: int = 1
    lately: int = 1
    """Of the samples those since the load changed."""
    last: int = 0
    """When the last one came, in samples of all cells."""
    visits: int = 1
    """At how many times, APART from each other, it was measured."""
    dear: int = 0
    """Samples since the last one that was no pause."""
    cheap: int = 0
    """Samples since the last one that was not as much cheaper: the mean may be of a pause."""

    @property
    def is_doubted(self) -> bool:
        return self.visits < 2 and self.samples < LASTING

    def add(self, seconds: float, rows: int, requests: int, context: float, expected: float) -> None:
        """expected: by the mean, of this very load."""
        self.dear = self.dear + 1 if seconds > PAUSE * expected else 0
        if 0 < self.dear <= LASTING:
            return
        self.cheap = self.cheap + 1 if PAUSE * seconds < expected else 0
        if self.cheap == 2 and self.samples < LASTING:
            self.seconds = max(self.recent[-1], seconds)
            self.recent = (self.seconds,)
            self.cheap = 0
        self.samples += 1
        self.lately += 1
        self.recent = (*self.recent[1 - MEDIAN_OF :], seconds)
        # Of two the smaller: the first run of a shape may carry its warm-up.
        middle = median_low(self.recent)
        share = 1.0 if self.samples <= MEDIAN_OF else max(SMOOTHING, 1.0 / (self.lately + OLD_SAMPLES))
        low, high = (1 - JUMP) * self.seconds, (1 + JUMP) * self.seconds
        if self.samples > MEDIAN_OF and not low < middle < high:
            fresh = self.recent[-self.lately :]
            if len(fresh) > 2 and (max(fresh) < low or min(fresh) > high):
                share = max(share, 0.5)
            elif len(fresh) == MEDIAN_OF:
                middle = min(max(middle, low), high)
        self.seconds += share * (middle - self.seconds)
        self.rows += share * (rows - self.rows)
        self.requests += share * (requests - self.requests)
        self.context += share * (context - self.context)


class MeasuredCost:
    """Seconds over n rows of B requests with C context tokens in all, from samples.

    A load that was measured has its own mean. For the others: seconds = (a + b n + c C + d C (n/B - 1)) * r with
    a, b, c, d >= 0 fitted to all cells (c: KV is read once for all rows of a request; d: attention's arithmetic grows
    with the rows), and r interpolated between what cells of like context measured against that fit.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, int], _Cell] = {}
        self._weights = [0.0] * 4
        self._ratios: dict[int, list[tuple[float, float]]] = {}
        """By context a request: (rows, measured over fitted seconds) of cells with FEW samples, in order of rows."""
        self._asked: tuple[tuple[float, int, float], tuple[int, int, int]] = ((0.0, 0, 0.0), (0, 0, 0))
        self._news = 0
        self._observed = 0

    def observe(self, seconds: float, rows: int, requests: int, context: float) -> None:
        """One measured step. context: tokens before the rows, of all requests together."""
        key = self._key(rows, requests, context)
        cell = self._cells.get(key)
        if cell is None:
            self._cells[key] = _Cell(rows, requests, context, seconds, (seconds,))
            self._news += RENEWED
        else:
            if self._observed - cell.last > APART:
                cell.visits += 1
            cell.add(seconds, rows, requests, context, cell.seconds * self._inside(cell, rows, requests, context))
            self._news += RENEWED if cell.samples < 4 else 1
        self._observed += 1
        self._cells[key].last = self._observed

    def samples(self, rows: float, requests: int, context: float) -> int:
        """How many samples there are of such a load."""
        cell = self._cells.get(self._key(rows, requests, context))
        return 0 if cell is None else cell.samples

    def lately(self, rows: float, requests: int, context: float) -> int:
        """How many of them there are since `changed`."""
        cell = self._cells.get(self._key(rows, requests, context))
        return 0 if cell is None else cell.lately

    def age(self, rows: float, requests: int, context: float) -> int | None:
        """How many steps ago such a load was measured last; None: never."""
        cell = self._cells.get(self._key(rows, requests, context))
        return None if cell is None else self._observed - cell.last

    def is_settled(self, rows: float, requests: int, context: float) -> bool:
        """Whether such a load's mean is not that of outliers: of its first few samples one may be by far the least."""
        cell = self._cells.get(self._key(rows, requests, context))
        if cell is None or cell.samples < FEW:
            return False
        return cell.samples > MEDIAN_OF or min(cell.recent) > SETTLED * median_low(cell.recent)

    def changed(self) -> None:
        """The load is another one now: what a cell holds may be that of a load that is only nearly equal."""
        for cell in self._cells.values():
            cell.lately = 0
            cell.recent = (cell.seconds,)

    def seconds(self, rows: float, requests: int, context: float) -> float:
        """The expected seconds; 0 before the first sample."""
        if not self._cells or rows <= 0:
            return 0.0
        if self._news >= RENEWED:
            self._news = 0
            self._renew()
        key = self._key(rows, requests, context)
        cell = self._cells.get(key)
        if cell is None:
            return self._neighbours(rows, requests, context)
        if cell.samples < FEW:
            # A single one may be an outlier, or the first run of its shape.
            return min(cell.seconds, self._neighbours(rows, requests, context))
        seconds = cell.seconds * self._inside(cell, rows, requests, context)
        if cell.is_doubted:
            neighbours = self._neighbours(rows, requests, context)
            if seconds > PAUSE * neighbours:
                return neighbours
        return seconds

    def is_doubtful(self, rows: float, requests: int, context: float) -> bool:
        """Whether the last sample says that the mean is that of a pause, which another one would confirm."""
        cell = self._cells.get(self._key(rows, requests, context))
        return cell is not None and cell.cheap == 1 and cell.samples < LASTING

    def _inside(self, cell: _Cell, rows: float, requests: int, context: float) -> float:
        """What a load of a cell costs over the cell's mean."""
        mean = self._fit(cell.rows, cell.requests, cell.context)
        return min(max(self._fit(rows, requests, context) / mean, 0.5), 2.0) if mean > 0 else 1.0

    def _neighbours(self, rows: float, requests: int, context: float) -> float:
        return self._fit(rows, requests, context) * self._ratio(rows, self._key(rows, requests, context)[2])

    def _key(self, rows: float, requests: int, context: float) -> tuple[int, int, int]:
        """A step asks several times for the same."""
        load = rows, requests, context
        if load != self._asked[0]:
            self._asked = load, _key(*load)
        return self._asked[1]

    def _fit(self, rows: float, requests: float, context: float) -> float:
        a, b, c, d = self._weights
        return a + b * rows + c * context + d * context * (rows / max(requests, 1) - 1)

    def _renew(self) -> None:
        self._weights = _fitted(self._cells.values(), self._weights)
        ratios: dict[int, list[tuple[float, float]]] = {}
        for (_, _, kind), cell in self._cells.items():
            if cell.samples >= FEW:
                ratio = cell.seconds / max(self._fit(cell.rows, cell.requests, cell.context), 1e-9)
                if cell.is_doubted and ratio > PAUSE:
                    continue
                for like in (kind - 1, kind, kind + 1):
                    ratios.setdefault(like, []).append((cell.rows, ratio))
        self._ratios = {like: sorted(known) for like, known in ratios.items()}

    def _ratio(self, rows: float, like: int) -> float:
        """Measured over fitted, of the cells next in rows among those of like context."""
        known = self._ratios.get(like)
        if not known:
            return 1.0
        above = bisect_right(known, (rows, math.inf))
        if above in (0, len(known)):
            return known[min(above, len(known) - 1)][1]
        (low, before), (high, after) = known[above - 1], known[above]
        return before + math.log(rows / low) / math.log(high / low) * (after - before)


class Beside:
    """What a step that drafts takes beside the draft and its target's rows, by the draft's rows to a power of two: the
    host's work, and context that was kept and is written now. The median of nine, as it is small beside a step's noise.
    """

    def __init__(self) -> None:
        self._samples: dict[int, tuple[tuple[float, float], ...]] = {}

    def observe(self, seconds: float, draft_rows: int, plain: float) -> None:
        """seconds: of the step without its draft, over `plain`, those of its rows without any draft; may be < 0."""
        size = draft_rows.bit_length()
        self._samples[size] = (*self._samples.get(size, ())[-8:], (seconds, plain))

    def knows(self, draft_rows: int) -> bool:
        return draft_rows.bit_length() in self._samples

    def seconds(self, draft_rows: int, plain: float) -> float:
        """0 before the third sample. The noise of longer steps than `plain` would look like much."""
        samples = self._samples.get(draft_rows.bit_length(), ())
        known = [seconds for seconds, of in samples if of < LIKE * plain]
        return max(median_low(known), 0.0) if len(known) > 2 else 0.0


def _features(rows: float, requests: float, context: float) -> tuple[float, float, float, float]:
    return 1.0, rows, context, context * (rows / max(requests, 1) - 1)


def _fitted(cells: Iterable[_Cell], start: Sequence[float]) -> list[float]:
    """Least squares of the relative errors under weights >= 0, by coordinate descent from `start`."""
    cells = [cell for cell in cells if cell.seconds > 0]
    counts = [min(cell.samples / FEW, 1.0) for cell in cells]
    table = [
        [count * feature / cell.seconds for feature in _features(cell.rows, cell.requests, cell.context)]
        for count, cell in zip(counts, cells, strict=True)
    ]
    if not table:
        return list(start)
    size = range(len(start))
    scale = [max(math.sqrt(sum(row[i] ** 2 for row in table)), 1e-30) for i in size]
    table = [[row[i] / scale[i] for i in size] for row in table]
    gram = [[sum(row[i] * row[j] for row in table) for j in size] for i in size]
    target = [sum(count * row[i] for count, row in zip(counts, table, strict=True)) for i in size]
    weights = [w * s for w, s in zip(start, scale, strict=True)]
    for _ in range(60):
        for i in size:
            rest = sum(gram[i][j] * weights[j] for j in size if j != i)
            weights[i] = max((target[i] - rest) / (gram[i][i] + RIDGE[i]), 0.0)
    return [w / s for w, s in zip(weights, scale, strict=True)]


def _key(rows: float, requests: float, context: float) -> tuple[int, int, int]:
    """Rows to a fifth, rows a request in powers of two, context a request in powers of two from 1000 tokens."""
    requests = max(requests, 1)
    return (
        round(4 * math.log2(max(rows, 1))),
        math.ceil(math.log2(max(rows / requests, 1)) - 1e-9),
        round(math.log2(1 + context / requests / 1000)),
    )
