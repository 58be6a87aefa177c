# SPDX-License-Identifier: Apache-2.0
"""How many of the drafts get rows on V2, where the scheduler plans them.

The draft step drafts for all alike, as its graph was captured, or for nobody; the first drafts fill the rows that are
planned. Their number is a request's own, or what the block length controller finds best. It is decided before the
drafts are drawn and cannot depend on them, so that the row behind the last planned draft may give the bonus token.

A draft that a grammar forbids: whether it was cut depends on what was drawn, so it gets a row all the same, in which
it is rejected by its own q. Asynchronous scheduling plans such rows itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from vllm_dflash.engine.hooks import is_ours
from vllm_dflash.engine.requests import RequestTable
from vllm_dflash.engine.v2.lengths import Lengths, NextDrafts
from vllm_dflash.options import server_options
from vllm_dflash.spec_decode import DraftPlan

# Stock's mark of a draft that the grammar took out; the worker knows the draft itself.
NO_TOKEN = -1


class DraftRows:
    """A scheduler's plan of rows. `planned`: that of the step scheduled last."""

    def __init__(self, scheduler: Any) -> None:
        self.requests: dict[str, Any] = scheduler.requests
        self.table = RequestTable()
        option = server_options(scheduler.vllm_config.additional_config).block_length
        self.usual = 0 if option == "auto" else option
        self.newest: dict[str, int] = {}
        self.undraftable: dict[str, str] = {}
        self.restarts: dict[str, int] = {}
        self.planned = NextDrafts({}, {})

    def learn(self, request_ids: Iterable[str], lengths: Lengths) -> None:
        """What the worker of a step of these requests says pays."""
        self.usual = lengths.usual
        self.newest.update(lengths.by_request)
        for request_id in request_ids if self.undraftable else ():
            self.undraftable.pop(request_id, None)
        self.undraftable.update(lengths.undraftable)
        self.restarts.update(lengths.restarts)

    def plan(self, scheduler_output: Any) -> NextDrafts:
        """The drafts of a step, once, before they are drawn."""
        self.table.forget(self.requests)
        for known in (self.newest, self.undraftable):
            for request_id in [request_id for request_id in known if request_id not in self.requests]:
                del known[request_id]
        ids = list(scheduler_output.num_scheduled_tokens)
        plan = DraftPlan(len(ids), scheduler_output.num_spec_tokens_to_schedule)
        for row, request_id in enumerate(ids):
            request = self.requests[request_id]
            if request.is_prefill_chunk:
                plan.cap(row, 0, "prompt")
                continue
            own = self.table.options(request_id, request.sampling_params).max_draft_tokens
            if own is not None:
                plan.cap(row, own, "request")
            if request_id in self.undraftable:
                plan.cap(row, 0, self.undraftable[request_id])
            plan.cap(row, self.newest.get(request_id, self.usual), "unprofitable")
        restarts, self.restarts = self.restarts, {}
        self.planned = NextDrafts(dict(zip(ids, plan.lengths, strict=True)), plan.skipped, restarts)
        return self.planned

    def cap(self, request_ids: Iterable[str]) -> None:
        """Cuts the drafts, or what stands for them, of requests of the step scheduled last."""
        for request_id in request_ids:
            request, most = self.requests.get(request_id), self.planned.lengths.get(request_id)
            if request is not None and most is not None and len(request.spec_token_ids) > most:
                request.spec_token_ids = request.spec_token_ids[:most]


def rows_of(scheduler: Any) -> DraftRows | None:
    """The plan of a scheduler that serves one of our drafters on V2."""
    config = scheduler.vllm_config
    if not (config.use_v2_model_runner and is_ours(config.speculative_config)):
        return None
    if not hasattr(scheduler, "vllm_dflash_rows"):
        scheduler.vllm_dflash_rows = DraftRows(scheduler)
    return scheduler.vllm_dflash_rows


def plan_drafts(stock: Callable[..., None]) -> Callable[..., None]:
    """Scheduler._update_after_schedule: the step goes to the workers with the plan of its drafts."""

    @functools.wraps(stock)
    def wrapper(self: Any, scheduler_output: Any) -> None:
        stock(self, scheduler_output)
        rows = rows_of(self)
        if rows is not None:
            scheduler_output.vllm_dflash_drafts = rows.plan(scheduler_output)

    return wrapper


def update_after_schedule(stock: Callable[..., None]) -> Callable[..., None]:
    """AsyncScheduler._update_after_schedule, which gives the next step its rows before the drafts are drawn."""

    @functools.wraps(stock)
    def wrapper(self: Any, scheduler_output: Any) -> None:
        stock(self, scheduler_output)
        rows = rows_of(self)
        if rows is not None:
            rows.cap(scheduler_output.num_scheduled_tokens)

    return wrapper


def update_draft_token_ids(stock: Callable[..., None]) -> Callable[..., None]:
    """Scheduler.update_draft_token_ids, which takes the drafts without asynchronous scheduling."""

    @functools.wraps(stock)
    def wrapper(self: Any, draft_token_ids: Any) -> None:
        stock(self, draft_token_ids)
        rows = rows_of(self)
        if rows is None:
            return
        for request_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            if request.use_structured_output and len(request.spec_token_ids) < len(drafts):
                request.spec_token_ids = [*request.spec_token_ids, NO_TOKEN]
        rows.cap(draft_token_ids.req_ids)

    return wrapper


def learn(scheduler: Any, model_runner_output: Any) -> None:
    """Takes what the worker sent with a step's output."""
    lengths: Lengths | None = getattr(model_runner_output, "vllm_dflash_lengths", None)
    rows = rows_of(scheduler)
    if lengths is not None and rows is not None:
        rows.learn(model_runner_output.req_ids, lengths)
