# SPDX-License-Identifier: Apache-2.0
"""Pieces that the sampling references share."""

from __future__ import annotations

import torch


def finite_or_absent(x: torch.Tensor) -> torch.Tensor:
    """Logits or scores [..., n] with NaN as -inf (absent) and +inf as the largest finite number."""
    return torch.nan_to_num(x, nan=-torch.inf, posinf=torch.finfo(x.dtype).max, neginf=-torch.inf)


def softmax_or_zero(x: torch.Tensor) -> torch.Tensor:
    """softmax over the last dimension; a row without a finite entry becomes zeros instead of NaN."""
    top = x.amax(-1, keepdim=True)
    weights = torch.where(top > -torch.inf, (x - top).exp(), 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def inverse_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Index of the first running sum above u * total. weights [B, n] >= 0, u [B] float64 in (0, 1) -> [B]
    int64.

    An entry of weight 0 is never returned; a row of zeros gives -1.
    """
    if weights.shape[-1] == 0:
        return torch.full(weights.shape[:1], -1, dtype=torch.int64, device=weights.device)
    running = weights.cumsum(-1, dtype=torch.float64)
    total = running[:, -1:]
    # u * total can round up to the total; the last entry that raised the sum then stands for it.
    index = torch.minimum((running <= u[:, None] * total).sum(-1), (running < total).sum(-1))
    return torch.where(total[:, 0] > 0, index, -1)
