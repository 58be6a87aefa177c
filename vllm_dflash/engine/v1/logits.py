# SPDX-License-Identifier: Apache-2.0
"""min_p and logit_bias with speculation on V1: kept by the runner, and applied to every row that is judged.

Stock's V1 runner leaves both processors out of a speculating engine, and its verification would apply them to the bonus
rows alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_dflash.engine.hooks import is_ours


def build_logitsprocs(stock: Callable[..., LogitsProcessors]) -> Callable[..., LogitsProcessors]:
    """The runner's processors; for a DFlash engine all built-in ones, in the order of an engine that does not draft."""

    @functools.wraps(stock)
    def wrapper(
        vllm_config: Any,
        device: torch.device,
        is_pin_memory: bool,
        is_pooling_model: bool,
        custom_logitsprocs: Any = (),
    ) -> LogitsProcessors:
        if not is_ours(vllm_config.speculative_config) or is_pooling_model or custom_logitsprocs:
            return stock(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        kinds = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
        return LogitsProcessors(kind(vllm_config, device, is_pin_memory) for kind in kinds)

    return wrapper


def add_bias(logits: torch.Tensor, counts: list[int], sampling_metadata: SamplingMetadata) -> torch.Tensor:
    """Rows [N, V] of requests with counts[i] rows each, in place. Comes before the penalties, as without drafts."""
    for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
        if not isinstance(processor, LogitBiasLogitsProcessor) or not processor.biases:
            continue
        rows: list[int] = []
        tokens: list[int] = []
        biases: list[float] = []
        start = 0
        for request, count in enumerate(counts):
            for token, bias in processor.biases.get(request, {}).items():
                rows.extend(range(start, start + count))
                tokens.extend([token] * count)
                biases.extend([bias] * count)
            start += count
        if rows:
            index = torch.tensor([rows, tokens]).to(logits.device, non_blocking=True)
            logits[index[0], index[1]] += torch.tensor(biases, dtype=logits.dtype).to(logits.device, non_blocking=True)
    return logits


def apply_min_p(
    logits: torch.Tensor, request_of: torch.Tensor | None, sampling_metadata: SamplingMetadata
) -> torch.Tensor:
    """Rows [N, V] over T of requests request_of [N] (None: one row each), in place: -inf below min_p * max p."""
    for processor in sampling_metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            least = processor.min_p if request_of is None else processor.min_p[request_of]
            # p / max p of a token is exp(logit - max logit).
            logits.masked_fill_(logits - logits.amax(-1, keepdim=True) < least.log(), float("-inf"))
    return logits
