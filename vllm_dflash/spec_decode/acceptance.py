# SPDX-License-Identifier: Apache-2.0
"""How likely drafts are accepted, by position and by request, learnt while serving."""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Requests are told apart by how much better or worse than the average they do, in steps of log-odds.
LEVELS = (-1.6, -0.8, 0.0, 0.8, 1.6)
AVERAGE = 2
# A request's own log-odds count like the average's once their variance, 1 / (judged p (1 - p)), is down to this.
OWN_VARIANCE = 0.15
# A position's own record counts like what the others say of it once it amounts to so many.
OTHERS_WEIGHT = 8.0
# How far texts lie from the slow average, log-odds, as a standard deviation.
SPREAD = 2.0
FIRST_GUESS, DECLINE = 0.5, 0.03
# Over so many requests a surprise of so many standard deviations leaves the record the weight of so many; twice the
# surprise a quarter of it.
RECENT, SURPRISING, DOUBTED = 12.0, 3.0, 4.0
# What is left of the record where all requests are new: of texts that differ much, and of texts that are all alike.
NEWCOMERS, ALIKE = 6.0, 40.0
# Verified steps after which a request tells how far its text lies from the record that it met, and how much what the
# last one told counts; those that came together count as one, as their texts may be of a kind.
INTRODUCTION, LAST = 12, 0.1


class _Verified(NamedTuple):
    """A request's block. promised: probabilities that the drafts cut off are accepted, all before them being it."""

    request_id: str
    drafted: int
    accepted: int
    promised: tuple[float, ...]

    @property
    def planned(self) -> int:
        return self.drafted + len(self.promised)

    @property
    def judged(self) -> int:
        return min(self.accepted + 1, self.drafted)

    @property
    def yielded(self) -> float:
        """Accepted drafts, those cut off counted as promised."""
        return self.accepted + (sum(self.promised) if self.accepted == self.drafted else 0.0)


@dataclass
class _Introduction:
    """A new request against the record that it met: mean and variance of the accepted of 0..most drafts."""

    mean: list[float]
    spread: list[float]
    weight: float
    surprise: float = 0.0
    variance: float = 0.0
    steps: int = 0


