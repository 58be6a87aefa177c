# SPDX-License-Identifier: Apache-2.0
"""SpecDecodeWorker over a drafter of a few lines, with no engine: block inputs, limits, one forward, losslessness."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from vllm_dflash import ops
from vllm_dflash.spec_decode import Anchors, SpecDecodeWorker, VerifyInputs

V, K, C, H = 12, 3, 4, 8
MASK = V - 1


class TableDrafter:
    """Hidden states stand for themselves; logits and the selector's edges come from fixed random tables."""

    has_selector = True

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.head = torch.randn(V, H, generator=g)
        self.tables = torch.randn(2, V, 2, generator=g)
        self.projection = torch.randn(2, H, generator=g)

    def context_kv(self, taps, positions):
        raise AssertionError("these tests have no context")

    def candidates(self, hidden, count):
        logits, ids = (hidden @ self.head.T).topk(count)
        return ids, logits

    def select(self, hidden, ids, logits, anchors, temperature, seeds, positions):
        projected = hidden @ self.projection.T
        return ops.select_path(ids, logits, projected, *self.tables, anchors, temperature, seeds, positions)


def anchors(count: int, temperature: float = 0.0, position: int = 10, limit: int = 1000) -> Anchors:
    return Anchors(
        [f"r{i}" for i in range(count)],
        torch.full((count,), 3),
        torch.full((count,), position),
        torch.full((count,), temperature),
        torch.arange(count),
        limit,
    )


def hidden_of(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.sin(positions[:, None] * torch.arange(1, H + 1) * 0.37 + input_ids[:, None])


def test_block_inputs_are_anchor_then_masks_at_consecutive_positions() -> None:
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)
    ids, positions = worker.block_inputs(anchors(2))
    assert ids.tolist() == [3, MASK, MASK, MASK] * 2
    assert positions.tolist() == [10, 11, 12, 13] * 2


def test_one_forward_whatever_the_batch() -> None:
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)
    calls: list[int] = []

    def forward(ids, positions):
        calls.append(ids.shape[0])
        return hidden_of(ids, positions)

    worker.draft(anchors(5), forward)
    assert calls == [5 * (1 + K)]


def test_drafts_at_the_limit_are_no_drafts() -> None:
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, False)
    block = worker.draft(anchors(1, position=10, limit=12), hidden_of)
    assert (block.token_ids >= 0).tolist() == [[True, False, False]]


def test_a_planned_length_changes_no_draft_and_no_neighbour() -> None:
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)
    whole = worker.draft(anchors(4, 1.0), hidden_of).token_ids
    block = worker.draft(replace(anchors(4, 1.0), lengths=[K, 1, 0, 2]), hidden_of)
    past = torch.arange(K) >= torch.tensor([K, 1, 0, 2]).unsqueeze(1)
    assert torch.equal(block.token_ids, whole.masked_fill(past, -1))


def test_a_planned_length_gives_a_bonus_token_and_the_targets_distribution() -> None:
    """One draft each, decided beforehand: first and second token of 40,000 requests against the target's rows.

    The target makes the second token depend on nothing, so that it must be distributed as its row says.
    """
    count = 40_000
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)
    a = replace(anchors(count, 1.0), lengths=[1] * count)
    drafted = worker.draft(a, hidden_of)
    target = torch.randn(2, V, generator=torch.Generator().manual_seed(1)) * 1.5
    inputs = VerifyInputs(
        a.request_ids, [1] * count, target, torch.zeros(count).long(), torch.ones(count).long(),
        drafted.token_ids[:, 0].contiguous(), torch.arange(count + 1, dtype=torch.int32), a.temperature, a.seeds,
        a.positions,
    )  # fmt: skip
    output, accepted = worker.verify(inputs)
    assert output.shape == (count, 2)
    both = output[accepted == 1]
    assert (both >= 0).all() and 0 < len(both) < count
    for tokens, row in ((output[:, 0], target[0]), (both[:, 1], target[1])):
        seen = Counter(tokens.tolist())
        expected = torch.softmax(row.double(), 0) * len(tokens)
        assert chisquare([seen.get(t, 0) for t in range(V)], expected.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_drafts_depend_on_the_request_alone_and_not_on_its_row(temperature: float) -> None:
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)
    all_of_them = worker.draft(anchors(4, temperature), hidden_of).token_ids
    some = anchors(4, temperature).select([2, 0], torch.tensor([2, 0]))
    assert torch.equal(worker.draft(some, hidden_of).token_ids, all_of_them[[2, 0]])


