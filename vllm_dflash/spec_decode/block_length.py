# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request gets next: what its costs and its acceptance, both measured, say pays most."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence

from vllm_dflash.spec_decode.acceptance import AVERAGE, LEVELS, Acceptance
from vllm_dflash.spec_decode.confidence import Confidence, Savings, worth_verifying
from vllm_dflash.spec_decode.search import SHARE, Search
from vllm_dflash.spec_decode.step_costs import Load, Step, StepCosts

# Nobody drafts.
PLAIN = (0,) * len(LEVELS)
# Another choice must promise this much more before it replaces the one in use: other drafts than now, plain decoding
# instead of drafts, drafts instead of plain decoding (where the record is small, and only drafting makes it grow).
HYSTERESIS, GIVING_UP, TAKING_UP = 0.006, 0.015, 0.002
# Share of all time that trying drafts may lose while plain decoding looks better: of one request. Of n it is a third of
# that and two thirds over the root of n, as a step of tries tells of all of them.
PROBE_SHARE = 0.006
# As large a share is put by, up to so many steps of plain decoding, for the time after a change of load or requests.
RESERVE = 6.0
# Verified requests that the record must amount to before probes keep to PROBE_SHARE one by one; what was put by is for
# finding out, not for trying on what is known not to pay.
FOUND_OUT = 12.0
# Where drafts are further than this from paying, the share shrinks with the distance: little is to be found out.
NEAR = 0.1
# One request in this many drafts in a probe, at least.
PROBE_REQUESTS = 8
# Samples that a number of rows needs before its cost counts as measured.
MEASURED = 3
# Share of all time that may be lost to plain steps that measure anew what drafting has to beat, and the least and the
# most steps between two of them.
PLAIN_SHARE, LEAST_PATIENCE, MOST_PATIENCE = 0.004, 25.0, 250.0
# A neighbour whose cost is not measured is tried when it promises so much of what the choice in use does.
WORTH_A_TRIAL = 0.75
# From n drafts, most being K, to those that are tried; the gain of a single one more may drown in the noise.
MOVES: tuple[Callable[[int, int], int], ...] = (
    lambda n, most: n - 1,
    lambda n, most: n + 1,
    lambda n, most: (n + most + 1) // 2,
    lambda n, most: most,
)
# Steps after which a neighbour's cost is measured again, and what it must promise for that.
TOUR, WORTH_ANOTHER = 100, 0.93
# Steps after which a cost counts as not measured.
STALE = 400
# Verified requests that the record must amount to before drafting is taken up.
EVIDENCE = 4.0
# Verified requests that the record of acceptance reaches back; in probes they are few, and the text may have changed.
DRAFTING_MEMORY, PROBING_MEMORY = 500.0, 200.0
# Steps without one of decoded rows alone after which plain decoding is not waited for to be measured.
UNOBSERVED = 16
# Steps between two looks at the choice; the first while things change, and drafts are verified or there is news.
SOON, SELDOM = 2, 16


