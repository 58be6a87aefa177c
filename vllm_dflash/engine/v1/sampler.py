# SPDX-License-Identifier: Apache-2.0
"""Verification on V1: stock's rejection sampler, with a sparse q and the package's own rejection."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler, apply_sampling_constraints
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

if TYPE_CHECKING:
    from vllm_dflash.engine.v1.proposer import Proposer


class SparseRejectionSampler(RejectionSampler):
    """Judges the drafts of a `Proposer` by its own q. Without one attached it is stock's sampler, line for line."""

    proposer: Proposer | None = None

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
        if self.proposer is None or draft_probs is not None or self.synthetic_mode:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        if self._untouched(sampling_metadata):
            inputs = self.proposer.verify_inputs(
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

    def _forward_processed(
        self, metadata: SpecDecodeMetadata, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> SamplerOutput:
        """With penalties, masks, top-k, top-p, processors or logprobs: stock's processing around our rejection."""
        assert self.proposer is not None
        with_logprobs = sampling_metadata.max_num_logprobs is not None
        bonus = self.sampler(
            logits=logits[metadata.bonus_logits_indices],
            sampling_metadata=replace(sampling_metadata, max_num_logprobs=-1 if with_logprobs else None),
            predict_bonus_token=True,
            logprobs_mode_override="processed_logits" if self.is_processed_logprobs_mode else "raw_logits",
        )
        raw = logits[metadata.target_logits_indices].to(torch.float32)
        keep_raw = with_logprobs and not self.is_processed_logprobs_mode
        target = self.apply_logits_processors(raw.clone() if keep_raw else raw, sampling_metadata, metadata)
        target = apply_sampling_constraints(target, metadata.cu_num_draft_tokens, sampling_metadata)

        inputs = self.proposer.verify_inputs(
            metadata,
            target,
            sampling_metadata,
            draft_rows=torch.arange(target.shape[0], device=target.device),
            bonus_rows=torch.full_like(metadata.bonus_logits_indices, -1, dtype=torch.int64),
            scaled=True,
        )
        output_ids, accepted = self.proposer.worker.verify(inputs)
        all_accepted = accepted == torch.diff(inputs.cu_drafts)
        at_end = torch.arange(output_ids.shape[1], device=output_ids.device) == accepted.unsqueeze(1)
        output_ids = torch.where(
            at_end & all_accepted.unsqueeze(1), bonus.sampled_token_ids.to(torch.int32), output_ids
        )
        output_ids = _with_a_token(output_ids)

        logprobs = None
        if with_logprobs:
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                logits,
                target if self.is_processed_logprobs_mode else raw,
                bonus.logprobs_tensors.logprobs,
                output_ids,
            )
        return SamplerOutput(sampled_token_ids=output_ids, logprobs_tensors=logprobs)

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


def _with_a_token(output_ids: torch.Tensor) -> torch.Tensor:
    """A row of logits without a finite one yields no token; the engine needs one a step, and stock emits 0 there."""
    output_ids[:, 0].clamp_(min=0)
    return output_ids
