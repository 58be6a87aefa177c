# SPDX-License-Identifier: Apache-2.0
"""The validity of draft context on V1: which blocks come and go, as the scheduler says it step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_dflash.engine import restored
from vllm_dflash.engine.v1.attention import DraftAttentionGroups
from vllm_dflash.spec_decode import ContextValidity, DraftPlan

Bounds = list[tuple[int, int]]  # B (least, most) context tokens


class DraftContext:
    """ContextValidity over the blocks of one KV cache group of the draft's.

    scheduled_drafts: by request id, drafts that this step verifies; whoever is not in it has none.
    """

    def __init__(self, runner: Any, group: int, block_size: int) -> None:
        self.runner = runner
        self.group = group
        self.validity = ContextValidity(block_size)
        self.scheduled_drafts: dict[str, int] = {}

    def follow(self, scheduler_output: Any) -> int:
        """Requests that enter and blocks that are handed out in a step -> computed positions without draft KV."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.scheduled_drafts = {request_id: len(tokens) for request_id, tokens in drafts.items()}
        notes = restored.of(scheduler_output)
        masked = 0
        for new in scheduler_output.scheduled_new_reqs:
            blocks = new.block_ids[self.group]
            masked += self.validity.begin(new.req_id, blocks, new.num_computed_tokens, notes.get(new.req_id))
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                masked += self.validity.begin(request_id, blocks[self.group], computed, notes.get(request_id))
            elif blocks is not None:
                self.validity.allocated(blocks[self.group])
        return masked

    def bounds(self, request_ids: list[str], cad: CommonAttentionMetadata, padded: bool) -> Bounds:
        """The context of each request after this step. padded: the host does not know how many drafts were rejected."""
        count = cad.num_reqs
        if cad.seq_lens_cpu_upper_bound is not None:
            most = cad.seq_lens_cpu_upper_bound[:count].tolist()
        else:
            scheduled = torch.diff(cad.query_start_loc_cpu[: count + 1])
            most = (torch.from_numpy(self.runner.input_batch.num_computed_tokens_cpu[:count]) + scheduled).tolist()
        drafts = self.scheduled_drafts if padded else {}
        return [(n - drafts.get(request_id, 0), n) for request_id, n in zip(request_ids, most, strict=True)]

    def missed(self, request_ids: list[str], cad: CommonAttentionMetadata, bounds: Bounds) -> None:
        """The rows of this step were not written: they are no context for anybody."""
        scheduled = torch.diff(cad.query_start_loc_cpu[: cad.num_reqs + 1]).tolist()
        for request_id, count, (_, most) in zip(request_ids, scheduled, bounds, strict=True):
            blocks = self.runner.requests[request_id].block_ids[self.group]
            self.validity.missed(request_id, blocks, max(most - count, 0), most)

    def missed_spans(self, spans: dict[str, tuple[int, int]]) -> None:
        """The positions [first, end) of these requests were not written."""
        for request_id, (first, end) in spans.items():
            request = self.runner.requests.get(request_id)
            if request is not None:
                self.validity.missed(request_id, request.block_ids[self.group], first, end)

    def restart(self, request_ids: list[str]) -> None:
        """What these requests have for context so far is not to be attended any more."""
        for request_id in request_ids:
            request = self.runner.requests.get(request_id)
            if request is not None:
                self.validity.restart(request_id, request.num_tokens)

    def all_unlimited(self, longest: int, limit: int) -> bool:
        """Whether drafts are possible for everybody, the longest context being so many tokens."""
        return not self.validity.has_starts and longest + 1 < limit

    def cap(
        self, plan: DraftPlan, request_ids: list[str], bounds: Bounds, limit: int, attention: DraftAttentionGroups
    ) -> None:
        """No drafts at or past position `limit`, and none where nothing of the context can be attended."""
        if self.all_unlimited(max((least for least, _ in bounds), default=0), limit):
            return
        for row, (request_id, (least, _)) in enumerate(zip(request_ids, bounds, strict=True)):
            if least + 1 >= limit:
                plan.cap(row, 0, "range")
            start = self.validity.start(request_id)
            if start and least < attention.attendable_from(start):
                plan.cap(row, 0, "no_context")


def update_states(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner._update_states, and with it the drafter's books."""

    @functools.wraps(stock)
    def wrapper(self: Any, scheduler_output: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        context = getattr(drafter, "context", None)
        if drafter is None or context is None:
            return stock(self, scheduler_output)
        if drafter.pending.rows and _members_change(scheduler_output, drafter.pending.members):
            # Before blocks of those who left have another owner, and those of a common prefix one more.
            drafter.write_pending()
        result = stock(self, scheduler_output)
        drafter.worker.tally.restored_context += context.follow(scheduler_output)
        return result

    return wrapper


def _members_change(scheduler_output: Any, members: set[str]) -> bool:
    """Whether others than these requests are in a step, or one of them anew. Preempted ones are not in it."""
    return bool(
        scheduler_output.num_scheduled_tokens.keys() != members
        or scheduler_output.finished_req_ids
        or scheduler_output.scheduled_new_reqs
        or scheduler_output.scheduled_cached_reqs.resumed_req_ids
    )
