# SPDX-License-Identifier: Apache-2.0
"""Attention of a draft block over the paged K/V of its sequence: causal or not, windowed or not. A program has the rows
of a request that share a head of K and V, and walks over the keys that any of them sees (softmax in one pass)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dflash.ops.triton.device import narrow

KEYS, MOST_ROWS = 64, 64


@triton.jit
def attention_kernel(
    query, keys, values, out, block_table, seq_lens, starts, sinks, scale, group, size, block_size, window, query_row,
    query_head, out_row, out_head, key_block, key_offset, key_head, value_block, value_offset, value_head, table_row,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    start = tl.load(starts + request).to(tl.int64)
    count = tl.load(starts + request + 1).to(tl.int64) - start
    first_row = tl.program_id(2) * ROWS
    if first_row < count * group:
        length = tl.load(seq_lens + request).to(tl.int64)
        row = first_row + tl.arange(0, ROWS)
        here = row < count * group
        head = kv_head * group + row % group
        position = length - count + row // group
        d = tl.arange(0, SIZE)
        inside = d < size
        at = (start + row // group) * query_row + head * query_head
        q = tl.load(query + at[:, None] + d[None, :], here[:, None] & inside[None, :], 0.0)
        total = tl.zeros((ROWS, SIZE), tl.float32)
        if SINKS:
            top = tl.load(sinks + head, here, 0.0).to(tl.float32)
            mass = tl.zeros((ROWS,), tl.float32) + 1.0
        else:
            top = tl.zeros((ROWS,), tl.float32) - 1e30
            mass = tl.zeros((ROWS,), tl.float32)
        begin = length * 0
        end = length
        if WINDOWED:
            begin = tl.maximum(length - count + first_row // group - window + 1, 0) // KEYS * KEYS
        if CAUSAL:
            end = tl.minimum(length - count + (first_row + ROWS - 1) // group + 1, length)
        for n in range(begin, end, KEYS):
            at_key = n + tl.arange(0, KEYS)
            there = at_key < length
            block = tl.load(block_table + request * table_row + at_key // block_size, there, 0).to(tl.int64)
            offset = at_key % block_size
            k_at = block * key_block + offset * key_offset + kv_head * key_head
            k = tl.load(keys + k_at[None, :] + d[:, None], there[None, :] & inside[:, None], 0.0)
            s = tl.dot(q, k, input_precision="ieee") * scale
            distance = position[:, None] - at_key[None, :]
            seen = there[None, :] & here[:, None]
            if CAUSAL:
                seen = seen & (distance >= 0)
            if WINDOWED:
                seen = seen & (distance < window) & (distance > -window)
            s = tl.where(seen, s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.where(seen, tl.exp(s - higher[:, None]), 0.0)
            rescale = tl.exp(top - higher)
            mass = mass * rescale + tl.sum(p, 1)
            v_at = block * value_block + offset * value_offset + kv_head * value_head
            v = tl.load(values + v_at[:, None] + d[None, :], there[:, None] & inside[None, :], 0.0)
            p = narrow(p, values.dtype.element_ty)
            total = total * rescale[:, None] + tl.dot(p, v, input_precision="ieee")
            top = higher
        total = total / tl.where(mass > 0, mass, 1.0)[:, None]
        at = (start + row // group) * out_row + head * out_head
        mask = here[:, None] & inside[None, :]
        tl.store(out + at[:, None] + d[None, :], narrow(total, out.dtype.element_ty), mask)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    max_rows: int,
    sinks: torch.Tensor | None = None,
) -> None:
    """softmax(q . K * scale) V of each request's rows over its sequence, whose last rows they are.

    Args:
        query, out: [T, nh, hd], last stride 1; rows past starts[-1] are padding: not read, not written.
        keys, values: [num_blocks, block_size, nkv, hd] of query's type, last stride 1; nkv divides nh.
        block_table: [R, blocks] int32. seq_lens: [R] int32, a request's rows included. starts: [R + 1] int32.
        causal: a row sees itself and what is before it; else all of the sequence.
        window: a row sees keys fewer than this many positions away, on both sides where not causal.
        max_rows: no request has more rows.
        sinks: [nh], a logit a head that takes part in the softmax and has no value; or None.
    """
    group = query.shape[1] // keys.shape[2]
    rows = min(max(16, triton.next_power_of_2(max(max_rows * group, 1))), MOST_ROWS)
    requests = seq_lens.shape[0]
    if requests == 0 or max_rows == 0:
        return
    attention_kernel[(requests, keys.shape[2], triton.cdiv(max_rows * group, rows))](
        query, keys, values, out, block_table, seq_lens, starts, query if sinks is None else sinks, scale, group,
        query.shape[2], keys.shape[1], window or 0, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        block_table.stride(0), causal, window is not None, sinks is not None, rows, KEYS,
        max(16, triton.next_power_of_2(query.shape[2])),
    )  # fmt: skip


@triton.jit
def write_kernel(
    rows, cache, slots, row_stride, head_stride, heads, size, block_size, block_stride, offset_stride, cache_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        head = tl.arange(0, HEADS)[:, None]
        d = tl.arange(0, SIZE)[None, :]
        mask = (head < heads) & (d < size)
        x = tl.load(rows + row * row_stride + head * head_stride + d, mask)
        at = slot // block_size * block_stride + slot % block_size * offset_stride
        tl.store(cache + at + head * cache_head + d, x, mask)


def write_rows(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """rows [>= T, nkv, hd] into cache [num_blocks, block_size, nkv, hd] of the same type at slots [T]; -1 writes
    nothing."""
    if slots.shape[0] == 0:
        return
    _, block_size, heads, size = cache.shape
    write_kernel[(slots.shape[0],)](
        rows, cache, slots, rows.stride(0), rows.stride(1), heads, size, block_size, cache.stride(0), cache.stride(1),
        cache.stride(2), triton.next_power_of_2(heads), triton.next_power_of_2(size),
    )  # fmt: skip
