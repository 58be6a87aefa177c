# SPDX-License-Identifier: Apache-2.0
"""Verification with a sparse q in Triton, in two launches: statistics of every chunk of every judged row, then a
program a request that accepts, and samples at the first rejection or the bonus row from one chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dflash.ops.triton.device import ACCEPT, BONUS, LARGEST, RECOVER, first_above, uniform, weight_of

CHUNK = 2048


@triton.jit
def drafts_of(cu_drafts, b, max_drafts):
    """(first draft of request b, how many it has)."""
    first = tl.load(cu_drafts + b)
    return first.to(tl.int64), tl.minimum(tl.load(cu_drafts + b + 1) - first, max_drafts)


@triton.jit
def row_of(draft_rows, bonus_rows, b, first, slot, drafts, rows):
    """The row of logits of a slot; -1 where there is none."""
    drafted = tl.load(draft_rows + first + slot, slot < drafts, -1)
    row = tl.where(slot < drafts, drafted, tl.load(bonus_rows + b))
    return tl.where((slot <= drafts) & (row < rows), row, -1)


@triton.jit
def inverse_of(temperatures, b):
    temperature = tl.load(temperatures + b)
    return tl.where(temperature > 0, tl.minimum(1.0 / tl.where(temperature > 0, temperature, 1.0), 1e30), 0.0)


@triton.jit
def logits_at(logits, row, logits_row, ids, mask):
    """fp32 logits; NaN and what is masked are -inf."""
    x = tl.load(logits + row * logits_row + ids, mask, float("-inf")).to(tl.float32)
    return tl.where(x > float("-inf"), x, float("-inf"))


@triton.jit
def weights_at(x, top, inverse):
    return tl.where(x > float("-inf"), weight_of(x, top, inverse), 0.0)


@triton.jit
def weights_of_chunk(
    logits, row, logits_row, vocabulary, chunk, top, inverse, ids, rest, entries, CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Weights [CHUNK] of a row's chunk, those of `ids` replaced by `rest`."""
    at = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    weights = weights_at(logits_at(logits, row, logits_row, at, at < vocabulary), top, inverse)
    c = tl.arange(0, CANDIDATES)
    for m in range(entries):
        other = tl.max(tl.where(c == m, ids, -1), 0)
        weights = tl.where(at == other, tl.max(tl.where(c == m, rest, 0.0), 0), weights)
    return weights


