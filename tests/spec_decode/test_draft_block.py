# SPDX-License-Identifier: Apache-2.0
"""DraftBlock: what is found again after the batch was reordered, cut or left out of a step."""

from dataclasses import replace

import torch

from vllm_dflash.spec_decode import DraftBlock

K, C = 3, 2


def block(request_ids: list[str], first: int = 0) -> DraftBlock:
    tokens = torch.arange(first, first + len(request_ids) * K).view(-1, K)
    candidates = torch.stack([tokens, tokens + 100], dim=-1)
    logits = torch.stack([tokens.float() / 10, -tokens.float()], dim=-1)
    return DraftBlock(request_ids, tokens, candidates, logits)


def test_slots_follow_requests_through_a_reordered_and_ragged_batch() -> None:
    assert block(["a", "b", "c"]).slots(["c", "x", "a", "b"], [2, 1, 3, 0]) == [6, 7, -1, 0, 1, 2]


def test_slots_past_the_width_were_never_drafted() -> None:
    assert block(["a"]).slots(["a"], [5]) == [0, 1, 2, -1, -1]


def test_q_is_one_hot_where_the_block_did_not_draw_the_draft() -> None:
    b = block(["a", "b"])
    drafts = torch.tensor([3, 4, 9, 7])
    ids, logits = b.q(drafts, torch.tensor([3, 4, 5, -1]))
    assert ids.tolist() == [[3, 103], [4, 104], [9, -1], [7, -1]]
    assert logits[:2].tolist() == b.candidate_logits.flatten(0, 1)[3:5].tolist()
    assert logits[2:].tolist() == [[0.0, float("-inf")]] * 2


def test_q_of_unsampled_drafts_is_the_draft_itself() -> None:
    b = DraftBlock(["a"], torch.tensor([[5, 6, 7]]))
    ids, logits = b.q(torch.tensor([5, 6]), torch.tensor([0, 1]))
    assert ids.tolist() == [[5], [6]] and logits.tolist() == [[0.0], [0.0]]


def test_a_request_left_out_of_a_step_keeps_its_drafts_and_their_q() -> None:
    waiting = block(["a", "b", "c"]).without({"a"}, alive={"a", "b"})
    assert waiting is not None and list(waiting.request_ids) == ["b"]
    joined = block(["a"], first=50).with_rows(waiting)
    flat = joined.slots(["b", "a"], [2, 1])
    ids, logits = joined.q(torch.tensor([3, 4, 50]), torch.tensor(flat))
    assert ids[:, 0].tolist() == [3, 4, 50]
    assert torch.equal(logits[:2, 0], torch.tensor([0.3, 0.4]))


def test_planned_lengths_follow_their_requests() -> None:
    short = replace(block(["a", "b", "c"]), planned=[1, 2, 0])
    assert [short.planned_for(r) for r in "abc"] == [1, 2, 0]
    waiting = short.without({"a"}, alive={"a", "b", "c"})
    joined = block(["a"]).with_rows(waiting)
    assert [joined.planned_for(r) for r in "abc"] == [K, 2, 0]


def test_nothing_is_kept_of_finished_requests() -> None:
    assert block(["a", "b"]).without({"a"}, alive={"a"}) is None


def test_lengths_end_at_the_first_missing_draft() -> None:
    assert DraftBlock(["a", "b", "c"], torch.tensor([[1, -1, 2], [3, 4, 5], [-1, -1, -1]])).lengths.tolist() == [
        1,
        3,
        0,
    ]
