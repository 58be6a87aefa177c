# SPDX-License-Identifier: Apache-2.0
"""Where an attention backend keeps K and V in its paged cache: found by asking it to write, not by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Views = tuple[torch.Tensor, torch.Tensor]
"""key and value caches as [num_blocks, block_size, nkv, hd] views of one layer's cache."""

PROBED_BLOCKS = 2


def _rows_of_keys_and_values(cache: torch.Tensor, head_size: int) -> Views:
    """[blocks, nkv, block_size, 2 * hd]: the GPU backends of 0.32 and 0.33."""
    keys, values = cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values


def _halves_with_transposed_keys(cache: torch.Tensor, head_size: int) -> Views:
    """[blocks, nkv, keys then values], a head's keys as [hd, block_size]: the CPU backend without AMX."""
    blocks, heads, block_size, _ = cache.shape
    keys, values = cache.view(blocks, heads, 2 * block_size, head_size).chunk(2, dim=2)
    keys = keys.as_strided(
        (blocks, block_size, heads, head_size), (keys.stride(0), 1, keys.stride(1), block_size), keys.storage_offset()
    )
    return keys, values.transpose(1, 2)


LAYOUTS: tuple[Callable[[torch.Tensor, int], Views], ...] = (_rows_of_keys_and_values, _halves_with_transposed_keys)


def find_views(attn: Any) -> Views | None:
    """The views of an attention layer's bound cache (vLLM's `Attention`), or None if no known layout is its own.

    Writes some rows into a copy of two blocks by the backend's own call, and takes the layout in which they are found
    again bit for bit. Allocates and synchronises: call it once, before anything is captured.
    """
    cache = attn.kv_cache
    if cache.dim() != 4 or cache.shape[0] < PROBED_BLOCKS or cache.dtype not in _WRITABLE:
        return None
    block_size = cache.shape[2]
    heads, head_size = attn.num_kv_heads, attn.head_size
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, block_size, heads, head_size, generator=generator).to(cache.device, _row_type(attn, cache))
    # The second half of the first block and the first of the second: a slot's block and its place both matter.
    slots = torch.arange(block_size // 2, block_size // 2 + block_size, device=cache.device)
    scratch = torch.empty_strided(
        (PROBED_BLOCKS, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device
    ).zero_()
    try:
        attn.impl.do_kv_cache_update(attn, rows[0], rows[1], scratch, slots)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    for layout in LAYOUTS:
        try:
            found = layout(_typed(scratch), head_size)
            bound = layout(_typed(cache), head_size)
        except RuntimeError:
            continue
        block, place = slots // block_size, slots % block_size
        written = [view[block, place] for view in found]
        if all(_same(w, r, scale) for w, r, scale in zip(written, rows, _scales(attn), strict=True)):
            return bound
    return None


# fp8 caches are kept as bytes; which fp8 it is shows when the rows are found again, or not.
_WRITABLE = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)


def _typed(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache


def _row_type(attn: Any, cache: torch.Tensor) -> torch.dtype:
    """Rows come in the model's type; a cache that is not quantised has the same."""
    return cache.dtype if cache.dtype not in (torch.uint8, torch.float8_e4m3fn) else attn.dtype


def _scales(attn: Any) -> tuple[float, float]:
    return attn._k_scale_float, attn._v_scale_float


def _same(written: torch.Tensor, rows: torch.Tensor, scale: float) -> bool:
    if written.dtype == torch.float8_e4m3fn:
        expected = rows.float().div(scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return torch.equal(written.view(torch.uint8), expected.view(torch.uint8))
    return torch.equal(written, rows.to(written.dtype))
