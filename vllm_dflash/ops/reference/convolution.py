# SPDX-License-Identifier: Apache-2.0
"""Torch reference of the grouped dynamic causal depthwise convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def grouped_convolution(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, block: int) -> torch.Tensor:
    """See vllm_dflash.ops.grouped_convolution. Accumulates in fp32, or in float64 for float64 inputs."""
    rows, width = x.shape
    taps, groups = dynamic.shape[1:]
    wide = torch.promote_types(x.dtype, torch.float32)
    tail = -rows % block
    blocks = F.pad(x.to(wide), (0, 0, 0, tail)).view(-1, block, groups, width // groups)
    dynamic = F.pad(dynamic.to(wide), (0, 0, 0, 0, 0, tail))
    out = torch.zeros_like(blocks)
    for tap in range(min(taps, block)):
        weight = base[tap].to(wide).view(groups, -1) + dynamic[:, tap].view(-1, block, groups, 1)
        out[:, tap:] += weight[:, tap:] * blocks[:, : block - tap]
    return out.view(-1, width)[:rows].to(x.dtype)