class BlockLength:
    """Chooses the drafts of each request so that the batch's tokens a second are most.

    most: K, the drafter's slots. block: rows of the drafter a drafting request. fixed: always that many drafts.
    Only what it is told enters the choice, no clock and no chance: the same record gives the same lengths.
    """

    def __init__(self, most: int, block: int | None = None, fixed: int | None = None) -> None:
        if fixed is not None and not 0 <= fixed <= most:
            raise ValueError(f"A fixed block length is 0 to {most} drafts here, it cannot be {fixed}.")
        self.most = most
        self.fixed = fixed
        self.acceptance = Acceptance(most)
        self.confidence = Confidence()
        self.savings = Savings(most)
        self.price = 0.0
        """Tokens that the time of one more row would yield otherwise: a draft less likely is not worth verifying."""
        self.costs = StepCosts(block or 1 + most)
        self.lengths = PLAIN
        self._toured = [0] * len(MOVES)
        self._trial: tuple[int, ...] | None = None
        self._load: Load | None = None
        self._levels: dict[str, int] = {}
        self._bank = self._reserve = self._dearest = self._shortfall = 0.0
        self._turn = 0
        self._step = 0
        self._decided = -SELDOM
        self._lively = 0
        self._news = True
        self._probed = self._probe_at = 0
        self._plain, self._refreshed = 0, -2
        self._patience = MOST_PATIENCE
        self._awaited = 0.0
        self._unobserved = 0
        self.search = Search()

    def observe(self, step: Step) -> None:
        """Times of a step all of whose rows were decoded ones."""
        if self.fixed is not None or step.requests == 0:
            return
        self._unobserved = 0
        if step.rows == step.requests and not step.drafting:
            self._plain = self._step
        seconds = self.costs.observe(step)
        plain = self.costs.plain(self._load) or seconds
        passed = min(seconds, 2 * plain)
        share = self._share_of(step.requests) * passed
        if self.search.conceivable and not any(self.lengths) and (step.drafting or step.rows > step.requests):
            self.search.spend(self._step, step.requests, max(seconds / plain - 1, 0.0))
        few = _fewer(step.requests)
        self._reserve = min(self._reserve + few * PROBE_SHARE * passed, few * RESERVE * plain)
        # What was put by while nothing was worth trying is not for spending at once.
        if not any(self.lengths) and self._bank < max(self._dearest, 2 * plain):
            self._bank += share

    def _release(self, share: float) -> None:
        """This share of what was put by for a change is there to spend."""
        self._bank += share * self._reserve
        self._reserve -= share * self._reserve

    def _share_of(self, requests: int) -> float:
        return SHARE if self.search.conceivable else max(PROBE_SHARE * _fewer(requests), self.search.stake)

    def cut(self, lengths: Sequence[int], modes: Sequence[Sequence[float]]) -> tuple[list[int], list[list[float]]]:
        """Blocks as they were drafted -> drafts to verify of each, and the expected acceptance of those cut off.

        lengths: B numbers as planned. modes: [B][K], the mode of each slot's q.
        """
        # A probe is there to tell about all its positions, and was weighed with all its rows.
        price = self.price if any(self.lengths) else 0.0
        kept, beyond = [], []
        for length, block in zip(lengths, modes, strict=True):
            rates = self.confidence.rates(block)
            if length:
                self.savings.observe(rates, self.price)
            kept.append(worth_verifying(rates[:length], price))
            beyond.append(rates[kept[-1] : length])
        return kept, beyond

    def verified(
        self,
        request_ids: Sequence[str],
        drafted: Sequence[int],
        accepted: Sequence[int],
        beyond: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """What became of a step's drafts, a request. beyond: see `Acceptance.observe`."""
        if self.fixed is None:
            probing = not any(self.lengths)
            self._news = True
            self.search.verified(sum(map(bool, drafted)))
            aside = probing and not self.search.hopeful
            memory = PROBING_MEMORY if aside else DRAFTING_MEMORY
            self.acceptance.observe(request_ids, drafted, accepted, memory, beyond)
            if probing and self._load is not None:
                plain = self.costs.plain(self._load)
                back = sum(accepted) / self._load.requests
                if self.search.conceivable:
                    self.search.spend(self._step, self._load.requests, -back)
                if aside:
                    surprise = max(back - self._awaited, 0.0)
                    self._bank = min(self._bank + surprise * plain, (2 + RESERVE) * plain)

    def renewed(self) -> None:
        """The drafter has other weights: what is known of its drafts counts for little, and finding out for much."""
        self.acceptance.doubt()
        self.search.begin(self._step)
        self._release(1.0)
        self._probe_at = min(self._probe_at, self._step + 1)
        self._decided = self._step - SELDOM

    def forget(self, alive: Container[str]) -> None:
        """Drop what is known of requests that have ended."""
        self.acceptance.forget(alive)

    def plan(self, request_ids: Sequence[str], context: float, requests: int | None = None) -> list[int]:
        """Drafts for each of these requests in the next step. 0: no draft forward.

        requests: that decode in it, those that can have no drafts beside these; `context` tokens before all of them.
        """
        if self.fixed is not None:
            return [self.fixed] * len(request_ids)
        self._step += 1
        self.acceptance.advance()
        self._unobserved += 1
        count = len(request_ids)
        requests = max(requests or 0, count)
        if count == 0 or self.most == 0:
            return [0] * count
        changed = self._load is None or self._load.differs(requests, context)
        if changed:
            self.costs.changed()
            self._probe_at = min(self._probe_at, self._probed + 3)
            self._lively = self._step + 40
            self._decided = self._step - SELDOM
        soon = self._step <= self._lively and (self._news or any(self.lengths))
        if self._load is None or self._step - self._decided >= (SOON if soon else SELDOM):
            share = self.acceptance.meet(request_ids)
            if share > 0.5:
                self.search.begin(self._step)
            if changed or share > 0.5:
                share = 1.0
            self._release(share)
            levels = self.acceptance.levels(request_ids)
            self._levels = dict(zip(request_ids, levels, strict=True))
            load = Load(requests, context, tuple(levels.count(level) for level in range(len(LEVELS))))
            self._load = load
            if self._needs_plain(load):
                return [0] * count
            self._decide(load)
            self._trial = self._neighbour(load)
            self.price = self.costs.row(load, self.most) * self._value(load, self.lengths)
            gain = 1 - self._value(load, PLAIN) / max(self._value(load, self.lengths), 1e-9)
            self._patience = min(max(2 * gain / PLAIN_SHARE, LEAST_PATIENCE), MOST_PATIENCE)
        load = self._load
        if not any(self.lengths):
            probe = self._probe(load, count)
            if probe is not None:
                return probe
            return [0] * count
        doubtful = self.costs.target.is_doubtful(load.requests, load.requests, load.context)
        if self._step - max(self._plain, self._refreshed) > (SOON if doubtful else self._patience):
            self._refreshed = self._step
        # The first of two verifies drafts still.
        if self._step - self._refreshed < 2:
            return [0] * count
        lengths = self._trial or self.lengths
        return [lengths[self._levels.get(request_id, AVERAGE)] for request_id in request_ids]

    def speedup(self) -> float:
        """Estimate of tokens a second with the lengths in use over those of plain decoding."""
        if self._load is None or not any(self.lengths):
            return 1.0
        plain = self._value(self._load, PLAIN)
        return self._value(self._load, self.lengths) / plain if plain > 0 else 1.0

    def _needs_plain(self, load: Load) -> bool:
        """Whether plain decoding of this load is not measured yet, and will be."""
        if self.costs.target.is_settled(load.requests, load.requests, load.context):
            return False
        return self._unobserved < UNOBSERVED or self.costs.plain(load) == 0

    def _decide(self, load: Load) -> None:
        self._decided = self._step
        self._news = False
        value, lengths, drafting = self._best(load)
        if not any(n and m for n, m in zip(self.lengths, load.members, strict=True)):
            self.lengths = PLAIN
        plain = max(self._value(load, PLAIN), 1e-9)
        self._shortfall = 1 - drafting / plain
        self.search.look(
            self._step,
            load.requests,
            self.acceptance.deviation(),
            self._shortfall,
            lambda better: self._best(load, better)[2] / plain - 1,
        )
        if lengths == self.lengths:
            return
        if not any(self.lengths) and self.acceptance.record < EVIDENCE:
            return
        if any(lengths) == any(self.lengths):
            more = HYSTERESIS
        else:
            more = TAKING_UP if any(lengths) else GIVING_UP
        if value > self._value(load, self.lengths) * (1 + more):
            self.lengths = lengths
            self._lively = self._step + 40

    def _neighbour(self, load: Load) -> tuple[int, ...] | None:
        """Other drafts than now that may well be better, not measured under this load or long ago."""
        if not any(self.lengths):
            return None
        now = self._value(load, self.lengths)
        for move, target in enumerate(MOVES):
            lengths = tuple(min(max(target(n, self.most), 1), self.most) if n else 0 for n in self.lengths)
            rows = load.requests + sum(m * self.savings.rows[n] for m, n in zip(load.members, lengths, strict=True))
            age = self.costs.target.age(rows, load.requests, load.context)
            samples = self.costs.target.samples(rows, load.requests, load.context)
            measured = age is not None and age < STALE and samples >= MEASURED
            if lengths == self.lengths or self._step - self._toured[move] < (TOUR if measured else SOON):
                continue
            if self._value(load, lengths) > (WORTH_ANOTHER if measured else WORTH_A_TRIAL) * now:
                self._toured[move] = self._step
                self._lively = max(self._lively, self._step + SOON)
                return lengths
        return None

    def _best(self, load: Load, better: float = 0.0) -> tuple[float, tuple[int, ...], float]:
        """The lengths a level with the most tokens a second: (tokens a second, lengths, the most with any drafts).

        Each further draft costs one row, whoever's it is, so they are taken in the order of their probabilities; what
        is left is how many.
        """
        survival = self.acceptance.survival([level + better for level in LEVELS])
        items = sorted(
            (-survival[level][k], k, level)
            for level in range(len(LEVELS))
            if load.members[level]
            for k in range(self.most)
        )
        lengths = [0] * len(LEVELS)
        tokens, rows, drafting = float(load.requests), float(load.requests), 0
        each = [1.0] * len(LEVELS)
        best = tokens / max(self.costs.seconds(load, rows, 0), 1e-9), tuple(lengths)
        most = 0.0
        for negative, k, level in items:
            members = load.members[level]
            lengths[level] = k + 1
            before = each[level] * self.savings.kept_share[k]
            each[level] -= negative
            tokens += members * (each[level] * self.savings.kept_share[k + 1] - before)
            rows += members * (self.savings.rows[k + 1] - self.savings.rows[k])
            drafting += members if k == 0 else 0
            value = tokens / max(self.costs.seconds(load, rows, drafting), 1e-9)
            most = max(most, value)
            if value > best[0]:
                best = value, tuple(lengths)
        # Nobody is at the other levels now; whoever gets there before the next look is taken for the average.
        usual = best[1][AVERAGE] if load.members[AVERAGE] else max(best[1])
        return best[0], tuple(n if m else usual for n, m in zip(best[1], load.members, strict=True)), most

    def _value(self, load: Load, lengths: Sequence[int]) -> float:
        """Tokens a second of these lengths."""
        survival = self.acceptance.survival()
        tokens, rows, drafting = float(load.requests - sum(load.members)), float(load.requests), 0
        for level, members in enumerate(load.members):
            length = lengths[level]
            tokens += members * (1 + sum(survival[level][:length])) * self.savings.kept_share[length]
            rows += members * self.savings.rows[length]
            drafting += members if length else 0
        return tokens / max(self.costs.seconds(load, rows, drafting), 1e-9)

    def _probe(self, load: Load, count: int) -> list[int] | None:
        """Drafts for some of `count` requests, once what has been put by pays for what they are expected to lose.

        The time is taken at once, and what is accepted is given back: so good drafts pay for the next ones.
        """
        if self._step < self._probe_at:
            return None
        plain = self.costs.plain(self._load)
        few = max(1, count // PROBE_REQUESTS)
        sizes = sorted({few, (few + count) // 2, count})
        [survival] = self.acceptance.survival((0.0,))
        tries = [self._try(load, drafting, plain, survival) for drafting in sizes]
        if self.search.hopeful:
            chosen = min(tries, key=lambda one: one[0] / one[2])
        else:
            chosen = min(
                tries,
                key=lambda one: (one[0] > self._bank, one[0] / one[2] if one[0] <= self._bank else one[0]),
            )
        loss, self._awaited, drafting, drafts = chosen
        self._dearest = loss
        share = max(self._share_of(load.requests) * plain, 1e-9)
        wait = (loss - self._bank) / share
        if self.acceptance.record >= FOUND_OUT and not self.search.conceivable:
            share = max(share * min(1.0, NEAR / max(self._shortfall, 1e-9)), self.search.stake * plain)
            wait = max(wait, loss / share - (self._step - self._probed))
        if wait > 0 and not self.search.hopeful:
            self._probe_at = self._step + min(math.ceil(wait), SELDOM)
            return None
        if not self.search.hopeful:
            self._bank -= loss
        self._probed = self._step
        self._probe_at = self._step + (1 if self.search.hopeful else 3)
        self._lively = self._step + 8
        self._decided = min(self._decided, self._step - SOON)
        lengths = [0] * count
        for i in range(min(drafting, count)):
            lengths[(self._turn + i) % count] = drafts
        self._turn += drafting
        return lengths

    def _try(
        self, load: Load, drafting: int, plain: float, survival: Sequence[float]
    ) -> tuple[float, float, int, int]:
        """-> (expected loss in seconds, expected tokens a request of all, `drafting`, drafts each) of a probe with
        so many requests."""
        # What was never measured here may cost anything: half a step is risked for it.
        context = load.context * drafting / load.requests
        known = self.costs.draft.samples(drafting * self.costs.block, drafting, context) > 0
        draft = self.costs.seconds(load, load.requests, drafting) - plain if known else 0.5 * plain
        losses, gains, gained = [], [], 0.0
        for k in range(1, self.most + 1):
            seconds = draft + self.costs.seconds(load, load.requests + drafting * k, 0) - plain
            gained += survival[k - 1]
            gains.append(gained * drafting / load.requests)
            losses.append(max(seconds - plain * gained * drafting / load.requests, 0.02 * plain))
        # As deep as costs little more than the cheapest: every position that is judged tells something.
        deepest = max(k for k, loss in enumerate(losses) if loss <= 1.3 * min(losses))
        return losses[deepest], gains[deepest], drafting, 1 + deepest


def _fewer(requests: int) -> float:
    return (1 + 2 / math.sqrt(requests)) / 3