class Acceptance:
    """Acceptance probability of drafts 1..most, given that those before were accepted.

    What a position has no record of it takes half from the one before, half from all drafts judged, whatever their
    position: so a few verified blocks tell what the text is like.

    steps: how many steps without news halve a record. Old records fade into a slow average, not into a fixed guess.
    """

    def __init__(self, most: int, steps: float = 1000.0) -> None:
        self.most = most
        self.fading = 0.5 ** (1.0 / steps)
        self._accepted = [0.0] * most
        self._judged = [0.0] * most
        self._slow = [0.0, 0.0]
        self._own: dict[str, tuple[float, float, int]] = {}
        self._known: set[str] = set()
        self._recent = (0.0, 0.0)
        self._introduced: dict[str, _Introduction] = {}
        self._distance = 1 + INTRODUCTION / NEWCOMERS
        self._step = 0
        self._faded = 0
        self._survival: dict[tuple[float, ...], list[list[float]]] = {}

    @property
    def record(self) -> float:
        """How many verified requests the record of position 1 amounts to now."""
        self._fade()
        return self._judged[0]

    def advance(self) -> None:
        """One more step of the engine."""
        self._step += 1

    def _fade(self, keep: float = 1.0) -> None:
        if self._step > self._faded:
            keep *= self.fading ** (self._step - self._faded)
            self._faded = self._step
        if keep < 1.0:
            self._survival.clear()
            self._accepted = [keep * count for count in self._accepted]
            self._judged = [keep * count for count in self._judged]

    def meet(self, request_ids: Sequence[str]) -> float:
        """Tell who is decoding; -> the share of those not met before, by which the record loses weight."""
        strangers = [name for name in request_ids if name not in self._known]
        if not strangers:
            return 0.0
        self._known.update(strangers)
        if self.record >= INTRODUCTION:
            expected = self._expected()
            self._introduced.update((name, _Introduction(*expected, LAST / len(strangers))) for name in strangers)
        share = len(strangers) / len(request_ids)
        self._recent = (self._recent[0] * (1 - share), self._recent[1] * (1 - share))
        kept = min(max(INTRODUCTION / max(self._distance - 1, 1e-3), NEWCOMERS), ALIKE)
        if self.record > kept:
            self._fade(1.0 - share * (1.0 - kept / self._judged[0]))
        return share

    def doubt(self) -> None:
        """The drafter has other weights: the record is worth no more than one of other texts."""
        self._introduced.clear()
        if self.record > NEWCOMERS:
            self._fade(NEWCOMERS / self._judged[0])

    def _expected(self) -> tuple[list[float], list[float]]:
        """Mean and variance of the accepted of 0..most drafts, by the record."""
        [survival] = self.survival((0.0,))
        mean = [0.0, *itertools.accumulate(survival)]
        square = [0.0, *itertools.accumulate((2 * k + 1) * s for k, s in enumerate(survival))]
        return mean, [q - m**2 for q, m in zip(square, mean, strict=True)]

    def _introduce(self, one: _Verified) -> None:
        """How far texts lie apart: with n steps of variance v and a spread t of texts the squared surprise is
        n v + n^2 t^2, so that the record that a new text is worth, v / t^2 steps, is n / (squared surprise / n v - 1).
        """
        own = self._introduced.get(one.request_id)
        if own is None:
            return
        own.surprise += one.yielded - own.mean[one.planned]
        own.variance += own.spread[one.planned]
        own.steps += 1
        if own.steps == INTRODUCTION:
            self._distance += own.weight * (min(own.surprise**2 / max(own.variance, 0.01), 25.0) - self._distance)
            del self._introduced[one.request_id]

    def observe(
        self,
        request_ids: Sequence[str],
        drafted: Sequence[int],
        accepted: Sequence[int],
        memory: float = 96.0,
        beyond: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Of drafted[i] drafts of request i, the first accepted[i] were accepted; those with no drafts say nothing.

        memory: how many verified requests (or six batches, where that is more) the record reaches back. beyond[i]:
        acceptance probabilities of further drafts that were not verified since they promised little. Where all before
        them were accepted they count as what they promised; left out, they would make drafts look better than they are.
        """
        rest = beyond or [()] * len(request_ids)
        news = [
            _Verified(name, drafts, good, tuple(itertools.accumulate(rates, operator.mul)))
            for name, drafts, good, rates in zip(request_ids, drafted, accepted, rest, strict=True)
            if drafts > 0
        ]
        if not news:
            return
        self._doubt(news)
        self._fade(math.exp(-len(news) / max(memory, 6.0 * len(news))))
        judged, passed = [0] * (self.most + 1), [0] * (self.most + 1)
        promised = [0.0] * (self.most + 1)
        tried = got = 0.0
        for one in news:
            self._introduce(one)
            judged[one.judged] += 1
            passed[one.accepted] += 1
            more_tried = more_got = 0.0
            if one.promised and one.accepted == one.drafted:
                reached = (1.0, *one.promised[:-1])
                more_tried, more_got = sum(reached), sum(one.promised)
                for j, (tries, hits) in enumerate(zip(reached, one.promised, strict=True), start=one.drafted):
                    self._judged[j] += tries
                    promised[j] += hits
            total, hits, step = self._own.get(one.request_id, (0.0, 0.0, self._step))
            faded = 0.95 * self.fading ** (self._step - step)
            total, hits = faded * total + one.judged + more_tried, faded * hits + one.accepted + more_got
            self._own[one.request_id] = (total, hits, self._step)
            tried += one.judged + more_tried
            got += one.accepted + more_got
        for j in range(self.most):
            self._judged[j] += sum(judged[j + 1 :])
            self._accepted[j] += sum(passed[j + 1 :]) + promised[j]
        slow = math.exp(-len(news) / 600)
        self._slow = [slow * self._slow[0] + tried, slow * self._slow[1] + got]
        self._survival.clear()

    def _doubt(self, news: list[_Verified]) -> None:
        """Give the record little weight where the last dozen of requests say that the text has changed.

        Their accepted drafts against what the record expects, over its standard deviation.
        """
        self._fade()
        mean, spread = self._expected()
        keep = math.exp(-len(news) / max(RECENT, 2.0 * len(news)))
        surprise, variance = self._recent
        surprise = keep * surprise + sum(one.yielded - mean[one.planned] for one in news)
        variance = keep * variance + sum(spread[one.planned] for one in news)
        doubt = surprise**2 / (SURPRISING**2 * max(variance, 0.01))
        if doubt > 1 and self._judged[0] > DOUBTED / doubt:
            weight = DOUBTED / doubt / self._judged[0]
            self._fade(weight)
            self._slow = [weight * count for count in self._slow]
            surprise = variance = 0.0
        self._recent = (surprise, variance)

    def forget(self, alive: Container[str]) -> None:
        """Drop the records of requests that have ended."""
        self._own = {name: own for name, own in self._own.items() if name in alive}
        self._known = {name for name in self._known if name in alive}
        self._introduced = {name: own for name, own in self._introduced.items() if name in alive}

    def by_position(self) -> list[float]:
        """[most] probabilities of the average request."""
        self._fade()
        text = self._text()
        before, rates = text, []
        for good, judged in zip(self._accepted, self._judged, strict=True):
            prior = _logistic((before + text) / 2 - DECLINE)
            rate = (good + OTHERS_WEIGHT * prior) / (judged + OTHERS_WEIGHT)
            rates.append(rate)
            before = _logit(rate)
        return rates

    def _text(self) -> float:
        """Log-odds of the drafts judged, whatever their position: the likeliest, those near the slow average being
        likelier before (Newton's steps)."""
        count, hits = self._slow
        usual = _logit((hits + 2 * FIRST_GUESS) / (count + 2))
        judged, good = sum(self._judged), sum(self._accepted)
        value = _logit((good + 0.5) / (judged + 1)) if judged > 2 else usual
        for _ in range(6):
            p = _logistic(value)
            slope = good - judged * p - (value - usual) / SPREAD**2
            step = slope / (judged * p * (1 - p) + 1 / SPREAD**2)
            value += min(max(step, -1.5), 1.5)
            if abs(step) < 1e-3:
                break
        return value

    def deviation(self) -> float:
        """How far off the text's log-odds may be, one standard deviation."""
        self._fade()
        judged, good = sum(self._judged), sum(self._accepted)
        p = (good + 0.5) / (judged + 1)
        return 1.0 / math.sqrt(judged * p * (1 - p) + 1 / SPREAD**2)

    def levels(self, request_ids: Sequence[str]) -> list[int]:
        """Which of LEVELS each request is at."""
        self._fade()
        average = sum(self._accepted) / sum(self._judged) if self._judged[0] > 1 else FIRST_GUESS
        middle = _logit(average)
        prior = 1.0 / (OWN_VARIANCE * max(average * (1 - average), 0.01))
        bounds = [_logistic(middle + (a + b) / 2) for a, b in itertools.pairwise(LEVELS)]
        levels = []
        for request_id in request_ids:
            own = self._own.get(request_id)
            if own is None:
                levels.append(AVERAGE)
                continue
            total, hits, step = own
            faded = self.fading ** (self._step - step)
            levels.append(bisect(bounds, (faded * hits + prior * average) / (faded * total + prior)))
        return levels

    def survival(self, levels: Sequence[float] = LEVELS) -> list[list[float]]:
        """[levels][most]: probability that the first k drafts are accepted, of requests better by so many log-odds."""
        self._fade()
        key = tuple(levels)
        if key in self._survival:
            return self._survival[key]
        rates = self.by_position()
        shifted = ([_logistic(_logit(rate) + level) for rate in rates] if level else rates for level in levels)
        self._survival[key] = [list(itertools.accumulate(each, operator.mul)) for each in shifted]
        return self._survival[key]


def _logit(p: float) -> float:
    p = min(max(p, 1e-3), 1 - 1e-3)
    return math.log(p / (1 - p))


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
