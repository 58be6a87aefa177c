# SPDX-License-Identifier: Apache-2.0
"""Grouped dynamic causal depthwise convolution in Triton: a program has some channels of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dflash.ops.triton.device import narrow

CHANNELS = 512


@triton.jit
def convolution_kernel(
    x, dynamic, base, out, width, taps, group, block, x_row, dynamic_row, dynamic_tap, base_tap, CHANNELS: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < width
    total = tl.zeros((CHANNELS,), tl.float32)
    for tap in range(tl.minimum(row % block + 1, taps)):
        own = tl.load(dynamic + row * dynamic_row + tap * dynamic_tap + c // group, inside, 0.0).to(tl.float32)
        weight = tl.load(base + tap * base_tap + c, inside, 0.0).to(tl.float32)
        value = tl.load(x + (row - tap) * x_row + c, inside, 0.0).to(tl.float32)
        total += (weight + own) * value
    tl.store(out + row * width + c, narrow(total, out.dtype.element_ty), inside)


@torch.library.custom_op("vllm_dflash_triton::grouped_convolution", mutates_args=())
def grouped_convolution(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, block: int) -> torch.Tensor:
    """See vllm_dflash.ops.grouped_convolution."""
    rows, width = x.shape
    _, taps, groups = dynamic.shape
    out = x.new_empty((rows, width))
    # Rows are the grid's second dimension, which has 65,535 at most; a part begins with a block.
    step = 65535 // block * block
    for first in range(0, rows if width else 0, step):
        part = slice(first, min(first + step, rows))
        convolution_kernel[(triton.cdiv(width, CHANNELS), part.stop - first)](
            x[part], dynamic[part], base, out[part], width, taps, width // groups, block,
            x.stride(0), dynamic.stride(0), dynamic.stride(1), base.stride(0), CHANNELS,
        )  # fmt: skip
    return out


@grouped_convolution.register_fake
def _(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, block: int) -> torch.Tensor:
    return x.new_empty(x.shape)
