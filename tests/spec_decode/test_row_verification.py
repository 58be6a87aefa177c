# SPDX-License-Identifier: Apache-2.0
"""Verification by slot and row: the same tokens as verification by request id."""

from dataclasses import replace

import pytest
import torch

from tests.spec_decode.test_worker import MASK, C, K, TableDrafter, V, anchors, hidden_of
from vllm_dflash import ops
from vllm_dflash.ops import rejection, selector
from vllm_dflash.spec_decode import (
    Anchors,
    DraftSlots,
    SpecDecodeWorker,
    VerifyInputs,
    VerifyRows,
    verify_rows,
)

SLOTS = 50_000


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


def rows_of(counts: list[int], a: Anchors, tokens: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor):
    cu_rows = torch.tensor([0, *torch.tensor(counts).add(1).cumsum(0)], dtype=torch.int32)
    ids = [torch.cat([a.token_ids[b : b + 1], tokens[b, :n]]) for b, n in enumerate(counts)]
    positions = [a.positions[b] + torch.arange(n + 1) for b, n in enumerate(counts)]
    return VerifyRows(
        logits, torch.cat(ids).to(torch.int32), torch.cat(positions), cu_rows, slots, a.temperature, a.seeds
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
    # Verification by id judges a draft that got no row too; here fewer were drawn to begin with.
    worker.block = replace(block, planned=counts)
    expected, expected_accepted = worker.verify(inputs_of(counts, a, block.token_ids, logits))
    output, accepted = verify_rows(rows_of(counts, a, block.token_ids, logits, slots), q, K)
    assert output.shape == (len(counts), K + 1)
    for b in range(len(counts)):
        own = output[b][output[b] >= 0].tolist()
        assert own == expected[b][expected[b] >= 0].tolist()
        assert accepted[b] == len(own) - 1 == int(expected_accepted[b])


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


def test_a_step_asks_the_device_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors whatever reads a value on the host raises: the path, q and the verification do not."""
    assert ops.backend("cpu") == "native"
    for module in (selector, rejection):
        monkeypatch.setattr(module, "is_native", lambda device_type: True)
    drafter = TableDrafter()
    drafter.head, drafter.tables, drafter.projection = (
        tensor.to("meta") for tensor in (drafter.head, drafter.tables, drafter.projection)
    )
    worker = SpecDecodeWorker(drafter, MASK, K, C, True)
    count = 5
    int64 = torch.empty(count, dtype=torch.int64, device="meta")
    fp32 = torch.empty(count, device="meta")
    q = DraftSlots(SLOTS, K, C, "meta")
    hidden = torch.empty(count, 1 + K, 8, device="meta")
    token_ids, ids, scores = worker.path(hidden, Anchors((), int64, int64, fp32, int64, 100))
    q.write(int64, token_ids, ids, scores)
    rows = count * (K + 1)
    of_rows = torch.empty(rows, dtype=torch.int64, device="meta")
    cu_rows = torch.empty(count + 1, dtype=torch.int32, device="meta")
    logits = torch.empty(rows, V, device="meta")
    output_ids, accepted = verify_rows(VerifyRows(logits, of_rows, of_rows, cu_rows, int64, fp32, int64), q, K)
    assert (output_ids.shape, accepted.shape) == ((count, K + 1), (count,))
