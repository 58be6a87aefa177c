# SPDX-License-Identifier: Apache-2.0
"""Torch reference of lossless verification with a sparse q."""

from __future__ import annotations

import torch

from vllm_dflash.ops import noise
from vllm_dflash.ops.reference.sampling import finite_or_absent, inverse_cdf, softmax_or_zero


def target_probabilities(logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """p [B, V] of the given rows of logits; at temperature 0 all mass is on the argmax, a row without a
    finite logit is all zeros."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    x = finite_or_absent(logits[rows.clamp(min=0)].to(wide))
    top = x.amax(-1, keepdim=True)
    centred = torch.where(top > -torch.inf, x - top, -torch.inf)
    scale = torch.where(temperature > 0, temperature, 1.0).to(wide)[:, None]
    argmax = torch.zeros_like(x).scatter_(1, x.argmax(-1, keepdim=True), (top > -torch.inf).to(wide))
    return torch.where(temperature[:, None] > 0, softmax_or_zero(centred / scale), argmax)


def proposal(
    draft: torch.Tensor, candidate_ids: torch.Tensor, candidate_scores: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """q as [B, V]: softmax over the present candidates, or one-hot at a draft that is none of them, or zeros
    where there is no draft."""
    wide = torch.promote_types(candidate_scores.dtype, torch.float32)
    present = (candidate_ids >= 0) & (candidate_ids < vocabulary)
    score = finite_or_absent(candidate_scores.to(wide)).masked_fill(~present, -torch.inf)
    sparse = softmax_or_zero(score)
    real = (draft >= 0) & (draft < vocabulary)
    sampled = (sparse * (candidate_ids == draft[:, None])).sum(-1) > 0
    ids = torch.where(sparse > 0, candidate_ids, 0)
    q = sparse.new_zeros(draft.shape[0], vocabulary).scatter_add_(1, ids, sparse)
    one_hot = torch.zeros_like(q).scatter_(1, draft.clamp(0, vocabulary - 1)[:, None], 1.0)
    return torch.where((real & sampled)[:, None], q, torch.where(real[:, None], one_hot, 0.0))


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Weights [B, V] of the token after a rejection: max(p - q, 0), or p where that sums to 0."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


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
    """See vllm_dflash.ops.reject_sparse. Dense and in fp32; float64 logits and scores make it the oracle.

    Greedy needs no code of its own: with all of p on the argmax, acceptance and the residual reduce to it.
    """
    batch, vocabulary = cu_drafts.shape[0] - 1, logits.shape[1]
    device = logits.device
    out = torch.full((batch, max_drafts + 1), -1, dtype=torch.int32, device=device)
    accepted = torch.zeros(batch, dtype=torch.int32, device=device)
    counts = (cu_drafts[1:] - cu_drafts[:-1]).clamp(max=max_drafts)
    going = torch.ones(batch, dtype=torch.bool, device=device)
    for slot in range(1, max_drafts + 1 if draft_ids.numel() else 1):
        judged = going & (slot <= counts)
        n = (cu_drafts[:-1].to(torch.int64) + slot - 1).clamp(max=draft_ids.numel() - 1)
        draft = draft_ids[n]
        index = draft.clamp(0, vocabulary - 1)[:, None]
        p = target_probabilities(logits, draft_rows[n], temperature)
        q = proposal(draft, candidate_ids[n], candidate_scores[n], vocabulary)
        u = noise.uniform(seeds, anchor_positions, slot, noise.ACCEPT)
        real = (draft >= 0) & (draft < vocabulary)
        accept = judged & real & (u * q.gather(1, index)[:, 0] < p.gather(1, index)[:, 0])
        recovered = inverse_cdf(residual(p, q), noise.uniform(seeds, anchor_positions, slot, noise.RECOVER))
        token = torch.where(accept, draft, recovered).to(torch.int32)
        out[:, slot - 1] = torch.where(judged, token, out[:, slot - 1])
        accepted += accept
        going &= ~judged | accept
    slot_after = counts.to(torch.int64) + 1
    wanted = going & (bonus_rows >= 0)
    p = (
        target_probabilities(logits, bonus_rows, temperature)
        if logits.shape[0]
        else logits.new_zeros(batch, vocabulary)
    )
    bonus = inverse_cdf(p, noise.uniform(seeds, anchor_positions, slot_after, noise.BONUS)).to(torch.int32)
    column = counts.to(torch.int64)[:, None]
    out.scatter_(1, column, torch.where(wanted, bonus, out.gather(1, column)[:, 0])[:, None])
    return out, accepted
