# SPDX-License-Identifier: Apache-2.0
"""Torch reference of context K/V: k-norm, RoPE and value scale, then the paged write."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FP8_MAX = 448.0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """RoPE on the first 2 * half dimensions of x [T, L, n, hd]; cos and sin [T, half]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = x.clone()
    first, second = (
        (slice(0, half), slice(half, 2 * half)) if is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


def context_kv_wide(
    kv: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    value_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [L, T, nkv, hd] in fp32 (float64 for float64 kv), not yet rounded to the cache's type."""
    wide = torch.promote_types(kv.dtype, torch.float32)
    k, v = kv.to(wide).unbind(2)
    k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * k_norm.to(wide)[:, None]
    known = (positions >= 0) & (positions < cos_sin.shape[0])
    cos, sin = cos_sin[torch.where(known, positions, 0)].to(wide).chunk(2, -1)
    k = rotate(k, cos, sin, is_neox)
    v = v if value_scale is None else v * value_scale
    keep = known[:, None, None, None]
    return torch.where(keep, k, 0.0).transpose(0, 1), torch.where(keep, v, 0.0).transpose(0, 1)


def context_kv_rows(
    kv: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    value_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See vllm_dflash.ops.context_kv_rows."""
    k, v = context_kv_wide(kv, k_norm, eps, positions, cos_sin, is_neox, value_scale)
    return k.to(kv.dtype).contiguous(), v.to(kv.dtype).contiguous()


def to_cache_type(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """x in the cache's type; fp8 e4m3 stores x / scale, saturated at its largest number."""
    return x.div(scale).clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


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
    k_scale: float,
    v_scale: float,
) -> None:
    """See vllm_dflash.ops.inject_context_kv."""
    keys, values = context_kv_wide(kv, k_norm, eps, positions, cos_sin, is_neox, value_scale)
    known = (positions >= 0) & (positions < cos_sin.shape[0])
    slots = slot_mapping.expand(kv.shape[1], -1)
    for layer, (key_cache, value_cache) in enumerate(zip(key_caches, value_caches, strict=True)):
        slot = slots[layer]
        rows = (known & (slot >= 0) & (slot < key_cache.shape[0] * block_size)).nonzero()[:, 0]
        block, offset = slot[rows] // block_size, slot[rows] % block_size
        for cache, x, scale in ((key_cache, keys, k_scale), (value_cache, values, v_scale)):
            stored = to_cache_type(x[layer, rows], cache.dtype, scale)
            if cache.dtype == torch.float8_e4m3fn:
                cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
            cache[block, offset] = stored
