# SPDX-License-Identifier: Apache-2.0
"""Verification by slot and row: the same tokens as verification by request id, drafts that were cut included."""

import pytest
import torch

from tests.spec_decode.test_worker import MASK, C, K, TableDrafter, V, anchors, hidden_of
from vllm_dflash.spec_decode import (
    Anchors,
    CutDrafts,
    DraftSlots,
    SpecDecodeWorker,
    VerifyInputs,
    VerifyRows,
    verify_rows,
)

SLOTS = 40


def drafted(count: int, temperature: float, probabilistic: bool = True):
    """A worker that has drafted for `count` requests, the anchors, and the same q by slot (slots in reverse)."""
    worker = SpecDecodeWorker(TableDrafter(), MASK, K, C, probabilistic)
    a = anchors(count, temperature)
    block = worker.draft(a, hidden_of)
    slots = torch.arange(SLOTS - 1, SLOTS - 1 - count, -1)
    if not probabilistic:
        return worker, a, block, slots, None
    q = DraftSlots(SLOTS, K, C, "cpu")
    q.write(slots, block.token_ids, block.candidate_ids, block.candidate_logits)
    return worker, a, block, slots, q


def rows_of(counts: list[int], a: Anchors, tokens: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor, cut=None):
    cu_rows = torch.tensor([0, *torch.tensor(counts).add(1).cumsum(0)], dtype=torch.int32)
    ids = [torch.cat([a.token_ids[b : b + 1], tokens[b, :n]]) for b, n in enumerate(counts)]
    positions = [a.positions[b] + torch.arange(n + 1) for b, n in enumerate(counts)]
    return VerifyRows(
        logits, torch.cat(ids).to(torch.int32), torch.cat(positions), cu_rows, slots, a.temperature, a.seeds, cut
    )


def inputs_of(counts: list[int], a: Anchors, tokens: torch.Tensor, logits: torch.Tensor) -> VerifyInputs:
    ends = torch.tensor(counts).add(1).cumsum(0)
    is_bonus = torch.zeros(logits.shape[0], dtype=torch.bool)
    is_bonus[ends - 1] = True
    return VerifyInputs(
        a.request_ids, counts, logits, torch.nonzero(~is_bonus).flatten(), ends - 1,
        torch.cat([tokens[b, :n] for b, n in enumerate(counts)]),
        torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32), a.temperature, a.seeds, a.positions,
    )  # fmt: skip


@pytest.mark.parametrize("probabilistic", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("counts", [[K] * 30, [K, 0, 2, 1, 0, 0, K, 3] * 4, [0, 0, 1], [0, 0]])
def test_the_same_as_by_request_id(temperature: float, probabilistic: bool, counts: list[int]) -> None:
    worker, a, block, slots, q = drafted(len(counts), temperature, probabilistic)
    logits = torch.randn(sum(counts) + len(counts), V, generator=torch.Generator().manual_seed(5)) * 1.5
    short = torch.tensor([n < K for n in counts])
    cut = CutDrafts(short, int(short.sum()), block.token_ids)
    expected, expected_accepted = worker.verify(inputs_of(counts, a, block.token_ids, logits))
    output, accepted = verify_rows(rows_of(counts, a, block.token_ids, logits, slots, cut), q, K)
    assert output.shape == (len(counts), K + 1)
    for b, n in enumerate(counts):
        own = output[b][output[b] >= 0].tolist()
        assert own == expected[b][expected[b] >= 0].tolist()
        assert accepted[b] == len(own) - 1 == min(int(expected_accepted[b]), n)


def test_rows_beyond_the_counted_ones_change_nothing() -> None:
    """An engine that trims on the device knows the number of rows beforehand, not whose they are."""
    counts = [2, 0, 3]
    _, a, block, slots, q = drafted(3, 1.0)
    logits = torch.randn(sum(counts) + 3, V, generator=torch.Generator().manual_seed(5))
    rows = rows_of(counts, a, block.token_ids, logits, slots)
    padded = VerifyRows(
        torch.cat([logits, logits[:4]]), torch.cat([rows.token_ids, rows.token_ids[:4]]),
        torch.cat([rows.positions, rows.positions[:4]]), rows.cu_rows, slots, a.temperature, a.seeds,
    )  # fmt: skip
    for one, other in zip(verify_rows(rows, q, K), verify_rows(padded, q, K), strict=True):
        assert torch.equal(one, other)


def test_no_draft_is_rejected_and_recovered_from_p() -> None:
    """A draft of -1 is never accepted, whatever stands in its q."""
    _, a, block, slots, q = drafted(4, 1.0)
    logits = torch.full((4 * (K + 1), V), -torch.inf)
    logits[:, 7] = 0.0
    tokens = torch.full_like(block.token_ids, -1)
    output, accepted = verify_rows(rows_of([K] * 4, a, tokens, logits, slots), q, K)
    assert accepted.tolist() == [0] * 4
    assert output[:, 0].tolist() == [7] * 4
