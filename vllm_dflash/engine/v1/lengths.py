# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request of a V1 step gets: what may be drafted for at all, and what pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_dflash.options import server_options
from vllm_dflash.spec_decode import DraftPlan, SpecDecodeWorker
from vllm_dflash.spec_decode.length_planner import LengthPlanner


class StepLengths:
    """The planner on V1. `verified` is set where the rows to verify are known: the drafts among this step's rows."""

    def __init__(self, runner: Any, worker: SpecDecodeWorker) -> None:
        self.runner = runner
        self.worker = worker
        self.verified = 0
        option = server_options(runner.vllm_config.additional_config).block_length
        together = runner.parallel_config.tensor_parallel_size > 1
        self.planner = LengthPlanner(worker, option, agree=_as_first_rank if together else None)
        # An asynchronous scheduler has planned the rows before a block is drawn.
        if option == "auto" and worker.drafter.has_selector and not runner.use_async_scheduling:
            worker.cut = self.planner.cut

    def cap(self, plan: DraftPlan, request_ids: Sequence[str], rows: int, prompts: int) -> None:
        """Cap the plan of a step by what pays. rows: of the target's forward in this step. prompts: requests in the
        midst of their prompt."""
        count = len(request_ids)
        verified, self.verified = self.verified, 0
        self.planner.begin(rows, not prompts and rows == count + verified)
        self.planner.forget(self.runner.requests)
        drafting = plan.rows
        if not drafting:
            return
        ids = request_ids if len(drafting) == count else [request_ids[row] for row in drafting]
        # Those that can have no drafts decode beside the others, and cost as much.
        decoding = count - prompts
        context = self.worker.clock.context_tokens * decoding / count
        lengths = self.planner.plan(ids, context, decoding)
        if not any(lengths):
            plan.skip_all("unprofitable")
            return
        for row, length in zip(drafting, lengths, strict=True):
            plan.cap(row, length, "unprofitable")


def _as_first_rank(lengths: list[int]) -> list[int]:
    """The first tensor-parallel rank's lengths: each rank measures its own times, and all must draft alike."""
    return as_first_rank(torch.tensor(lengths)).tolist()


def as_first_rank(numbers: torch.Tensor) -> torch.Tensor:
    """The first tensor-parallel rank's numbers, on the host, in place."""
    group = get_tp_group()
    torch.distributed.broadcast(numbers, src=group.ranks[0], group=group.cpu_group)
    return numbers
