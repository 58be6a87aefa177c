# SPDX-License-Identifier: Apache-2.0
"""The candidate selector's walk (DFlash 2 announcement): one path through the candidates of every slot."""

from __future__ import annotations

import torch

from vllm_dflash.ops.backend import is_native, is_triton
from vllm_dflash.ops.reference import selector as reference


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
    """S_j(a, b) = logit_j(b) + sum_r predecessor[a, r] * projected_j[r] * successor[b, r], a_0 the anchor; T
    = 0 takes the argmax of S_j(a_{j-1}, .), T > 0 samples softmax(S_j(a_{j-1}, .) / T) over the candidates.

    Args:
        candidate_ids: [B, K, C] int64; ids outside [0, V) count as absent and are never read.
        candidate_logits: [B, K, C] fp32, capped and multiplied already, not over T.
        projected: [B, K, R], hidden_projection of the slots' hidden states, any float type.
        predecessor, successor: [V, R], of projected's type.
        anchors: [B] int64, the last verified token.
        temperature: [B] fp32, 0 for argmax.
        seeds, anchor_positions: [B] int64, the keys of the noise (stream DRAFT, slot j).

    Returns:
        token_ids [B, K] int64: the first of equal maxima at T = 0, the inverse CDF in candidate order at T >
        0. -1 is "no draft": a slot without a finite score, and all slots after it.
        scores [B, K, C] fp32: S_j(a_{j-1}, .), over T where T > 0; what is absent or not finite is -inf.

    Raises:
        RuntimeError: a shape, type, device or stride does not fit; the message names the argument.
    """
    arguments = (
        candidate_ids, candidate_logits, projected, predecessor, successor, anchors, temperature, seeds,
        anchor_positions,
    )  # fmt: skip
    if is_native(candidate_ids.device.type):
        return torch.ops.vllm_dflash.select_path(*arguments)
    if is_triton(candidate_ids.device.type):
        from vllm_dflash.ops import triton

        return triton.select_path(*arguments)
    return reference.select_path(*arguments)
