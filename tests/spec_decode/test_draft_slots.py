# SPDX-License-Identifier: Apache-2.0
"""DraftSlots: what is found again by slot, what padding leaves alone, how much it holds."""

import torch

from vllm_dflash.spec_decode import DraftSlots

R, K, C, V = 5, 3, 4, 20


def written(slots: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """token_ids, candidate_ids and scores of drafts that are each the second candidate of their slot."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(V, generator=g)[:C] for _ in range(len(slots) * K)]).view(len(slots), K, C)
    return ids[..., 1], ids, torch.randn(ids.shape, generator=g)


def test_q_is_found_by_slot_and_column() -> None:
    q = DraftSlots(R, K, C, "cpu")
    tokens, ids, scores = written([3, 0])
    q.write(torch.tensor([3, 0]), tokens, ids, scores)
    found_ids, found_scores = q.read(torch.tensor([0, 3, 3]), torch.tensor([2, 0, 1]))
    assert found_ids.dtype == torch.int64
    assert torch.equal(found_ids, torch.stack([ids[1, 2], ids[0, 0], ids[0, 1]]))
    assert torch.equal(found_scores, torch.stack([scores[1, 2], scores[0, 0], scores[0, 1]]))


def test_rows_of_padding_write_nothing() -> None:
    q = DraftSlots(R, K, C, "cpu")
    every = list(range(R))
    q.write(torch.tensor(every), *written(every))
    ids, scores = q.candidate_ids[:R].clone(), q.scores[:R].clone()
    q.write(torch.tensor([-1, -1]), *written([-1, -1], seed=1))
    assert torch.equal(q.candidate_ids[:R], ids) and torch.equal(q.scores[:R], scores)


def test_a_slot_without_a_draft_has_no_candidates() -> None:
    q = DraftSlots(R, K, C, "cpu")
    tokens, ids, scores = written([2])
    tokens[0, 1:] = -1
    q.write(torch.tensor([2]), tokens, ids, scores)
    assert q.read(torch.tensor([2, 2]), torch.tensor([0, 1]))[0].tolist() == [ids[0, 0].tolist(), [-1] * C]


def test_writing_keeps_the_buffers_in_place() -> None:
    q = DraftSlots(R, K, C, "cpu")
    before = q.candidate_ids.data_ptr(), q.scores.data_ptr()
    q.write(torch.tensor([1]), *written([1]))
    assert (q.candidate_ids.data_ptr(), q.scores.data_ptr()) == before


def test_dense_is_the_same_q_before_the_temperature() -> None:
    q = DraftSlots(R, K, C, "cpu")
    tokens, ids, scores = written([4, 1])
    tokens[1, 2] = -1
    q.write(torch.tensor([4, 1]), tokens, ids, scores)
    temperature = torch.tensor([0.5, 0.0])
    dense = q.dense(torch.tensor([4, 1]), temperature, V)
    assert dense.shape == (2, K, V)
    expected = torch.full((2, K, V), -torch.inf)
    expected[0].scatter_(1, ids[0], scores[0] * 0.5)
    expected[1, :2].scatter_(1, ids[1, :2], scores[1, :2])
    expected[1, 2, 0] = 0
    assert torch.equal(dense, expected)


def test_bytes_held_for_a_large_server(capsys) -> None:
    """256 sequences, K = 7, V = 248,320: ids of that vocabulary fit, in far less than the 1.66 GiB of a dense q."""
    q = DraftSlots(256, 7, 16, "cpu")
    last = torch.full((1, 7, 16), 248_319)
    q.write(torch.tensor([255]), last[..., 0], last, torch.zeros(last.shape))
    assert torch.equal(q.read(torch.tensor([255]), torch.tensor([6]))[0], last[0, :1])
    with capsys.disabled():
        print(f"\nbytes held for q at 256 sequences, K=7, V=248,320: {q.nbytes:,} ({q.nbytes / 2**20:.2f} MiB)")
    assert q.nbytes < 2**20


def test_cleared_drafts_are_their_own_q() -> None:
    q = DraftSlots(R, K, C, "cpu")
    tokens, ids, scores = written([0, 2])
    q.write(torch.tensor([0, 2]), tokens, ids, scores)
    q.clear(torch.tensor([2]))
    assert (q.candidate_ids[2] == -1).all() and torch.equal(q.candidate_ids[0].long(), ids[0])
