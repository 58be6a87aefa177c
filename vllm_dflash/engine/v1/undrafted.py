# SPDX-License-Identifier: Apache-2.0
"""Steps without drafts on V1: as little beside plain decoding as can be.

Stock prepares and verifies such a step like any other, and where drafting doesn't pay, most steps are such.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_dflash.engine.v1.steps import worker_of


def calc_spec_decode_metadata(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner._calc_spec_decode_metadata: one row a request and no draft makes the same indices every time."""

    @functools.wraps(stock)
    def wrapper(self: Any, num_draft_tokens: Any, cu_num_scheduled_tokens: Any) -> Any:
        count = len(num_draft_tokens)
        if worker_of(self) is None or cu_num_scheduled_tokens[-1] != count:
            return stock(self, num_draft_tokens, cu_num_scheduled_tokens)
        known: dict[int, Any] = self.__dict__.setdefault("vllm_dflash_undrafted", {})
        if count not in known:
            known[count] = stock(self, num_draft_tokens, cu_num_scheduled_tokens)
        return known[count]

    return wrapper


def propose_draft_token_ids(stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner.propose_draft_token_ids, which asks first whether anybody gets drafts."""

    @functools.wraps(stock)
    def wrapper(
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if worker_of(self) is not None:
            taps = [hidden_states] if aux_hidden_states is None else aux_hidden_states
            if self.drafter.goes_without(scheduler_output.num_spec_tokens_to_schedule, taps, common_attn_metadata):
                return [[] for _ in self.input_batch.req_ids]
        return stock(
            self,
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            common_attn_metadata,
            *args,
            **kwargs,
        )

    return wrapper
