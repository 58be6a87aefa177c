# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request of a V2 step gets, and the way of these numbers between worker and scheduler.

The rows for a step's drafts are planned by the scheduler, with asynchronous scheduling before the drafts are drawn. So
the worker, which measures, sends `Lengths` along with a step's output; the scheduler plans by the newest ones and
tells the workers with the step whose drafts they are, `NextDrafts`. All ranks draft for the same requests then.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_dflash.options import server_options
from vllm_dflash.spec_decode import SpecDecodeWorker
from vllm_dflash.spec_decode.acceptance import AVERAGE
from vllm_dflash.spec_decode.length_planner import LengthPlanner


@dataclass(frozen=True)
class Lengths:
    """From the worker: drafts that pay for each request of a step, and for whoever was not in it.

    undraftable: requests of the step that can get none, and why. restarts: where the context of requests begins anew.
    """

    usual: int
    by_request: dict[str, int]
    undraftable: dict[str, str] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NextDrafts:
    """From the scheduler: how many of the drafts of a step each of its requests gets rows for.

    skipped: by reason, requests that get none. restarts: as in Lengths, before this step.
    """

    lengths: dict[str, int]
    skipped: dict[str, int]
    restarts: dict[str, int] = field(default_factory=dict)


class StepLengths:
    """The block length controller of a V2 worker."""

    def __init__(self, worker: SpecDecodeWorker, vllm_config: Any) -> None:
        self.worker = worker
        self.planner = LengthPlanner(worker, server_options(vllm_config.additional_config).block_length)

    def begin(self, batch: Any, drafts: NextDrafts | None) -> None:
        """A step over an InputBatch begins."""
        self.planner.begin(batch.num_tokens, not batch.is_prefilling_np[: batch.num_reqs].any())
        if drafts is not None:
            self.planner.drafted(sum(1 for length in drafts.lengths.values() if length))

    def after(
        self, batch: Any, alive: Container[str], undraftable: dict[str, str], restarts: dict[str, int]
    ) -> Lengths:
        """What pays from now on, as far as this step tells. alive: ids of the requests that have not ended."""
        self.planner.forget(alive)
        count = batch.num_reqs
        computed = batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count]
        sampled = (computed >= batch.prefill_len_np[:count]).tolist()
        ids = [request_id for request_id, past in zip(batch.req_ids, sampled, strict=True) if past]
        if not self.worker.tally.enabled:
            return Lengths(0, dict.fromkeys(ids, 0))
        draftable = [request_id for request_id in ids if request_id not in undraftable]
        lengths = self.planner.choose(draftable, self.worker.clock.context_tokens * len(ids) / count, len(ids))
        controller = self.planner.controller
        if controller.fixed is not None:
            usual = controller.fixed
        else:
            # Nobody drafts in a step that measures plain decoding, and few do in one that tries drafts.
            usual = controller.lengths[AVERAGE] if any(lengths) or not draftable else 0
        by_request = dict.fromkeys(ids, 0) | dict(zip(draftable, lengths, strict=True))
        return Lengths(usual, by_request, undraftable, restarts)


def as_first_rank(lengths: Lengths, request_ids: Sequence[str]) -> Lengths:
    """What the first tensor-parallel rank found for a step of these requests, whose ids differ from rank to rank."""
    group = get_tp_group()
    shared = [(list(request_ids), lengths)]
    torch.distributed.broadcast_object_list(shared, src=group.ranks[0], group=group.cpu_group)
    theirs, first = shared[0]
    own = dict(zip(theirs, request_ids, strict=True))

    def renamed(by_request: dict[str, Any]) -> dict[str, Any]:
        return {own[request_id]: value for request_id, value in by_request.items() if request_id in own}

    return Lengths(first.usual, renamed(first.by_request), renamed(first.undraftable), renamed(first.restarts))
