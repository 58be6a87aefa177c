# SPDX-License-Identifier: Apache-2.0
"""Context features into the paged K/V of all draft layers, GEMM included (paper arXiv 2602.06036, KV
injection)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_dflash.ops.backend import is_native, is_triton
from vllm_dflash.ops.context_kv import inject_context_kv

ONE_LAUNCH_ROWS = 16


def fold_hidden_norm(kv_weight: torch.Tensor, hidden_norm: torch.Tensor) -> torch.Tensor:
    """kv_weight [columns, H] * hidden_norm [H], rounded once: the norm's weight needs no pass of its own
    then."""
    return (kv_weight.float() * hidden_norm.float()).to(kv_weight.dtype)


def fits_one_launch(features: torch.Tensor, kv_weight: torch.Tensor, k_norm: torch.Tensor) -> bool:
    """Whether project_context_kv is one CUDA launch: up to 16 rows of bf16 or fp16 features of a width that
    32 divides, heads of 64 or 128, the weight in the features' type, fp8 e4m3 or int8. bf16 needs sm_80."""
    rows, width = features.shape
    return (
        features.is_cuda
        and is_native("cuda")
        and rows <= ONE_LAUNCH_ROWS
        and width % 32 == 0
        and k_norm.shape[1] in (64, 128)
        and kv_weight.dtype in (features.dtype, torch.float8_e4m3fn, torch.int8)
        and features.dtype in (torch.bfloat16, torch.float16)
        and (features.dtype == torch.float16 or torch.cuda.get_device_capability(features.device) >= (8, 0))
    )


def project(
    features: torch.Tensor,
    kv_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    layers: int,
    head_size: int,
) -> torch.Tensor:
    """RMSNorm without weight, then the GEMM: kv [T, L, 2, nkv, hd] of features' type."""
    # Accumulates in fp32 whatever the type, in one kernel on GPUs.
    x = torch.nn.functional.rms_norm(features, features.shape[-1:], None, eps)
    if weight_scale is not None:
        wide = torch.promote_types(features.dtype, torch.float32)
        kv_weight = (kv_weight.to(wide) * weight_scale.to(wide)[:, None]).to(features.dtype)
    heads = kv_weight.shape[0] // (2 * layers * head_size)
    return torch.nn.functional.linear(x, kv_weight, bias).view(x.shape[0], layers, 2, heads, head_size)


def project_context_kv(
    features: torch.Tensor,
    kv_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
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
    """hidden_norm, the K and V projections of all layers, k-norm, RoPE and the paged writes. On CUDA one
    launch where fits_one_launch says so, else the library's GEMM and inject_context_kv. Triton: one launch.

    Args:
        features: [T, H], after fc, before hidden_norm.
        kv_weight: [L * 2 * nkv * hd, H], layer-major, K before V, with hidden_norm's weight folded in
            (fold_hidden_norm): features' type, or float8_e4m3fn or int8 with weight_scale.
        weight_scale: [L * 2 * nkv * hd] fp32 of a quantised weight, else None. Other quantised formats have
            no
            rows to scale: give their dequantised weight.
        bias: [L * 2 * nkv * hd] of features' type, or None.
        k_norm: [L, hd]; eps is hidden_norm's and k_norm's.
        positions, cos_sin, is_neox, value_scale, key_caches, value_caches, slot_mapping, block_size, k_scale,
            v_scale: as in inject_context_kv.

    Raises:
        RuntimeError: a shape, type, device or stride does not fit; the message names the argument.
    """
    arguments = (
        features, kv_weight, weight_scale, bias, k_norm, eps, positions, cos_sin, is_neox, value_scale,
        list(key_caches), list(value_caches), slot_mapping, block_size, k_scale, v_scale,
    )  # fmt: skip
    if is_triton(features.device.type):
        from vllm_dflash.ops import triton

        triton.project_context_kv(*arguments)
        return
    if not fits_one_launch(features, kv_weight, k_norm):
        kv = project(features, kv_weight, weight_scale, bias, eps, *k_norm.shape)
        inject_context_kv(
            kv, k_norm, eps, positions, cos_sin, is_neox, value_scale, key_caches, value_caches, slot_mapping,
            block_size, k_scale, v_scale,
        )  # fmt: skip
        return
    torch.ops.vllm_dflash.project_context_kv(*arguments)
