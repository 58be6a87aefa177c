# SPDX-License-Identifier: Apache-2.0
"""Lossless verification of a ragged batch of drafts with a sparse q (DFlash 2 announcement; Leviathan et al.
2023)."""

from __future__ import annotations

import torch

from vllm_dflash.ops.backend import is_native, is_triton
from vllm_dflash.ops.reference import rejection as reference


def reject_sparse(
    logits: torch.Tensor,
    draft_rows: torch.Tensor,
    bonus_rows: torch.Tensor,
    draft_ids: torch.Tensor,
    cu_drafts: torch.Tensor,
    candidate_ids: torch.Tensor,
    candidate_scores: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    anchor_positions: torch.Tensor,
    max_drafts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts draft x of slot j iff u * q(x) < p(x), u from stream ACCEPT; at the first rejection samples
    from max(p - q, 0) renormalised (p itself where that sums to 0), stream RECOVER; after the last
    acceptance samples the bonus from p, stream BONUS, slot n + 1. Greedy: accepts while the draft is the
    argmax, then emits the argmax.

    Args:
        logits: [M, V] fp32, bf16 or fp16, after the engine's processors; last stride 1. NaN counts as -inf,
            +inf as the largest finite number.
        draft_rows: [N] int64, the row of logits that judges draft n.
        bonus_rows: [B] int64, the row of the bonus token; -1: the caller supplies it.
        draft_ids: [N] int64; an id outside [0, V), such as -1, is "no draft": rejected, and recovered from p
            itself.
        cu_drafts: [B + 1] int32 from 0; request b owns drafts cu_drafts[b] to cu_drafts[b + 1], slots 1 to n.
        candidate_ids: [N, C] int64, distinct a row; ids outside [0, V) are absent.
        candidate_scores: [N, C] fp32, unnormalised log q, already over T; q is their softmax over the
            present ones. A draft that is no candidate of finite score counts as certain (one-hot q), as a
            greedy proposal is.
        temperature: [B] fp32; the logits are divided by it, 0 is greedy; 1 where they are already scaled.
        seeds, anchor_positions: [B] int64, the keys of the noise.
        max_drafts: at least the most drafts a request.

    Returns:
        output_ids [B, max_drafts + 1] int32: accepted drafts, then the recovered or bonus token, then -1. A
        request without drafts and with bonus row -1 is all -1; where the token's row has no finite logit it
        is -1 too.
        accepted [B] int32: how many drafts were accepted.

    Raises:
        RuntimeError: a shape, type, device or stride does not fit; the message names the argument.
    """
    arguments = (
        logits, draft_rows, bonus_rows, draft_ids, cu_drafts, candidate_ids, candidate_scores, temperature,
        seeds, anchor_positions, max_drafts,
    )  # fmt: skip
    if is_native(logits.device.type):
        return torch.ops.vllm_dflash.reject_sparse(*arguments)
    if is_triton(logits.device.type):
        from vllm_dflash.ops import triton

        return triton.reject_sparse(*arguments)
    return reference.reject_sparse(*arguments)
