# SPDX-License-Identifier: Apache-2.0
"""What vLLM runs on a CPU in place of each operation: its own functions, called in its own order."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm import _custom_ops
from vllm.model_executor.models.qwen3_dflash2 import _grouped_conv, _score_edges
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import apply_sampling_constraints, rejection_sample

current_platform.register_triton_kernel_overrides()


def context_kv(
    kv: torch.Tensor, k_norm: torch.Tensor, eps: float, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all layers after the GEMM, before the cache writes (vLLM's precompute_and_store_context_kv)."""
    rows, layers, _, heads, size = kv.shape
    both = kv.permute(2, 1, 0, 3, 4).contiguous()
    k, v = both[0], both[1]
    normed = torch.empty_like(k)
    _custom_ops.rms_norm(normed, k, k_norm, eps)
    flat = normed.view(layers * rows, heads * size)
    _custom_ops.rotary_embedding(positions.repeat(layers), flat, None, size, cos_sin, True)
    return flat.view(layers, rows, heads, size), v


def write_caches(k: torch.Tensor, v: torch.Tensor, caches: list[torch.Tensor], slots: torch.Tensor, isa: str) -> None:
    """One write a layer into caches [num_blocks, nkv, block_size, 2 * hd]."""
    for layer, cache in enumerate(caches):
        blocks, heads, block, both = cache.shape
        keys, values = cache.view(blocks, heads, 2 * block, both // 2).chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(k[layer], v[layer], keys, values, slots, isa)


def convolution(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, block: int) -> torch.Tensor:
    taps, groups = dynamic.shape[1:]
    return _grouped_conv(x, dynamic, base, block, groups, x.shape[1] // groups, taps)


def lattice_path(
    candidate_ids: torch.Tensor,
    candidate_logits: torch.Tensor,
    projected: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """All C x C scores of every slot, then the argmax walk through them."""
    batch, slots, width = candidate_ids.shape
    scores = _score_edges(predecessor, successor, candidate_ids, candidate_logits, projected, anchors, width)
    tokens = torch.empty(batch, slots, dtype=torch.int64)
    row = torch.zeros(batch, 1, dtype=torch.int64)
    for slot in range(slots):
        row = scores[:, slot].gather(1, row[:, :, None].expand(-1, 1, width))[:, 0].argmax(-1, keepdim=True)
        tokens[:, slot] = candidate_ids[:, slot].gather(1, row)[:, 0]
    return tokens


def dense_rejection(
    logits: torch.Tensor, rows: torch.Tensor | None, drafts: torch.Tensor, q: torch.Tensor, requests: int
) -> torch.Tensor:
    """V1's verification at T = 1 with a dense q, without the bonus rows. rows: None where logits are already the copy
    of the drafts' rows that V1 makes."""
    count = drafts.shape[0] // requests
    sampling = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(requests), generators={}, top_k=None, top_p=None
    )
    ends = (torch.arange(1, requests + 1) * count).to(torch.int32)
    target = logits if rows is None else logits[rows].to(torch.float32)
    target = apply_sampling_constraints(target, ends, sampling)
    bonus = torch.zeros(requests, 1, dtype=torch.int32)
    return rejection_sample(drafts, [count] * requests, count, ends, q, target, bonus, sampling)
