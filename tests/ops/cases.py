# SPDX-License-Identifier: Apache-2.0
"""Inputs of the operations' tests: random batches of any shape, ragged, strided, with the odd rows that
break code."""

from __future__ import annotations

from typing import Any

import torch

Arguments = dict[str, Any]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=rng).to(dtype)


def integers(rng: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=rng)


def distinct(rng: torch.Generator, vocabulary: int, *shape: int) -> torch.Tensor:
    """Random ids, distinct over the last dimension."""
    keys = torch.rand(*shape[:-1], vocabulary, generator=rng)
    return keys.topk(shape[-1]).indices


def seeds(rng: torch.Generator, batch: int) -> torch.Tensor:
    return integers(rng, -(1 << 62), 1 << 62, batch)


def convolution(seed: int, blocks: int, block: int, groups: int, size: int, taps: int, dtype: torch.dtype) -> Arguments:
    rng = generator(seed)
    rows, width = blocks * block, groups * size
    both_sides = normal(rng, rows, 2, taps, groups, dtype=dtype)
    return {
        "x": normal(rng, rows, width, dtype=dtype),
        "dynamic": both_sides[:, seed % 2],
        "base": normal(rng, taps, width, dtype=dtype),
        "block": block,
    }


def path(
    seed: int, batch: int, slots: int, candidates: int, rank: int, vocabulary: int, dtype: torch.dtype
) -> Arguments:
    rng = generator(seed)
    temperature = torch.where(torch.rand(batch, generator=rng) < 0.4, 0.0, 0.3 + torch.rand(batch, generator=rng))
    return {
        "candidate_ids": distinct(rng, vocabulary, batch, slots, candidates),
        "candidate_logits": normal(rng, batch, slots, candidates) * 2,
        "projected": normal(rng, batch, slots, rank, dtype=dtype),
        "predecessor": normal(rng, vocabulary, rank, dtype=dtype) / rank**0.5,
        "successor": normal(rng, vocabulary, rank, dtype=dtype),
        "anchors": integers(rng, 0, vocabulary, batch),
        "temperature": temperature,
        "seeds": seeds(rng, batch),
        "anchor_positions": integers(rng, 0, 1 << 20, batch),
    }


def rejection(
    seed: int,
    counts: list[int],
    vocabulary: int,
    candidates: int,
    dtype: torch.dtype,
    max_drafts: int | None = None,
) -> Arguments:
    """A ragged batch: q near p so that acceptance is neither rare nor certain, some greedy requests, some
    drafts -1, some rows of logits with -inf, some requests without a bonus row."""
    rng = generator(seed)
    batch, drafts = len(counts), sum(counts)
    rows = drafts + batch
    order = torch.randperm(rows, generator=rng)
    logits = (normal(rng, rows, vocabulary) * 2).to(dtype)
    logits[torch.rand(rows, vocabulary, generator=rng) < 0.2] = -torch.inf
    draft_rows, bonus_rows = order[:drafts], order[drafts:].clone()
    temperature = torch.where(torch.rand(batch, generator=rng) < 0.3, 0.0, 0.4 + torch.rand(batch, generator=rng))
    owner = torch.arange(batch).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    scaled = logits[draft_rows].float() / torch.where(temperature > 0, temperature, 1.0)[owner, None]
    noisy = (scaled + normal(rng, drafts, vocabulary) * 0.5).nan_to_num(neginf=-30.0)
    scores, ids = noisy.topk(min(candidates, vocabulary), dim=-1)
    draft_ids = ids.gather(1, torch.multinomial(scores.softmax(-1), 1, generator=rng) if drafts else ids[:, :1])[:, 0]
    greedy = temperature[owner] == 0
    draft_ids = torch.where(greedy & (torch.rand(drafts, generator=rng) < 0.8), scaled.argmax(-1), draft_ids)
    draft_ids[torch.rand(drafts, generator=rng) < 0.05] = -1
    bonus_rows[torch.rand(batch, generator=rng) < 0.2] = -1
    return {
        "logits": logits,
        "draft_rows": draft_rows,
        "bonus_rows": bonus_rows,
        "draft_ids": draft_ids,
        "cu_drafts": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        "candidate_ids": ids,
        "candidate_scores": scores.contiguous(),
        "temperature": temperature,
        "seeds": seeds(rng, batch),
        "anchor_positions": integers(rng, 0, 1 << 20, batch),
        "max_drafts": max([0, *counts]) if max_drafts is None else max_drafts,
    }


