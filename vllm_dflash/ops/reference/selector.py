# SPDX-License-Identifier: Apache-2.0
"""Torch reference of the candidate selector's walk."""

from __future__ import annotations

import torch

from vllm_dflash.ops import noise
from vllm_dflash.ops.reference.sampling import inverse_cdf, softmax_or_zero


def select_path(
    candidate_ids: torch.Tensor,
    candidate_logits: torch.Tensor,
    projected: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    anchors: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    anchor_positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See vllm_dflash.ops.select_path. Sums in fp32, or in float64 for a float64 codebook."""
    batch, slots, _ = candidate_ids.shape
    vocabulary = predecessor.shape[0]
    wide = torch.promote_types(predecessor.dtype, torch.float32)
    tokens = torch.full((batch, slots), -1, dtype=torch.int64, device=candidate_ids.device)
    scores = torch.full(candidate_ids.shape, -torch.inf, dtype=wide, device=candidate_ids.device)
    present = (candidate_ids >= 0) & (candidate_ids < vocabulary)
    scale = torch.where(temperature > 0, temperature, 1.0).to(wide)[:, None]
    last = anchors
    for slot in range(slots):
        alive = (last >= 0) & (last < vocabulary)
        ids = candidate_ids[:, slot].clamp(0, vocabulary - 1)
        mixed = predecessor[last.clamp(0, vocabulary - 1)].to(wide) * projected[:, slot].to(wide)
        transition = (successor[ids].to(wide) * mixed[:, None]).sum(-1)
        score = (candidate_logits[:, slot].to(wide) + transition) / scale
        usable = present[:, slot] & alive[:, None] & score.isfinite()
        score = score.masked_fill(~usable, -torch.inf)
        u = noise.uniform(seeds, anchor_positions, slot + 1, noise.DRAFT)
        choice = torch.where(temperature > 0, inverse_cdf(softmax_or_zero(score), u), score.argmax(-1))
        choice = torch.where(usable.any(-1), choice, -1)
        last = torch.where(choice >= 0, ids.gather(1, choice.clamp(min=0)[:, None])[:, 0], -1)
        tokens[:, slot], scores[:, slot] = last, score
    return tokens, scores
