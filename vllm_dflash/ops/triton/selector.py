# SPDX-License-Identifier: Apache-2.0
"""The walk through the candidates in Triton: a program a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dflash.ops.triton.device import DRAFT, LARGEST, first_above, uniform, weight_of


@triton.jit
def path_kernel(
    candidate_ids, candidate_logits, projected, predecessor, successor, anchors, temperatures, seeds, positions,
    tokens, scores, slots, candidates, rank, vocabulary, projected_batch, projected_slot, predecessor_row,
    successor_row, CANDIDATES: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CANDIDATES)
    temperature = tl.load(temperatures + b)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    last = tl.load(anchors + b)
    for slot in range(slots):
        at = (b * slots + slot) * candidates
        ids = tl.load(candidate_ids + at + c, c < candidates, -1)
        known = (last >= 0) & (last < vocabulary)
        present = (ids >= 0) & (ids < vocabulary) & known
        to = tl.where(present, ids, 0)
        score = tl.load(candidate_logits + at + c, c < candidates, 0.0)
        transition = tl.zeros((CANDIDATES,), tl.float32)
        for begin in range(0, rank, RANK):
            r = begin + tl.arange(0, RANK)
            inside = r < rank
            source = tl.load(predecessor + tl.where(known, last, 0) * predecessor_row + r, inside, 0.0)
            through = tl.load(projected + b * projected_batch + slot * projected_slot + r, inside, 0.0)
            mask = present[:, None] & inside[None, :]
            rows = tl.load(successor + to[:, None] * successor_row + r[None, :], mask, 0.0)
            mixed = source.to(tl.float32) * through.to(tl.float32)
            transition += tl.sum(rows.to(tl.float32) * mixed[None, :], 1)
        score = (score + transition) / tl.where(temperature > 0, temperature, 1.0)
        score = tl.where(present & (tl.abs(score) <= LARGEST), score, float("-inf"))
        tl.store(scores + at + c, score, c < candidates)
        top = tl.max(score, 0)
        weights = tl.where(score > float("-inf"), weight_of(score, top, 1.0), 0.0).to(tl.float64)
        running = tl.cumsum(weights, 0)
        u = uniform(seed, position, slot + 1, DRAFT)
        sampled = first_above(running, u * tl.max(running, 0))
        choice = tl.where(temperature > 0, sampled, tl.argmax(score, 0))
        last = tl.where(top > float("-inf"), tl.sum(tl.where(c == choice, ids, 0), 0), -1)
        tl.store(tokens + b * slots + slot, last)


def select_path(
    candidate_ids: torch.Tensor,
    candidate_logits: torch.Tensor,
    projected: torch.Tensor,
    predecessor: torch.Tensor,
    successor: torch.Tensor,
    anchors: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    anchor_positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See vllm_dflash.ops.select_path."""
    batch, slots, candidates = candidate_ids.shape
    rank = projected.shape[2]
    tokens = candidate_ids.new_empty((batch, slots))
    scores = torch.empty(candidate_ids.shape, dtype=torch.float32, device=candidate_ids.device)
    if batch * slots == 0:
        return tokens, scores
    wide = triton.next_power_of_2(max(candidates, 1))
    path_kernel[(batch,)](
        candidate_ids, candidate_logits, projected, predecessor, successor, anchors, temperature, seeds,
        anchor_positions, tokens, scores, slots, candidates, rank, predecessor.shape[0], projected.stride(0),
        projected.stride(1), predecessor.stride(0), successor.stride(0), wide,
        max(1, min(triton.next_power_of_2(max(rank, 1)), 8192 // wide)),
    )  # fmt: skip
    return tokens, scores
