# SPDX-License-Identifier: Apache-2.0
"""Context K/V in Triton: k-norm, RoPE, value scale, conversion and scatter. A program has some rows of a head of a
layer, as two tiles: the rotated pairs' first elements and their second."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_dflash.ops.triton.device import e4m3_of, narrow

ROWS = 16


@triton.jit
def pair(i, rotated, IS_NEOX: tl.constexpr):
    """Elements of a head that pair i has: i < rotated / 2 turns, the others stay."""
    if IS_NEOX:
        turned = i
        partner = i + rotated // 2
    else:
        turned = 2 * i
        partner = 2 * i + 1
    turns = i < rotated // 2
    return tl.where(turns, turned, 2 * i), tl.where(turns, partner, 2 * i + 1)


@triton.jit
def finish_key(
    first, second, one, two, i, inside, layer, position, known, k_norm, k_norm_layer, eps, cos_sin, cos_sin_row, size,
    rotated,
):  # fmt: skip
    """RMSNorm and rotation of key heads, tiles [rows, half]; one, two [half]: the elements that they hold."""
    squares = tl.sum(first * first + second * second, 1)
    inverse = tl.rsqrt(squares / size + eps)[:, None]
    x = first * inverse * tl.load(k_norm + layer * k_norm_layer + one, inside, 0.0).to(tl.float32)[None, :]
    y = second * inverse * tl.load(k_norm + layer * k_norm_layer + two, inside, 0.0).to(tl.float32)[None, :]
    turns = known[:, None] & (i < rotated // 2)[None, :]
    angle = tl.where(known, position, 0)[:, None] * cos_sin_row + i[None, :]
    cos = tl.load(cos_sin + angle, turns, 1.0).to(tl.float32)
    sin = tl.load(cos_sin + angle + rotated // 2, turns, 0.0).to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def store_head(cache, at, one, two, first, second, mask, element, FP8: tl.constexpr):
    """Tiles into a cache at offsets [rows] of its heads; fp8 caches are given as bytes."""
    first_at = cache + at[:, None] + one[None, :] * element
    second_at = cache + at[:, None] + two[None, :] * element
    if FP8:
        tl.store(first_at, e4m3_of(first), mask)
        tl.store(second_at, e4m3_of(second), mask)
    else:
        tl.store(first_at, narrow(first, cache.dtype.element_ty), mask)
        tl.store(second_at, narrow(second, cache.dtype.element_ty), mask)


@triton.jit
def context_kernel(
    kv, k_norm, positions, cos_sin, keys, values, offsets, slots, rows, layers, heads, size, rotated, cos_sin_rows,
    kv_row, kv_layer, kv_side, kv_head, k_norm_layer, cos_sin_row, eps, value_scale, slots_layer, block_size,
    num_slots, key_block, key_offset, key_head, key_element, value_block, value_offset, value_head, value_element,
    k_inverse, v_inverse, HALF: tl.constexpr, ROWS: tl.constexpr, IS_NEOX: tl.constexpr, PAGED: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    layer = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    here = t < rows
    position = tl.load(positions + t, here, -1)
    known = (position >= 0) & (position < cos_sin_rows)
    if PAGED:
        slot = tl.load(slots + layer * slots_layer + t, here, -1)
        written = known & (slot >= 0) & (slot < num_slots)
        slot = tl.where(written, slot, 0)
    else:
        slot = t
        written = here
    i = tl.arange(0, HALF)
    inside = i < size // 2
    one, two = pair(i, rotated, IS_NEOX)
    mask = written[:, None] & inside[None, :]
    source = kv + t[:, None] * kv_row + layer * kv_layer + head * kv_head
    loaded = mask & known[:, None]
    first = tl.load(source + one[None, :], loaded, 0.0).to(tl.float32)
    second = tl.load(source + two[None, :], loaded, 0.0).to(tl.float32)
    first, second = finish_key(
        first, second, one, two, i, inside, layer, position, known, k_norm, k_norm_layer, eps, cos_sin, cos_sin_row,
        size, rotated,
    )  # fmt: skip
    block = slot // block_size
    offset = slot % block_size
    at = tl.load(offsets + layer) + block * key_block + offset * key_offset + head * key_head
    store_head(keys, at, one, two, first * k_inverse, second * k_inverse, mask, key_element, FP8)
    first = tl.load(source + kv_side + one[None, :], loaded, 0.0).to(tl.float32)
    second = tl.load(source + kv_side + two[None, :], loaded, 0.0).to(tl.float32)
    at = tl.load(offsets + layers + layer) + block * value_block + offset * value_offset + head * value_head
    scale = value_scale * v_inverse
    store_head(values, at, one, two, first * scale, second * scale, mask, value_element, FP8)


@functools.lru_cache(maxsize=64)
def _table(pointers: tuple[int, ...], element: int, device: torch.device) -> torch.Tensor:
    layers = len(pointers) // 2
    distances = [(p - pointers[n // layers * layers]) // element for n, p in enumerate(pointers)]
    return torch.tensor(distances, dtype=torch.int64, device=device)


def layer_offsets(key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """How many elements each layer's keys are after the first layer's, then the same of the values: [2 * L] int64.
    Made once for these caches, so that a captured graph finds it."""
    pointers = tuple(cache.data_ptr() for cache in (*key_caches, *value_caches))
    return _table(pointers, key_caches[0].element_size(), key_caches[0].device)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: not every GPU's compiler knows the type."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def paged_arguments(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    block_size: int,
    k_scale: float,
    v_scale: float,
) -> dict[str, Any]:
    """Where the kernels write: paged caches of all layers, which must have the same shape and strides."""
    key, value = key_caches[0], value_caches[0]
    for cache, like in (*((k, key) for k in key_caches), *((v, value) for v in value_caches)):
        if cache.shape != like.shape or cache.stride() != like.stride() or cache.dtype != key.dtype:
            raise RuntimeError(
                "inject_context_kv: caches must have the same shape, strides and type in every layer, are "
                f"{tuple(like.shape)} and {tuple(cache.shape)}; call once for each layout with its layers"
            )
    fp8 = key.dtype == torch.float8_e4m3fn
    return {
        "keys": as_bytes(key),
        "values": as_bytes(value),
        "offsets": layer_offsets(key_caches, value_caches),
        "slots": slot_mapping,
        "slots_layer": slot_mapping.stride(0) if slot_mapping.dim() == 2 else 0,
        "block_size": block_size,
        "num_slots": key.shape[0] * block_size,
        "k_inverse": 1.0 / k_scale if fp8 else 1.0,
        "v_inverse": 1.0 / v_scale if fp8 else 1.0,
        "FP8": fp8,
        **dict(zip(("key_block", "key_offset", "key_head", "key_element"), key.stride(), strict=True)),
        **dict(zip(("value_block", "value_offset", "value_head", "value_element"), value.stride(), strict=True)),
    }


def _launch(
    kv: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox: bool,
    value_scale: float | None,
    paged: bool,
    target: dict[str, Any],
) -> None:
    rows, layers, _, heads, size = kv.shape
    if rows * layers * heads == 0:
        return
    context_kernel[(triton.cdiv(rows, ROWS), layers * heads)](
        kv=kv, k_norm=k_norm, positions=positions, cos_sin=cos_sin, rows=rows, layers=layers, heads=heads, size=size,
        rotated=cos_sin.shape[1], cos_sin_rows=cos_sin.shape[0], kv_row=kv.stride(0), kv_layer=kv.stride(1),
        kv_side=kv.stride(2), kv_head=kv.stride(3), k_norm_layer=k_norm.stride(0), cos_sin_row=cos_sin.stride(0),
        eps=eps, value_scale=1.0 if value_scale is None else value_scale,
        HALF=max(triton.next_power_of_2(size // 2), 1), ROWS=ROWS, IS_NEOX=is_neox, PAGED=paged, **target,
    )  # fmt: skip


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
    rows, layers, _, heads, size = kv.shape
    keys, values = (kv.new_empty((layers, rows, heads, size)) for _ in range(2))
    target = {
        "keys": keys, "values": values, "offsets": layer_offsets(list(keys), list(values)) if layers else positions,
        "slots": positions, "slots_layer": 0, "block_size": 1, "num_slots": rows, "k_inverse": 1.0, "v_inverse": 1.0,
        "FP8": False, "key_block": heads * size, "key_offset": 0, "key_head": size, "key_element": 1,
        "value_block": heads * size, "value_offset": 0, "value_head": size, "value_element": 1,
    }  # fmt: skip
    _launch(kv, k_norm, eps, positions, cos_sin, is_neox, value_scale, False, target)
    return keys, values


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
    """See vllm_dflash.ops.inject_context_kv."""
    if len(key_caches) == 0:
        return
    target = paged_arguments(key_caches, value_caches, slot_mapping, block_size, k_scale, v_scale)
    _launch(kv, k_norm, eps, positions, cos_sin, is_neox, value_scale, True, target)
