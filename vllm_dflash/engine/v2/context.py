# SPDX-License-Identifier: Apache-2.0
"""The validity of draft context on V2, and how what is not valid stays out of a draft step.

The runner keeps a request's blocks on the device alone, so those of one group are followed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window

from vllm_dflash.engine import restored
from vllm_dflash.spec_decode import ContextValidity


class DraftContext:
    """ContextValidity over the blocks of that one of these KV cache groups that keeps most of a sequence.

    block_sizes: tokens a block of each group's tables. drafts: K. An asynchronous scheduler counts the drafts of a step
    that is still on its way as accepted.
    """

    def __init__(self, kv_cache_config: Any, groups: Sequence[int], block_sizes: Sequence[int], drafts: int) -> None:
        specs = {group: kv_cache_config.kv_cache_groups[group].kv_cache_spec for group in groups}
        self.group = min(groups, key=lambda group: get_kv_cache_spec_sliding_window(specs[group]) is not None)
        self.block_size: int = specs[self.group].block_size
        self.block_sizes = block_sizes
        self.drafts = drafts
        self._verified: dict[str, int] = {}
        self.validity = ContextValidity(self.block_size)
        self.blocks: dict[str, list[int]] = {}

    def follow(self, scheduler_output: Any) -> int:
        """Requests that enter and blocks that are handed out in a step -> computed positions without draft KV."""
        for request_id in scheduler_output.finished_req_ids:
            self.blocks.pop(request_id, None)
            self._verified.pop(request_id, None)
        if self.validity.has_starts:
            self.validity.forget(self.blocks)
        notes = restored.of(scheduler_output)
        masked = 0
        # Those that come back from a preemption are among them.
        for new in scheduler_output.scheduled_new_reqs:
            blocks = self.blocks[new.req_id] = list(new.block_ids[self.group])
            masked += self.validity.begin(new.req_id, blocks, new.num_computed_tokens, notes.get(new.req_id))
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None and request_id in self.blocks:
                self.blocks[request_id].extend(blocks[self.group])
                self.validity.allocated(blocks[self.group])
        return masked

    def starts(self, batch: Any) -> list[int] | None:
        """Where the context of each request of an InputBatch begins; None: everywhere at 0."""
        if not self.validity.has_starts:
            return None
        starts = [self.validity.start(request_id) for request_id in batch.req_ids]
        return starts if any(starts) else None

    def undraftable(self, batch: Any, ahead: int, limit: int) -> dict[str, str]:
        """Requests of an InputBatch that surely get no draft when they have gone `ahead` steps further, and why.

        limit: the first position that no draft may take. Where a request stands is known but for what becomes of this
        step's drafts and, if two steps lie between a plan and its drafts, of those before: it is taken for the least.
        """
        count = batch.num_reqs
        ends = batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count]
        drafts = batch.num_draft_tokens_per_req
        verified = [0] * count if drafts is None else drafts[:count].tolist()
        before = [self._verified.get(request_id, 0) if ahead > 1 else 0 for request_id in batch.req_ids]
        self._verified.update(zip(batch.req_ids, verified, strict=True))
        if not self.validity.has_starts and int(ends.max()) + ahead + 1 < limit:
            return {}
        found = {}
        rows = zip(batch.req_ids, ends.tolist(), batch.prefill_len_np[:count].tolist(), verified, before, strict=True)
        for request_id, end, prompt, now, earlier in rows:
            anchor = end - now - earlier + ahead
            start = self.validity.start(request_id)
            if anchor + 1 >= limit:
                found[request_id] = "range"
            elif start and end >= prompt and anchor < attended_from(start, self.block_sizes):
                found[request_id] = "no_context"
        return found

    def missed(self, batch: Any) -> None:
        """The rows of this step were not written: they are no context for anybody."""
        count = batch.num_reqs
        computed, scheduled = batch.num_computed_tokens_np[:count], batch.num_scheduled_tokens[:count]
        for request_id, first, rows in zip(batch.req_ids, computed.tolist(), scheduled.tolist(), strict=True):
            blocks = self.blocks.get(request_id, [])
            self.validity.missed(request_id, blocks, max(first - self.drafts, 0), first + rows)

    def ends(self, request_ids: Sequence[str], batch: Any) -> dict[str, int]:
        """Where what these requests have for context ends, at the most. batch: the latest one."""
        most = (batch.num_computed_tokens_np + batch.num_scheduled_tokens).tolist()
        ends = dict(zip(batch.req_ids, most, strict=True))
        return {
            request_id: ends.get(request_id, len(self.blocks[request_id]) * self.block_size)
            for request_id in request_ids
            if request_id in self.blocks
        }

    def restart(self, starts: Mapping[str, int]) -> None:
        """What these requests have for context before these positions is not to be attended any more."""
        for request_id, start in starts.items():
            if request_id in self.blocks:
                self.validity.restart(request_id, start)


def attended_from(start: int, block_sizes: Sequence[int]) -> int:
    """The first position behind `start` where a block of every group begins: one length serves all groups."""
    unit = math.lcm(*block_sizes)
    return -(-start // unit) * unit


def leave_out(
    starts: Sequence[int],
    block_sizes: Sequence[int],
    tables: Sequence[torch.Tensor],
    seq_lens: torch.Tensor,
    anchors: torch.Tensor,
    block: int,
) -> tuple[torch.Tensor, list[int]]:
    """Takes the blocks before `starts` out of the block tables of a draft step; K carries its rotation.

    starts: B positions. block_sizes, tables: tokens a block and table [B, blocks] int32 of each KV cache group.
    seq_lens: [B] int32, blocks of `block` rows included. anchors: [B] int64 positions. Tables and seq_lens change.
    -> ([B] bool: nothing of the request's context is left, its drafts mean nothing; B positions left out).
    """
    positions = [attended_from(start, block_sizes) for start in starts]
    left_out = torch.tensor(positions).to(seq_lens.device, non_blocking=True)
    for size, table in zip(block_sizes, tables, strict=True):
        entries = torch.arange(table.shape[1], device=table.device) + (left_out // size).unsqueeze(1)
        table.copy_(table.gather(1, entries.clamp(max=table.shape[1] - 1)))
    seq_lens.sub_(left_out).clamp_(min=block)
    return anchors < left_out, positions
