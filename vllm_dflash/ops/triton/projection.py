# SPDX-License-Identifier: Apache-2.0
"""project_context_kv in Triton, one launch for any number of rows: a program has some rows of one head of K or V of a
layer, so that k-norm and RoPE stay inside it. hidden_norm's weight is folded into the projection, its row scale is
applied to the sums; the head's columns are two tiles, the rotated pairs' first elements and their second."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_dflash.ops.triton.context_kv import as_bytes, finish_key, paged_arguments, pair, store_head
from vllm_dflash.ops.triton.device import of_e4m3

# tl.dot wants 16 at least in each dimension.
WIDTH, LEAST = 64, 16


@triton.jit
def weight_tile(weight, at, k, width, mask, dtype: tl.constexpr, FP8: tl.constexpr):
    """Columns at [half] of the weight, k [WIDTH] -> [WIDTH, half] of the features' type."""
    tile = tl.load(weight + at[None, :] + k[:, None], mask & (k < width)[:, None], 0)
    if FP8:
        return of_e4m3(tile).to(dtype)
    else:
        return tile.to(tl.float32).to(dtype)


@triton.jit
def projection_kernel(
    features, weight, weight_scale, bias, k_norm, positions, cos_sin, keys, values, offsets, slots, rows, width,
    layers, heads, size, rotated, cos_sin_rows, feature_row, weight_row, k_norm_layer, cos_sin_row, eps, value_scale,
    slots_layer, block_size, num_slots, key_block, key_offset, key_head, key_element, value_block, value_offset,
    value_head, value_element, k_inverse, v_inverse, HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    IS_NEOX: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, FP8_WEIGHT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = (tl.program_id(0) % heads).to(tl.int64)
    side = tl.program_id(0) // heads % 2
    layer = (tl.program_id(0) // (2 * heads)).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * size
    here = t < rows
    i = tl.arange(0, HALF)
    inside = i < size // 2
    one, two = pair(i, rotated, IS_NEOX)
    first_column = (column + tl.where(inside, one, 0)) * weight_row
    second_column = (column + tl.where(inside, two, 0)) * weight_row
    first = tl.zeros((ROWS, HALF), tl.float32)
    second = tl.zeros((ROWS, HALF), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, width, WIDTH):
        k = begin + tl.arange(0, WIDTH)
        x = tl.load(features + t[:, None] * feature_row + k[None, :], here[:, None] & (k < width)[None, :], 0.0)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        w = weight_tile(weight, first_column, k, width, inside[None, :], features.dtype.element_ty, FP8_WEIGHT)
        first = tl.dot(x, w, first, input_precision="ieee")
        w = weight_tile(weight, second_column, k, width, inside[None, :], features.dtype.element_ty, FP8_WEIGHT)
        second = tl.dot(x, w, second, input_precision="ieee")
    row_scale = tl.rsqrt(squares / width + eps)[:, None]
    first *= row_scale
    second *= row_scale
    if SCALED:
        first *= tl.load(weight_scale + column + one, inside, 0.0)[None, :]
        second *= tl.load(weight_scale + column + two, inside, 0.0)[None, :]
    if BIASED:
        first += tl.load(bias + column + one, inside, 0.0).to(tl.float32)[None, :]
        second += tl.load(bias + column + two, inside, 0.0).to(tl.float32)[None, :]
    position = tl.load(positions + t, here, -1)
    known = (position >= 0) & (position < cos_sin_rows)
    slot = tl.load(slots + layer * slots_layer + t, here, -1)
    written = known & (slot >= 0) & (slot < num_slots)
    slot = tl.where(written, slot, 0)
    mask = written[:, None] & inside[None, :]
    block = slot // block_size
    offset = slot % block_size
    if side == 0:
        first, second = finish_key(
            first, second, one, two, i, inside, layer, position, known, k_norm, k_norm_layer, eps, cos_sin,
            cos_sin_row, size, rotated,
        )  # fmt: skip
        at = tl.load(offsets + layer) + block * key_block + offset * key_offset + head * key_head
        store_head(keys, at, one, two, first * k_inverse, second * k_inverse, mask, key_element, FP8)
    else:
        scale = value_scale * v_inverse
        at = tl.load(offsets + layers + layer) + block * value_block + offset * value_offset + head * value_head
        store_head(values, at, one, two, first * scale, second * scale, mask, value_element, FP8)


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
    """See vllm_dflash.ops.project_context_kv."""
    rows, width = features.shape
    layers, size = k_norm.shape
    if rows * layers == 0:
        return
    heads = kv_weight.shape[0] // (2 * layers * size)
    tile = LEAST if rows <= LEAST else 64
    projection_kernel[(2 * layers * heads, triton.cdiv(rows, tile))](
        features=features, weight=as_bytes(kv_weight), weight_scale=features if weight_scale is None else weight_scale,
        bias=features if bias is None else bias, k_norm=k_norm, positions=positions, cos_sin=cos_sin, rows=rows,
        width=width, layers=layers, heads=heads, size=size, rotated=cos_sin.shape[1], cos_sin_rows=cos_sin.shape[0],
        feature_row=features.stride(0), weight_row=kv_weight.stride(0), k_norm_layer=k_norm.stride(0),
        cos_sin_row=cos_sin.stride(0), eps=eps, value_scale=1.0 if value_scale is None else value_scale,
        HALF=max(triton.next_power_of_2(size // 2), LEAST), ROWS=tile, WIDTH=WIDTH, IS_NEOX=is_neox,
        SCALED=weight_scale is not None, BIASED=bias is not None,
        FP8_WEIGHT=kv_weight.dtype == torch.float8_e4m3fn,
        **paged_arguments(key_caches, value_caches, slot_mapping, block_size, k_scale, v_scale),
    )  # fmt: skip
