# SPDX-License-Identifier: Apache-2.0
"""Verification from device tensors alone: no request ids, and no count of a request's drafts on the host."""

from dataclasses import dataclass

import torch

from vllm_dflash import ops
from vllm_dflash.spec_decode.draft_slots import DraftSlots


@dataclass(frozen=True)
class VerifyRows:
    """One step's M rows over B requests: a request's anchor row, then one row a draft; its last row gives the bonus.

    logits: [M, V]. token_ids: [M], the token that stood at each row: the anchor, then the drafts, -1 for "no draft".
    positions: [M]. cu_rows: [B + 1] int32, request b owns rows cu_rows[b] to cu_rows[b + 1].
    slots: [B] int64, where `DraftSlots` keeps each request's q.
    temperature: [B] fp32, 0 is greedy, 1 where the logits are already scaled. seeds: [B] int64.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    cu_rows: torch.Tensor
    slots: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


def verify_rows(rows: VerifyRows, q: DraftSlots | None, drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (output_ids [B, drafts + 1] int32: accepted drafts and one more token, then -1; accepted [B] int32).

    drafts: the most a request. q None: the drafts were not sampled, each is its own q.
    """
    device = rows.logits.device
    requests, last_row = rows.cu_rows.shape[0] - 1, rows.logits.shape[0] - 1
    cu_drafts = rows.cu_rows - torch.arange(requests + 1, dtype=torch.int32, device=device)
    draft = torch.arange(last_row + 1 - requests, dtype=torch.int32, device=device)
    # An engine that trims drafts on the device may hand over more rows than cu_rows counts; those are not judged.
    request_of = torch.searchsorted(cu_drafts[1:], draft, right=True).clamp(max=requests - 1)
    row = (draft + request_of).clamp(max=last_row)
    draft_ids = rows.token_ids[(row + 1).clamp(max=last_row)].to(torch.int64)
    if q is None:
        candidate_ids, scores = draft_ids.unsqueeze(1), torch.zeros(draft.shape[0], 1, device=device)
    else:
        column = (draft - cu_drafts[request_of]).clamp(0, drafts - 1).to(torch.int64)
        candidate_ids, scores = q.read(rows.slots[request_of], column)
    return ops.reject_sparse(
        rows.logits,
        row,
        (rows.cu_rows[1:] - 1).to(torch.int64),
        draft_ids,
        cu_drafts,
        candidate_ids,
        scores,
        rows.temperature,
        rows.seeds,
        rows.positions[rows.cu_rows[:-1]],
        drafts,
    )
