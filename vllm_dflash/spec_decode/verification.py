# SPDX-License-Identifier: Apache-2.0
"""Verification: the target's rows judge the drafts (DFlash 2 announcement, "lossless"; Leviathan et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_dflash import ops
from vllm_dflash.spec_decode.draft_block import DraftBlock


@dataclass(frozen=True)
class VerifyInputs:
    """One step's rows to verify, over B requests with N drafts in all.

    request_ids: B ids. counts: B drafts a request, 0 allowed.
    logits: [M, V]; draft_rows [N] and bonus_rows [B] int64 index its rows; a bonus row of -1 means that the caller
    samples the bonus token itself.
    draft_ids: [N] int64, -1 is "no draft". cu_drafts: [B + 1] int32.
    temperature: [B] fp32, 0 is greedy, 1 where the logits are already scaled. seeds, anchor_positions: [B] int64.
    """

    request_ids: Sequence[str]
    counts: Sequence[int]
    logits: torch.Tensor
    draft_rows: torch.Tensor
    bonus_rows: torch.Tensor
    draft_ids: torch.Tensor
    cu_drafts: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    anchor_positions: torch.Tensor


def verify(inputs: VerifyInputs, block: DraftBlock | None) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (output_ids [B, max(counts) + 1] int32: accepted drafts and one more token, then -1; accepted [B] int32)."""
    draft_ids = inputs.draft_ids
    if block is None:
        block = DraftBlock((), draft_ids.new_empty(0, 0))
    slots = torch.tensor(block.slots(inputs.request_ids, inputs.counts), dtype=torch.int64)
    slots = slots.to(draft_ids.device, non_blocking=True)
    candidate_ids, candidate_logits = block.q(draft_ids, slots)
    return ops.reject_sparse(
        inputs.logits,
        inputs.draft_rows,
        inputs.bonus_rows,
        draft_ids,
        inputs.cu_drafts,
        candidate_ids,
        candidate_logits,
        inputs.temperature,
        inputs.seeds,
        inputs.anchor_positions,
        max(inputs.counts),
    )