@pytest.mark.parametrize("probabilistic", [True, False])
def test_output_of_draft_and_verify_has_the_targets_distribution(probabilistic: bool) -> None:
    """First token of 40,000 requests, each with its own seed: chi-square against softmax(target / T)."""
    count, temperature = 40_000, 1.0
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, probabilistic)
    a = anchors(count, temperature)
    drafted = worker.draft(a, hidden_of)
    target = torch.randn(1 + K, V, generator=torch.Generator().manual_seed(1)) * 1.5
    counts = [K] * count
    starts = torch.arange(count).unsqueeze(1) * 0
    rows = torch.arange(K).expand(count, K) + starts
    inputs = VerifyInputs(
        a.request_ids, counts, target, rows.flatten(), torch.full((count,), K), drafted.token_ids.flatten(),
        torch.arange(0, count * K + 1, K, dtype=torch.int32), a.temperature, a.seeds, a.positions,
    )  # fmt: skip
    output, accepted = worker.verify(inputs)
    seen = Counter(output[:, 0].tolist())
    expected = torch.softmax(target[0].double(), 0) * count
    assert chisquare([seen.get(t, 0) for t in range(V)], expected.numpy()).pvalue > 1e-3
    assert 0 < accepted.float().mean() < K


def test_the_distribution_test_notices_a_wrong_q() -> None:
    """The same check must fail when the drafts' q is not the one that drew them."""
    count = 40_000
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)
    a = anchors(count, 1.0)
    drafted = worker.draft(a, hidden_of)
    worker.block = type(drafted)(
        drafted.request_ids, drafted.token_ids, drafted.candidate_ids, drafted.candidate_logits * 1.5
    )
    target = torch.randn(1 + K, V, generator=torch.Generator().manual_seed(1)) * 1.5
    inputs = VerifyInputs(
        a.request_ids, [K] * count, target, torch.arange(K).repeat(count), torch.full((count,), K),
        drafted.token_ids.flatten(), torch.arange(0, count * K + 1, K, dtype=torch.int32), a.temperature, a.seeds,
        a.positions,
    )  # fmt: skip
    output, _ = worker.verify(inputs)
    seen = Counter(output[:, 0].tolist())
    expected = torch.softmax(target[0].double(), 0) * count
    assert chisquare([seen.get(t, 0) for t in range(V)], expected.numpy()).pvalue < 1e-6


@pytest.mark.parametrize("by_own_q", [False, True])
def test_blocks_cut_by_the_modes_of_their_q_keep_the_targets_distribution(by_own_q: bool) -> None:
    """Second tokens of those of 40,000 requests whose first draft was accepted; about half are cut before the second.

    Cut by the q of the second draft itself, unlikely drafts are drawn again, and the check must notice.
    """
    count = 40_000
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)

    def cut(request_ids, lengths, modes):
        assert list(lengths) == [K] * count
        middle = sorted(block[1] for block in modes)[count // 2]
        return [1 if block[1] < middle else K for block in modes]

    worker.cut = None if by_own_q else cut
    a = anchors(count, 1.0)
    a = replace(a, positions=10 + torch.arange(count) % 5)
    drafted = worker.draft(a, hidden_of)
    if by_own_q:
        log_q = torch.log_softmax(drafted.candidate_logits[:, 1], dim=-1)
        own = log_q[drafted.candidate_ids[:, 1] == drafted.token_ids[:, 1:2]]
        planned = torch.where(own < own.median(), 1, K).tolist()
        drafted = worker.block = replace(drafted, planned=planned)
    counts = list(drafted.planned)
    assert 0.3 * count < counts.count(1) < 0.7 * count
    kept = torch.arange(K) < torch.tensor(counts).unsqueeze(1)
    assert (drafted.token_ids[kept] >= 0).all()
    # Near the mean q, so that many drafts are accepted and a bias would show.
    q = torch.zeros(count, K, V).scatter(2, drafted.candidate_ids, drafted.candidate_logits.softmax(dim=-1))
    target = torch.cat([q.mean(dim=0), torch.zeros(1, V)]).add(0.02).log()
    inputs = VerifyInputs(
        a.request_ids, counts, target, torch.arange(K).expand(count, K)[kept], torch.tensor(counts),
        drafted.token_ids[kept], torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32),
        a.temperature, a.seeds, a.positions,
    )  # fmt: skip
    output, _ = worker.verify(inputs)
    seconds = output[:, 1][output[:, 1] >= 0]
    seen = Counter(seconds.tolist())
    expected = torch.softmax(target[1].double(), 0) * len(seconds)
    pvalue = chisquare([seen.get(t, 0) for t in range(V)], expected.numpy()).pvalue
    assert pvalue < 1e-6 if by_own_q else pvalue > 1e-3


def test_a_gap_in_the_schedule_keeps_the_q_of_waiting_drafts() -> None:
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)
    first = worker.draft(anchors(3, 1.0), hidden_of)
    worker.forget({"r0"}, alive={"r0", "r1"})
    worker.draft(anchors(1, 1.0, position=14), hidden_of)
    assert worker.block is not None
    assert worker.block.slots(["r1", "r2"], [1, 1])[1] == -1
    row = torch.tensor(worker.block.slots(["r1"], [K]))
    ids, logits = worker.block.q(first.token_ids[1], row)
    assert torch.equal(ids, first.candidate_ids[1]) and torch.equal(logits, first.candidate_logits[1])


