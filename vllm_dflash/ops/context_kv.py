# SPDX-License-Identifier: Apache-2.0
"""Context features into draft K/V (paper arXiv 2602.06036, KV injection): what follows the one GEMM of all
layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_dflash.ops.backend import is_native, is_triton
from vllm_dflash.ops.reference import context_kv as reference


def context_kv_rows(
    kv: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    value_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K = RoPE(RMSNorm(k), position) a head and V = value_scale * v, for caches that only their engine can
    write.

    Args:
        kv: [T, L, 2, nkv, hd] fp32, bf16 or fp16; last stride 1, other strides free.
        k_norm: [L, hd] of kv's type or fp32.
        eps: of the RMSNorm.
        positions: [T] int64; a row whose position is outside [0, P) becomes zeros.
        cos_sin: [P, rot] of any float type, rot <= hd: cosines in the first half, sines in the second.
        is_neox: pairs (i, i + rot/2), else (2i, 2i + 1).
        value_scale: None for 1.

    Returns:
        k and v, each [L, T, nkv, hd] contiguous, of kv's type, rounded once from fp32.

    Raises:
        RuntimeError: a shape, type, device or stride does not fit; the message names the argument.
    """
    if is_native(kv.device.type):
        return torch.ops.vllm_dflash.context_kv_rows(kv, k_norm, eps, positions, cos_sin, is_neox, value_scale)
    if is_triton(kv.device.type):
        from vllm_dflash.ops import triton

        return triton.context_kv_rows(kv, k_norm, eps, positions, cos_sin, is_neox, value_scale)
    return reference.context_kv_rows(kv, k_norm, eps, positions, cos_sin, is_neox, value_scale)


def inject_context_kv(
    kv: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    value_scale: float | None,
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    block_size: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """context_kv_rows written straight into the paged caches of all layers.

    Args:
        kv, k_norm, eps, positions, cos_sin, is_neox, value_scale: as in context_kv_rows.
        key_caches, value_caches: L tensors each, [num_blocks, block_size, nkv, hd], of one type: fp32, bf16, fp16 or
            float8_e4m3fn. Any strides, the same in every layer; on CUDA the last is 1. (vLLM's CPU cache without
            AMX keeps keys as [num_blocks, nkv, hd, block_size]: pass that view, permuted by 0, 3, 1, 2.)
        slot_mapping: [T] or [L, T] int64, slot = block * block_size + offset. Rows with slot -1 (or outside
            the cache), and rows whose position is outside [0, P), write nothing.
        block_size: slots a block.
        k_scale, v_scale: fp8 caches store x / scale, saturated at +-448; other types ignore them.

    Raises:
        RuntimeError: a shape, type, device or stride does not fit; the message names the argument.
    """
    arguments = (
        kv, k_norm, eps, positions, cos_sin, is_neox, value_scale, list(key_caches), list(value_caches),
        slot_mapping, block_size, k_scale, v_scale,
    )  # fmt: skip
    if is_native(kv.device.type):
        torch.ops.vllm_dflash.inject_context_kv(*arguments)
    elif is_triton(kv.device.type):
        from vllm_dflash.ops import triton

        triton.inject_context_kv(*arguments)
    else:
        reference.inject_context_kv(*arguments)
