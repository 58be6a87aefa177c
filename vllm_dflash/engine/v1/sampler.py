# SPDX-License-Identifier: Apache-2.0
"""Verification on V1: stock's rejection sampler, with a sparse q and the package's own rejection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_dflash.engine.v1.logits import add_bias, apply_min_p
from vllm_dflash.spec_decode.verification import VerifyInputs, most_likely

if TYPE_CHECKING:
    from vllm_dflash.engine.v1.proposer import Proposer


class SparseRejectionSampler(RejectionSampler):
    """Judges the drafts of a `Proposer` by its own q. Without one attached it is stock's sampler, line for line."""

    proposer: Proposer | None = None

    def __init__(self, sampler: Any, spec_config: Any = None, device: torch.device | None = None) -> None:
        super().__init__(sampler, spec_config, device)
        self.standard = spec_config is not None and spec_config.rejection_sample_method == "standard"
        self._plain_sampling: SamplingMetadata | None = None

    def attach(self, proposer: Proposer) -> None:
        # Not a submodule: the proposer holds the runner, and the runner holds this sampler.
        object.__setattr__(self, "proposer", proposer)

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """logits [N + B, V]; -> sampled_token_ids [B, max drafts + 1] int32, -1 padded, and logprobs where asked."""
        if self.proposer is None or draft_probs is not None or not self.standard:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        # The runner makes other metadata when requests come or go, and only then anybody may ask for more.
        if sampling_metadata is self._plain_sampling or self._untouched(sampling_metadata):
            self._plain_sampling = sampling_metadata
            if sampling_metadata.all_greedy and self._nothing_to_judge(metadata):
                with self.proposer.worker.clock.stage("verify", rows=logits.shape[0]):
                    token_ids = most_likely(logits)
                return SamplerOutput(sampled_token_ids=_with_a_token(token_ids), logprobs_tensors=None)
            inputs = _verify_inputs(
                self.proposer,
                metadata,
                logits,
                sampling_metadata,
                draft_rows=metadata.target_logits_indices.to(torch.int64),
                bonus_rows=metadata.bonus_logits_indices.to(torch.int64),
                scaled=False,
            )
            output_ids, _ = self.proposer.worker.verify(inputs)
            return SamplerOutput(sampled_token_ids=_with_a_token(output_ids), logprobs_tensors=None)
        return self._forward_processed(metadata, logits, sampling_metadata)

    def _nothing_to_judge(self, metadata: SpecDecodeMetadata) -> bool:
        """Whether no row of this step holds a draft, and none judges one that was cut; then row b is request b's."""
        assert self.proposer is not None
        return not any(metadata.num_draft_tokens) and self.proposer.worker.block is None

    def _forward_processed(
        self, metadata: SpecDecodeMetadata, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> SamplerOutput:
        """With penalties, masks, top-k, top-p, processors or logprobs: stock's processing, then our rejection.

        The bonus row is drawn by the same noise as the others, so that a seeded request with as many drafts gives the
        same tokens whatever its neighbours ask for.
        """
        assert self.proposer is not None
        keep_raw = sampling_metadata.max_num_logprobs is not None and not self.is_processed_logprobs_mode
        raw_target = logits[metadata.target_logits_indices].to(torch.float32)
        raw_bonus = logits[metadata.bonus_logits_indices].to(torch.float32)
        # The bonus rows first, as in stock: that call brings the thinking budget's state up to date for both.
        bonus = self._process_bonus(raw_bonus.clone() if keep_raw else raw_bonus, sampling_metadata)
        target = raw_target.clone() if keep_raw else raw_target
        target = add_bias(target, metadata.num_draft_tokens, sampling_metadata)
        target = self.apply_logits_processors(target, sampling_metadata, metadata)
        target = _constrain(target, metadata.num_draft_tokens, sampling_metadata)

        drafts, requests = target.shape[0], bonus.shape[0]
        inputs = _verify_inputs(
            self.proposer,
            metadata,
            torch.cat([target, bonus]),
            sampling_metadata,
            draft_rows=torch.arange(drafts, device=target.device),
            bonus_rows=torch.arange(drafts, drafts + requests, device=target.device),
            scaled=True,
        )
        output_ids = _with_a_token(self.proposer.worker.verify(inputs)[0])
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                logits,
                raw_target if keep_raw else target,
                raw_bonus if keep_raw else bonus,
                output_ids,
            )
        return SamplerOutput(sampled_token_ids=output_ids, logprobs_tensors=logprobs)

    def _process_bonus(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> torch.Tensor:
        """Rows [B, V] of the bonus tokens, processed as stock's sampler does before it draws; over T where T > 0."""
        logits = self.sampler.apply_logits_processors(logits, sampling_metadata, True)
        if sampling_metadata.all_greedy:
            return logits
        logits = self.sampler.apply_temperature(logits, sampling_metadata.temperature, sampling_metadata.all_random)
        logits = apply_min_p(logits, None, sampling_metadata)
        return apply_top_k_top_p(logits, sampling_metadata.top_k, sampling_metadata.top_p)

    @staticmethod
    def _untouched(sampling_metadata: SamplingMetadata) -> bool:
        """Whether p is the softmax of the raw logits over T, and nobody asked for logprobs."""
        holder = sampling_metadata.thinking_budget_state_holder
        if (
            not sampling_metadata.no_penalties
            or sampling_metadata.allowed_token_ids_mask is not None
            or sampling_metadata.bad_words_token_ids
            or sampling_metadata.top_k is not None
            or sampling_metadata.top_p is not None
            or sampling_metadata.max_num_logprobs is not None
            or (holder is not None and holder.has_tracked_requests())
        ):
            return False
        for processor in sampling_metadata.logitsprocs.all:
            if isinstance(processor, MinPLogitsProcessor):
                active = processor.min_p_count > 0
            elif isinstance(processor, LogitBiasLogitsProcessor):
                active = bool(processor.biases)
            elif isinstance(processor, MinTokensLogitsProcessor):
                active = bool(processor.min_toks)
            else:
                active = True
            if active:
                return False
        return True


def _verify_inputs(
    proposer: Proposer,
    metadata: SpecDecodeMetadata,
    logits: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    draft_rows: torch.Tensor,
    bonus_rows: torch.Tensor,
    scaled: bool,
) -> VerifyInputs:
    """The runner's metadata of a verification as the worker takes it. scaled: logits are already over T."""
    request_ids = proposer.runner.input_batch.req_ids
    temperature = sampling_metadata.temperature
    if temperature is None:
        temperature = torch.zeros(len(request_ids), device=logits.device)
    elif scaled:
        temperature = (temperature > 0).to(torch.float32)
    counts = metadata.num_draft_tokens
    proposer.lengths.verified = sum(counts)
    cu_drafts = nn.functional.pad(metadata.cu_num_draft_tokens.to(torch.int32), (1, 0))
    per_request = torch.diff(cu_drafts)
    anchor_rows = metadata.logits_indices[(metadata.cu_num_sampled_tokens - per_request - 1).to(torch.int64)]
    positions = proposer.runner._get_positions(anchor_rows.to(torch.int64))
    seeds = proposer.seeds(sampling_metadata)
    return VerifyInputs(
        request_ids=request_ids,
        counts=counts,
        logits=logits,
        draft_rows=draft_rows,
        bonus_rows=bonus_rows,
        draft_ids=metadata.draft_token_ids.to(torch.int64),
        cu_drafts=cu_drafts,
        temperature=temperature,
        seeds=seeds,
        anchor_positions=positions if positions.dim() == 1 else positions[0],
    )


def _constrain(logits: torch.Tensor, counts: list[int], sampling_metadata: SamplingMetadata) -> torch.Tensor:
    """Rows [N, V] of requests with counts[i] rows each: over T where T > 0, then min-p, top-k and top-p.

    Stock's apply_sampling_constraints does the same on a GPU; its CPU kernel leaves the expanded parameters unset.
    """
    if sampling_metadata.all_greedy or logits.shape[0] == 0:
        return logits
    request_of = torch.repeat_interleave(torch.tensor(counts)).to(logits.device, non_blocking=True)

    def expanded(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else parameter[request_of]

    temperature = sampling_metadata.temperature
    logits = logits.div_(temperature.where(temperature > 0, 1.0)[request_of].unsqueeze(1))
    logits = apply_min_p(logits, request_of, sampling_metadata)
    return apply_top_k_top_p(logits, expanded(sampling_metadata.top_k), expanded(sampling_metadata.top_p))


def _with_a_token(output_ids: torch.Tensor) -> torch.Tensor:
    """A row of logits without a finite one yields no token; the engine needs one a step, and stock emits 0 there."""
    output_ids[:, 0].clamp_(min=0)
    return output_ids
