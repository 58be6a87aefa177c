# SPDX-License-Identifier: Apache-2.0
"""Verification on V2: stock's rejection sampler, with a sparse q and the package's own rejection."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from vllm_dflash.engine.v2.steps import StepMarks
from vllm_dflash.engine.versions import rejection_options
from vllm_dflash.spec_decode import DraftSlots, VerifyRows, verify_rows


class SparseRejectionSampler(RejectionSampler):
    """Judges drafts by the candidates they were drawn from.

    Stock's other methods (block verification, synthetic acceptance, watermarks) keep stock's kernels. These know a
    dense q only: it is spread out for the requests at hand, for as long as their verification takes.
    """

    def __init__(self, sampler: Any, spec_config: Any, device: torch.device, **options: Any) -> None:
        super().__init__(sampler, spec_config, device, **options)
        self.standard = spec_config.rejection_sample_method == "standard" and self.watermark_key is None
        self.marks: StepMarks | None = None
        # By request slot: whether it has no draft to judge.
        self.undrafted = np.zeros(sampler.req_states.max_num_reqs, dtype=bool)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: DraftSlots | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """draft_logits: the DraftSlots of the speculator, None where its drafts were not sampled."""
        counts = input_batch.num_draft_tokens_per_req
        self.undrafted[:] = False
        if counts is not None:
            self.undrafted[input_batch.idx_mapping_np] = counts == 0
        if self.marks is None:
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        self.marks.end_target()
        with self.marks.clock.stage("verify", rows=logits.shape[0]):
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: DraftSlots | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> (processed logits [M, V], sampled [B, K + 1] int64, tokens sampled [B] int32), as stock's."""
        q = draft_logits
        if q is None and not self.standard:
            return super()._verify(
                logits,
                None,
                draft_sampled,
                pos,
                cu_num_logits,
                idx_mapping,
                idx_mapping_np,
                expanded_idx_mapping,
                expanded_local_pos,
                seq_lens_upper_bound_np,
                verify_draft_sampled,
            )
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        states = self.sampler.sampling_states
        temperature, seeds = states.temperature.gpu[idx_mapping], states.seeds.gpu[idx_mapping]
        if q is not None and not self.standard:
            requests = torch.arange(idx_mapping.shape[0], device=idx_mapping.device)
            sampled, num_sampled = rejection_sample(
                processed,
                q.dense(idx_mapping, temperature, processed.shape[1]),
                verify_draft_sampled,
                cu_num_logits,
                pos,
                requests,
                _expanded(requests, cu_num_logits, processed.shape[0]),
                expanded_local_pos,
                temperature,
                seeds,
                self.num_speculative_steps,
                self.synthetic_conditional_rates,
                use_fp64=self.sampler.use_fp64_gumbel,
                use_block_verification=self.use_block_verification,
                **rejection_options(self),
            )
            return processed, sampled, num_sampled
        if verify_draft_sampled is not draft_sampled:
            draft_sampled = _without_invalid(processed, draft_sampled, verify_draft_sampled)
        output_ids, accepted = verify_rows(
            VerifyRows(
                processed,
                draft_sampled,
                pos,
                cu_num_logits,
                idx_mapping,
                (temperature > 0).to(torch.float32),
                seeds,
            ),
            q,
            self.num_speculative_steps,
        )
        # A row without a finite logit yields no token; the engine needs one, and stock emits 0 there.
        sampled = output_ids.to(torch.int64).clamp_(min=0)
        rows = np.flatnonzero(self.undrafted[idx_mapping_np])
        if rows.size:
            at = torch.from_numpy(rows).to(sampled.device, non_blocking=True)
            sampled[at, 0] = self._as_undrafted(processed, pos, (cu_num_logits[1:] - 1)[at], idx_mapping[at])
        return processed, sampled, accepted + 1

    def _as_undrafted(
        self, processed: torch.Tensor, pos: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [b] of requests without drafts, from their only row [b]: those of stock's sampler, which serves where
        nobody in the batch has any. So the first token of a seeded request does not hang on its neighbours."""
        states = self.sampler.sampling_states
        return gumbel_sample(
            processed[rows],
            slots,
            states.temperature.gpu,
            states.seeds.gpu,
            pos[rows],
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )


def _expanded(values: torch.Tensor, cu_rows: torch.Tensor, rows: int) -> torch.Tensor:
    """values [B] -> [rows], each as often as its request has rows."""
    return torch.repeat_interleave(values, (cu_rows[1:] - cu_rows[:-1]).to(torch.int64), output_size=rows)


def _without_invalid(processed: torch.Tensor, drafts: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Tokens [M] to verify, where `valid` is -1 for a draft that the grammar cut off.

    Whether a sampled draft was cut depends on the token, so sampling anew from p there would be biased. Its own row
    forbids it: judged by its own q it is rejected for certain, and what follows is exact. Only a draft that its row
    does not forbid becomes "no draft", since the rows behind it know no grammar.
    """
    rows = torch.arange(drafts.shape[0], device=drafts.device)
    judged_by = (rows - 1).clamp(min=0)
    forbidden = processed[judged_by, drafts.clamp(min=0).to(torch.int64)] == -torch.inf
    return torch.where((valid >= 0) | forbidden, drafts, -1)