@triton.jit
def chunk_kernel(
    logits, draft_rows, bonus_rows, cu_drafts, temperatures, tops, sums, firsts, rows, vocabulary, logits_row,
    max_drafts, chunks, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    slot = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    first, drafts = drafts_of(cu_drafts, b, max_drafts)
    row = row_of(draft_rows, bonus_rows, b, first, slot, drafts, rows)
    if row >= 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = logits_at(logits, row, logits_row, ids, ids < vocabulary)
        top = tl.max(x, 0)
        at = (b * (max_drafts + 1) + slot) * chunks + chunk
        tl.store(tops + at, top)
        tl.store(sums + at, tl.sum(weights_at(x, top, inverse_of(temperatures, b)), 0))
        tl.store(firsts + at, chunk * CHUNK + tl.argmax(x, 0))


@triton.jit
def decide_kernel(
    logits, draft_rows, bonus_rows, draft_ids, cu_drafts, candidate_ids, candidate_scores, temperatures, seeds,
    positions, tops, sums, firsts, output, accepted, rows, vocabulary, logits_row, candidates, max_drafts, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    first, drafts = drafts_of(cu_drafts, b, max_drafts)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    inverse = inverse_of(temperatures, b)
    n = tl.arange(0, CHUNKS)
    c = tl.arange(0, CANDIDATES)

    # The draft of the slot that is judged, its row's statistics and its q; after the loop, those of the slot to sample.
    slot = drafts * 0
    going = slot <= drafts
    row = first * 0 - 1
    draft = row
    top = inverse * 0.0
    mass = tl.zeros((CHUNKS,), tl.float64)
    total = tl.sum(mass, 0)
    ids = tl.zeros((CANDIDATES,), tl.int64)
    q = tl.zeros((CANDIDATES,), tl.float32)
    q_draft = inverse * 0.0
    best = row
    while going:
        row = row_of(draft_rows, bonus_rows, b, first, slot, drafts, rows)
        draft = tl.load(draft_ids + first + slot, slot < drafts, -1)
        real = (draft >= 0) & (draft < vocabulary)
        at = (b * (max_drafts + 1) + slot) * chunks
        there = (n < chunks) & (row >= 0)
        chunk_top = tl.load(tops + at + n, there, float("-inf"))
        top = tl.max(chunk_top, 0)
        largest = there & (chunk_top == top) & (top > float("-inf"))
        best = tl.min(tl.where(largest, tl.load(firsts + at + n, there, 0), 0x7FFFFFFF), 0).to(tl.int64)
        best = tl.where(top > float("-inf"), best, -1)
        sum_of = tl.load(sums + at + n, there, 0.0).to(tl.float64)
        mass = tl.where(chunk_top > float("-inf"), sum_of * weight_of(chunk_top, top, inverse), 0.0)
        total = tl.sum(mass, 0)
        entry = (first + slot) * candidates + c
        mask = (c < candidates) & (slot < drafts)
        ids = tl.load(candidate_ids + entry, mask, -1)
        score = tl.load(candidate_scores + entry, mask, float("-inf"))
        present = (ids >= 0) & (ids < vocabulary) & (score >= -LARGEST)
        score = tl.where(present, tl.minimum(score, LARGEST), -LARGEST)
        q = tl.where(present, weight_of(score, tl.max(score, 0), 1.0), 0.0)
        q = q / tl.maximum(tl.sum(q, 0), 1e-38)
        q_draft = tl.max(tl.where(ids == draft, q, 0.0), 0)
        x = logits_at(logits, row, logits_row, tl.where(real, draft, 0), real & (row >= 0))
        p = weights_at(x, top, inverse) / tl.where(total > 0, total, 1.0)
        u = uniform(seed, position, slot + 1, ACCEPT)
        sampled = u * tl.where(q_draft > 0, q_draft, 1.0) < p
        takes = tl.where((inverse > 0) & (top > float("-inf")), sampled, best == draft)
        accept = (slot < drafts) & real & (row >= 0) & takes
        slot += accept.to(tl.int32)
        going = accept

    k = tl.arange(0, SLOTS)
    kept = tl.load(draft_ids + first + k, k < slot, -1).to(tl.int32)
    token = best
    if (row >= 0) & (inverse > 0) & (top > float("-inf")):
        is_bonus = slot == drafts
        has_q = (draft >= 0) & (draft < vocabulary)
        one_hot = has_q & (q_draft == 0)
        ids = tl.where(one_hot, tl.where(c == 0, draft, -1), tl.where(has_q & (q > 0), ids, -1))
        q = tl.where(one_hot, 1.0, q)
        own = logits_at(logits, row, logits_row, tl.where(ids >= 0, ids, 0), ids >= 0)
        rest = weights_at(own, top, inverse).to(tl.float64) - q.to(tl.float64) * total
        rest = tl.where((ids >= 0) & (rest > 0), rest, 0.0).to(tl.float32)
        entries = tl.maximum(candidates, 1)
        # The chunks of the candidates anew, without them: what is left of a sum would be rounding.
        masses = mass
        for j in range(entries):
            id = tl.max(tl.where(c == j, ids, -1), 0)
            if id >= 0:
                chunk_of = id // CHUNK
                anew = weights_of_chunk(
                    logits, row, logits_row, vocabulary, chunk_of, top, inverse, ids, rest, entries, CHUNK, CANDIDATES
                )
                masses = tl.where(n == chunk_of, tl.sum(anew.to(tl.float64), 0), masses)
        left = tl.sum(masses, 0) > 0
        masses = tl.where(left, masses, mass)  # nothing is left of p - q: p itself
        ids = tl.where(left, ids, -1)
        u = uniform(seed, position, slot + 1, tl.where(is_bonus, BONUS, RECOVER))
        running = tl.cumsum(masses, 0)
        target = u * tl.max(running, 0)
        chunk = first_above(running, target)
        before = tl.sum(tl.where(n < chunk, masses, 0.0), 0)
        weights = weights_of_chunk(
            logits, row, logits_row, vocabulary, chunk, top, inverse, ids, rest, entries, CHUNK, CANDIDATES
        )
        inside = first_above(before + tl.cumsum(weights.to(tl.float64), 0), target)
        token = chunk.to(tl.int64) * CHUNK + inside
    token = tl.where(row >= 0, token, -1).to(tl.int32)
    tl.store(output + b * (max_drafts + 1) + k, tl.where(k == slot, token, kept), k <= max_drafts)
    tl.store(accepted + b, slot)


def reject_sparse(
    logits: torch.Tensor,
    draft_rows: torch.Tensor,
    bonus_rows: torch.Tensor,
    draft_ids: torch.Tensor,
    cu_drafts: torch.Tensor,
    candidate_ids: torch.Tensor,
    candidate_scores: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    anchor_positions: torch.Tensor,
    max_drafts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See vllm_dflash.ops.reject_sparse."""
    batch, candidates = cu_drafts.shape[0] - 1, candidate_ids.shape[1]
    rows, vocabulary = logits.shape
    output = cu_drafts.new_empty((batch, max_drafts + 1))
    accepted = cu_drafts.new_empty((batch,))
    if batch == 0:
        return output, accepted
    chunks = triton.cdiv(vocabulary, CHUNK)
    shape = (batch, max_drafts + 1, chunks)
    tops, sums = (torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(2))
    firsts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    chunk_kernel[(chunks, max_drafts + 1, batch)](
        logits, draft_rows, bonus_rows, cu_drafts, temperature, tops, sums, firsts, rows, vocabulary, logits.stride(0),
        max_drafts, chunks, CHUNK,
    )  # fmt: skip
    decide_kernel[(batch,)](
        logits, draft_rows, bonus_rows, draft_ids, cu_drafts, candidate_ids, candidate_scores, temperature, seeds,
        anchor_positions, tops, sums, firsts, output, accepted, rows, vocabulary, logits.stride(0), candidates,
        max_drafts, chunks, CHUNK, triton.next_power_of_2(chunks), triton.next_power_of_2(max(candidates, 1)),
        triton.next_power_of_2(max_drafts + 1),
    )  # fmt: skip
    return output, accepted