def rotary_cache(positions: int, rotated: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[positions, rotated]: cosines, then sines, as vLLM keeps them."""
    frequency = 1e4 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], -1).to(dtype)


def context(
    seed: int,
    rows: int,
    layers: int,
    heads: int,
    size: int,
    dtype: torch.dtype,
    is_neox: bool,
    rotated: int | None = None,
) -> Arguments:
    rng = generator(seed)
    return {
        "kv": normal(rng, rows, layers, 2, heads, size, dtype=dtype),
        "k_norm": (1 + normal(rng, layers, size) * 0.1).to(dtype),
        "eps": 1e-6,
        "positions": integers(rng, 0, 64, rows),
        "cos_sin": rotary_cache(64, rotated or size),
        "is_neox": is_neox,
        "value_scale": [None, 0.7][seed % 2],
    }


def caches(
    seed: int, layers: int, blocks: int, block: int, heads: int, size: int, dtype: torch.dtype, layout: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Key and value caches [blocks, block, heads, size], as views of one tensor a layer: "NHD" or "HND"
    strides."""
    keys, values = [], []
    for layer in range(layers):
        shape = (2, blocks, block, heads, size) if layout == "NHD" else (2, blocks, heads, block, size)
        both = normal(generator(seed + layer), *shape).to(dtype)
        key, value = both.unbind(0) if layout == "NHD" else both.transpose(2, 3).unbind(0)
        keys.append(key)
        values.append(value)
    return keys, values


def projection(
    seed: int, rows: int, layers: int, heads: int, size: int, width: int, dtype: torch.dtype, weight: str
) -> Arguments:
    """Features and a weight, quantised by row where `weight` is fp8 or int8."""
    rng = generator(seed)
    columns = layers * 2 * heads * size
    dense = normal(rng, columns, width) / width**0.5
    scale = None
    if weight != "dense":
        top = 448.0 if weight == "fp8" else 127.0
        scale = dense.abs().amax(1) / top
        quantised = dense / scale[:, None]
        dense = quantised.to(torch.float8_e4m3fn) if weight == "fp8" else quantised.round().to(torch.int8)
    case = context(seed, rows, layers, heads, size, dtype, is_neox=seed % 3 > 0)
    del case["kv"]
    return {
        "features": normal(rng, rows, width, dtype=dtype) * 3,
        "kv_weight": dense.to(dtype) if scale is None else dense,
        "weight_scale": scale,
        "bias": normal(rng, columns, dtype=dtype) if seed % 2 else None,
    } | case


def injection(
    seed: int, rows: int, dtype: torch.dtype, layout: str, per_layer: bool, size: int
) -> tuple[Arguments, list[torch.Tensor], list[torch.Tensor]]:
    """Up to 20 rows of 2 layers for caches of `dtype`, some of them with slot -1, and the caches."""
    kv_type = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    case = context(seed, rows, 2, 2, size, kv_type, seed % 3 > 0)
    keys, values = caches(seed, 2, 5, 4, 2, size, dtype, layout)
    rng = generator(seed)
    slots = torch.stack([torch.randperm(20, generator=rng)[:rows] for _ in range(2)])
    slots[torch.rand(2, rows, generator=rng) < 0.2] = -1
    case |= {"slot_mapping": slots if per_layer else slots[0].clone(), "block_size": 4}
    return case | {"k_scale": 0.5, "v_scale": 0.01}, keys, values
