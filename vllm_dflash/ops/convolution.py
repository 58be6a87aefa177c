# SPDX-License-Identifier: Apache-2.0
"""Grouped dynamic causal depthwise convolution (DFlash 2 announcement): one side a call."""

from __future__ import annotations

import torch

from vllm_dflash.ops.backend import is_native, is_triton
from vllm_dflash.ops.reference import convolution as reference


def grouped_convolution(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, block: int) -> torch.Tensor:
    """out[i, c] = sum over taps t of (base[t, c] + dynamic[i, t, c // (H / G)]) * x[i - t, c]

    Args:
        x: [rows, H] fp32, bf16 or fp16; rows are [request][block]; a last block cut short by padding is allowed.
        dynamic: [rows, Kc, G] of x's type, G a divisor of H; rows and taps may be strided (a side of the
            projection).
        base: [Kc, H] of x's type.
        block: rows a request; taps never cross a multiple of it, rows before a block's start count as 0.

    Returns:
        [rows, H] of x's type, accumulated in fp32.

    Raises:
        RuntimeError: a shape, type, device or stride does not fit; the message names the argument.
    """
    if is_native(x.device.type):
        return torch.ops.vllm_dflash.grouped_convolution(x, dynamic, base, block)
    if is_triton(x.device.type):
        from vllm_dflash.ops import triton

        return triton.grouped_convolution(x, dynamic, base, block)
    return reference.grouped_convolution(x, dynamic, base, block)
