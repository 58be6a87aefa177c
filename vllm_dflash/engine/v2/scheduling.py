# SPDX-License-Identifier: Apache-2.0
"""How many of the drafts get rows on V2, where the scheduler plans them.

A request's own number of drafts: the draft step drafts for all alike, as its graph was captured, and the first drafts
fill the rows that are planned. Such a number cannot depend on what is drawn, so that the row behind the last planned
draft may give the bonus token.

A draft that a grammar forbids: whether it was cut depends on what was drawn, so it gets a row all the same, in which
it is rejected by its own q. Asynchronous scheduling plans such rows itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from vllm_dflash.engine.hooks import is_ours
from vllm_dflash.engine.requests import RequestTable

# Stock's mark of a draft that the grammar took out; the worker knows the draft itself.
NO_TOKEN = -1


def update_after_schedule(stock: Callable[..., None]) -> Callable[..., None]:
    """AsyncScheduler._update_after_schedule, which plans the next step's drafts before they are drawn."""

    @functools.wraps(stock)
    def wrapper(self: Any, scheduler_output: Any) -> None:
        stock(self, scheduler_output)
        _cap(self, scheduler_output.num_scheduled_tokens)

    return wrapper


def update_draft_token_ids(stock: Callable[..., None]) -> Callable[..., None]:
    """Scheduler.update_draft_token_ids, which takes the drafts without asynchronous scheduling."""

    @functools.wraps(stock)
    def wrapper(self: Any, draft_token_ids: Any) -> None:
        stock(self, draft_token_ids)
        if _serves(self):
            drawn = {
                request_id: len(drafts)
                for request_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
            }
            for request_id, count in drawn.items():
                request = self.requests.get(request_id)
                if request is None or request.is_finished() or request.is_prefill_chunk:
                    continue
                if request.use_structured_output and len(request.spec_token_ids) < count:
                    request.spec_token_ids = [*request.spec_token_ids, NO_TOKEN]
        _cap(self, draft_token_ids.req_ids)

    return wrapper


def _serves(scheduler: Any) -> bool:
    config = scheduler.vllm_config
    return config.use_v2_model_runner and is_ours(config.speculative_config)


def _cap(scheduler: Any, request_ids: Iterable[str]) -> None:
    if not _serves(scheduler):
        return
    table: RequestTable | None = getattr(scheduler, "vllm_dflash_requests", None)
    if table is None:
        table = scheduler.vllm_dflash_requests = RequestTable()
    table.forget(scheduler.requests)
    for request_id in request_ids:
        request = scheduler.requests.get(request_id)
        if request is None:
            continue
        most = table.options(request_id, request.sampling_params).max_draft_tokens
        if most is not None and len(request.spec_token_ids) > most:
            request.spec_token_ids = request.spec_token_ids[:most]
