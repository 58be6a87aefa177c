# SPDX-License-Identifier: Apache-2.0
"""The best tokens of a slot, over a vocabulary that may be split over tensor-parallel ranks."""

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.logits_processor import LogitsProcessor, _topk
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def top_tokens(
    processor: LogitsProcessor, lm_head: VocabParallelEmbedding, hidden: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [rows, H] -> the `count` best ids [rows, count] int64, best first, and their logits fp32.

    Logits carry the multiplier and, after it, the soft cap. Ranks exchange their own best in one gather, ids as the
    bits of their fp32 neighbours: stock's way takes two, and its CPU gather knows no integers. A row that is not finite
    on one rank is NaN on all of them.
    """
    if lm_head.tp_size == 1:
        ids, logits = processor.get_top_k_tokens(lm_head, hidden, count)
        return ids, logits
    logits = processor._apply_head(lm_head, hidden, None)
    padding = lm_head.shard_indices.num_org_vocab_padding
    if padding > 0:
        logits[..., -padding:] = -torch.inf
    values, local = _topk(logits, min(count, logits.shape[-1]))
    ids = (local + lm_head.shard_indices.org_vocab_start_index).to(torch.int32)
    spoiled = hidden.sum(dim=-1, keepdim=True, dtype=torch.float32) * 0.0
    own = torch.cat([values.float() + spoiled, ids.view(torch.float32)], dim=-1)
    every = tensor_model_parallel_all_gather(own, dim=-1).view(hidden.shape[0], lm_head.tp_size, 2, -1)
    values, chosen = every[:, :, 0].flatten(1).topk(count, dim=-1)
    ids = every[:, :, 1].flatten(1).contiguous().view(torch.int32).gather(1, chosen).to(torch.int64)
    if processor.scale != 1.0:
        values = values * processor.scale
    if processor.soft_cap is not None:
        values = torch.tanh(values / processor.soft_cap) * processor.soft_cap
    return ids, values
