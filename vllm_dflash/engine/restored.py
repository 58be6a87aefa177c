# SPDX-License-Identifier: Apache-2.0
"""Positions whose KV a connector restored: from the scheduler, which knows them, to the worker, which must.

The scheduler hands the worker one number of computed tokens, whether they come from its own prefix cache (draft KV and
all) or from outside (the target's KV alone).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_dflash.engine.hooks import is_ours

ATTRIBUTE = "vllm_dflash_restored"


def allocate_slots(stock: Callable[..., Any]) -> Callable[..., Any]:
    """KVCacheManager.allocate_slots: notes on the request which positions it takes from outside."""

    @functools.wraps(stock)
    def wrapper(
        self: Any, request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        blocks = stock(self, request, num_new_tokens, num_new_computed_tokens, *args, **kwargs)
        # Positional: new_computed_blocks, num_lookahead_tokens, num_external_computed_tokens.
        external = kwargs.get("num_external_computed_tokens", args[2] if len(args) > 2 else 0)
        if external and blocks is not None:
            first = request.num_computed_tokens + num_new_computed_tokens
            setattr(request, ATTRIBUTE, (first, first + external))
        return blocks

    return wrapper


def schedule(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Scheduler.schedule: its output carries the notes of the requests in it, {request id: (first, end)}."""

    @functools.wraps(stock)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        if self.connector is not None and is_ours(self.vllm_config.speculative_config):
            notes = {}
            for request_id in output.num_scheduled_tokens:
                request = self.requests.get(request_id)
                if request is not None and hasattr(request, ATTRIBUTE):
                    notes[request_id] = getattr(request, ATTRIBUTE)
                    delattr(request, ATTRIBUTE)
            setattr(output, ATTRIBUTE, notes)
        return output

    return wrapper


def of(scheduler_output: Any) -> dict[str, tuple[int, int]]:
    """The notes of a step."""
    return getattr(scheduler_output, ATTRIBUTE, {})