@pytest.mark.parametrize("cut_exact", [True, False])
def test_a_cut_that_depends_on_the_draft_does_not_bias_the_output(cut_exact: bool) -> None:
    """A grammar forbids token 3 at slot 1: the engine hands back no drafts where it was drawn, and masks the logits.

    With `cut_exact` False the cut draft is forgotten, the row gives a bonus from p, and the check must notice.
    """
    count = 40_000
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)
    a = anchors(count, 1.0)
    drafted = worker.draft(a, hidden_of)
    forbidden = int(drafted.token_ids[:, 0].mode().values)
    target = torch.randn(1 + K, V, generator=torch.Generator().manual_seed(1)) * 1.5
    target[0, forbidden] = float("-inf")
    counts = [0 if token == forbidden else 1 for token in drafted.token_ids[:, 0].tolist()]
    assert 0 < sum(counts) < count
    kept = torch.tensor(counts, dtype=torch.bool)
    if not cut_exact:
        worker.block = drafted.without({f"r{i}" for i in torch.nonzero(~kept).flatten().tolist()}, set(a.request_ids))
    inputs = VerifyInputs(
        a.request_ids, counts, target, torch.zeros(sum(counts), dtype=torch.int64), kept.long(),
        drafted.token_ids[kept, 0], torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32),
        a.temperature, a.seeds, a.positions,
    )  # fmt: skip
    output, _ = worker.verify(inputs)
    assert output.shape == (count, 2)
    seen = Counter(output[:, 0].tolist())
    expected = torch.softmax(target[0].double(), 0) * count
    possible = [t for t in range(V) if t != forbidden]
    assert seen.get(forbidden, 0) == 0
    pvalue = chisquare([seen.get(t, 0) for t in possible], expected[possible].numpy()).pvalue
    assert pvalue > 1e-3 if cut_exact else pvalue < 1e-6


def test_a_cut_gives_one_token_more_than_its_drafts_and_leaves_the_others_alone() -> None:
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, True)
    a = anchors(3, 1.0)
    drafted = worker.draft(a, hidden_of)
    certain = torch.full((1 + K, V), float("-inf"))
    certain.scatter_(1, torch.cat([drafted.token_ids[1], torch.tensor([5])]).unsqueeze(1), 0.0)
    counts = [0, K, 1]
    inputs = VerifyInputs(
        a.request_ids, counts, certain, torch.tensor([0, 1, 2, 0]), torch.tensor([0, K, 1]),
        torch.cat([drafted.token_ids[1], drafted.token_ids[2, :1]]), torch.tensor([0, 0, K, K + 1], dtype=torch.int32),
        a.temperature, a.seeds, a.positions,
    )  # fmt: skip
    output, accepted = worker.verify(inputs)
    assert output.shape == (3, K + 1)
    assert output[1].tolist() == [*drafted.token_ids[1].tolist(), 5]
    assert [int((row >= 0).sum()) for row in output] == [1, K + 1, 2 if accepted[2] else 1]
    assert output[0, 0] == drafted.token_ids[1, 0]


def test_who_got_no_drafts_and_why() -> None:
    """Only drafts that could have been made count as not finite: one of the two that had context and range."""
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, False)
    told: list = []
    worker.on_non_finite = lambda bad, requests: told.append((bad, requests))
    flags = torch.tensor
    without, out_of_range = flags([True, True, True, False, True]), flags([False, True, False, False, False])
    no_context = flags([False, False, True, False, False])
    worker.drafted(["nan", "end", "blind", "good", "unplanned"], [3, 3, 1, 3, 0], without, out_of_range, no_context)
    assert told == [(["nan"], 2)]
    assert worker.tally.skipped == {"range": 1, "no_context": 1, "fault": 1}


def test_what_was_drafted_before_a_context_was_left_behind_is_no_news() -> None:
    """The device is late: two more steps draft for a request before it is heard that its context is NaN."""
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, False)
    worker._readback.after = 3
    worker._readback.event = Immediate
    told: list = []
    skipped: Counter[str] = Counter()
    worker.observers.append(lambda outcome: skipped.update(outcome.skipped))

    def leave_behind(bad: list[str], requests: int) -> None:
        told.append((worker.clock.step, bad, requests))
        worker.leave_behind(bad)

    worker.on_non_finite = leave_behind
    for step in range(1, 8):
        worker.clock.begin_step(2, 0)
        without = torch.tensor([step in (2, 3, 4, 5), False])
        worker.drafted(["nan", "good"], [3, 3], without, torch.zeros(2, dtype=torch.bool))
        worker.end_step([])
    # What step 5 drafted came after the context began anew, at the end of step 4.
    assert told == [(3, [], 2), (4, ["nan"], 2), (5, [], 1), (6, [], 1), (7, ["nan"], 2)]
    assert skipped == {"fault": 4}


class Immediate:
    """An event that is done at once."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...
