# SPDX-License-Identifier: Apache-2.0
"""Drafting on V2: stock's schedule of a draft step, with the package's worker and operations inside.

Stock prepares the rows, picks the graph and keeps data-parallel ranks in step. Replaced are the four things that a
step computes: the context rows, the block's forward and path, and what is kept of q. They use buffers that stay where
they are, so that stock's full CUDA graph of the draft step holds them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_dflash.checkpoint import load_draft
from vllm_dflash.drafter.model import DFlashDrafter
from vllm_dflash.engine.context_writer import ContextWriter
from vllm_dflash.engine.v2.context import DraftContext, leave_out
from vllm_dflash.engine.v2.lengths import Lengths, NextDrafts, StepLengths, as_first_rank
from vllm_dflash.engine.v2.loading import load_drafter
from vllm_dflash.engine.v2.steps import DraftStages
from vllm_dflash.spec_decode import Anchors, DraftSlots, FaultGuard, SpecDecodeWorker
from vllm_dflash.spec_decode.faults import FORWARD, WRITING

# What a DFlash (v1) drafter keeps a slot when its drafts are sampled, or their confidence is asked for.
CANDIDATES_WITHOUT_SELECTOR = 16


def init_speculator(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What the runner calls to build its speculator; applied only where the drafter is one of ours."""

    @functools.wraps(stock)
    def wrapper(vllm_config: VllmConfig, device: torch.device, req_states: Any) -> Speculator:
        return Speculator(vllm_config, device)

    return wrapper


class Speculator(DFlashSpeculator):
    """Stock's speculator to the runner (which checks for that class), the package's worker inside."""

    _speculator_name = "DFlash (vllm-dflash)"
    model: DFlashDrafter
    worker: SpecDecodeWorker
    draft_logits: DraftSlots | None
    # Of the step at hand; None where no scheduler of ours planned it: every request gets K then.
    drafts: NextDrafts | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        speculative = vllm_config.speculative_config
        # To stock a "greedy" drafter, so that it allocates no dense q.
        without_q = copy.copy(vllm_config)
        without_q.speculative_config = copy.copy(speculative)
        without_q.speculative_config.draft_sample_method = "greedy"
        super().__init__(without_q, device)
        assert self.draft_logits is None
        self.vllm_config.speculative_config = self.speculative_config = speculative
        source = speculative.draft_model_config
        layers = vllm_config.model_config.get_total_num_hidden_layers()
        config = load_draft(source.model, source.revision, num_target_layers=layers).config
        causal = [config.is_causal(index) for index in range(config.num_hidden_layers)]
        self.requires_non_causal = not all(causal)
        self.parallel_drafting_token_id = config.mask_token_id
        self.writer: ContextWriter | None = None
        self.goes_without = False
        # Where this step's context begins, if not everywhere at 0, and whose ends before it.
        self.starts: list[int] | None = None
        self.no_context: torch.Tensor | None = None
        self.written = False
        # Stock's verification of watermarks takes part in sampling the drafts, which ours would not tell it about.
        watermarks = getattr(vllm_config, "watermark_config", None) is not None
        probabilistic = speculative.draft_sample_method == "probabilistic" and not watermarks
        several = probabilistic or self.enable_adaptive_verification
        self.candidates = config.selector_top_k or (CANDIDATES_WITHOUT_SELECTOR if several else 1)
        if probabilistic:
            # The runner hands this on to the rejection sampler, where stock's would be a dense tensor.
            self.draft_logits = DraftSlots(self.max_num_reqs, self.num_speculative_steps, self.candidates, device)
        # Stock's buffers hold max_num_batched_tokens; so many requests may draft at once that it is more (vllm#53970).
        self.most_rows = max(self.max_num_tokens, self.max_num_reqs * self.num_query_per_req)
        self.input_buffers = InputBuffers(self.max_num_reqs, self.most_rows, device)
        self._ones = torch.ones(self.max_num_reqs, dtype=torch.float32, device=device)
        self._steps = torch.arange(self.num_query_per_req, device=device)
        self.without = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=device)
        # Ranks of one model hear at different times that drafts came out as NaN, and must verify the same rows: what
        # they do about it comes from the first of them, with the plan of a step.
        self.together = vllm_config.parallel_config.tensor_parallel_size > 1
        self.launched_apart = vllm_config.parallel_config.distributed_executor_backend == "external_launcher"
        self.restarts: dict[str, int] = {}
        self.restarting: set[str] = set()

    @property
    def max_model_len(self) -> int:
        """The first position that no draft may take: the longest sequence, or the end of the draft's range.

        Stock clamps positions and attended lengths to it. Read a step, since the runner may shorten the longest
        sequence after profiling.
        """
        longest: int = self.vllm_config.model_config.max_model_len
        return min(longest, self.draft_range) if hasattr(self, "draft_range") else longest

    @max_model_len.setter
    def max_model_len(self, value: int) -> None:
        """Stock of 0.32 sets it once."""

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        model = load_drafter(target_model, self.vllm_config, self.requires_non_causal)
        users = self.speculative_config.max_model_len or self.max_model_len
        self.draft_range = min(model.position_range, users)
        self.worker = SpecDecodeWorker(
            model,
            self.parallel_drafting_token_id,
            self.num_speculative_steps,
            self.candidates,
            self.draft_logits is not None,
            self.device,
        )
        self.stages = DraftStages(self.worker.clock)
        self.lengths = StepLengths(self.worker, self.vllm_config)
        self.faults = FaultGuard(self.worker.tally, lambda: self.worker.clock.step)
        self.worker.on_non_finite = self._non_finite
        model.on_failed_load = self.faults.failed_load
        model.on_new_weights = self.lengths.planner.controller.renewed
        return model

    def follow(self, scheduler_output: Any) -> int:
        """A step is scheduled -> computed positions in it without draft KV."""
        masked = self.context.follow(scheduler_output)
        self.restarting.difference_update(scheduler_output.finished_req_ids)
        if self.drafts is not None and self.drafts.restarts:
            self.context.restart(self.drafts.restarts)
            self.worker.leave_behind(list(self.drafts.restarts))
            self.restarting.difference_update(self.drafts.restarts)
        return masked

    def begin_step(self, input_batch: InputBatch) -> None:
        self.lengths.begin(input_batch, self.drafts)

    def next_lengths(self, input_batch: InputBatch, alive: Container[str]) -> Lengths:
        """At a step's end, for the scheduler: what it shall plan from now on. alive: requests that have not ended."""
        # It has planned one step more by then where it is a step ahead.
        ahead = 2 if self.vllm_config.scheduler_config.async_scheduling else 1
        undraftable = self.context.undraftable(input_batch, ahead, self.max_model_len)
        restarts, self.restarts = self.restarts, {}
        lengths = self.lengths.after(input_batch, alive, undraftable, restarts)
        # Elsewhere one scheduler plans for all ranks; engines that torchrun starts have one each.
        return as_first_rank(lengths, input_batch.req_ids) if self.launched_apart else lengths

    def propose(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.goes_without, self.starts, self.no_context = False, None, None
        if kwargs.get("dummy_run"):
            return super().propose(input_batch, *args, **kwargs)
        # Data-parallel ranks run their draft steps side by side, so there nobody leaves one out.
        in_step = self.dp_size > 1
        lengths = self._planned(input_batch)
        # Once speculation is off, nothing is planned any more.
        enabled = self.faults.enabled or self.together
        if not (enabled or in_step):
            return self._withdraw(input_batch)
        self.goes_without = not (any(lengths) or in_step)
        self.starts = self.context.starts(input_batch)
        if self.goes_without or self.starts is not None:
            # Eager: a captured draft step is run as a whole, and attends to the whole context.
            kwargs["is_profile"] = True
        self.batch, self.written = input_batch, False
        self.stages.begin(input_batch.num_tokens)
        try:
            if self.writer is not None:
                self.writer.refresh()
            drafts = super().propose(input_batch, *args, **kwargs)
        except Exception as error:
            self.stages.abandon()
            self.faults.exception(FORWARD if self.written else WRITING, error)
            if not self.written:
                self.context.missed(input_batch)
            self.worker.tally.skip("fault", sum(length > 0 for length in lengths))
            return self._withdraw(input_batch)
        self.stages.end(drafted=not self.goes_without)
        self.faults.worked(WRITING)
        if self.goes_without or not enabled:
            return self._withdraw(input_batch)
        if self.worker.clock.paused:
            return drafts
        count = input_batch.num_reqs
        out_of_range = self._anchor_positions(count) + 1 >= self.max_model_len
        self.worker.drafted(input_batch.req_ids, lengths, self.without[:count], out_of_range, self.no_context)
        return drafts

    def _planned(self, input_batch: InputBatch) -> list[int]:
        """Drafts of this step that each request gets rows for; counts those that get none."""
        if self.drafts is None:
            return [self.num_speculative_steps] * input_batch.num_reqs
        lengths = [self.drafts.lengths.get(request_id, 0) for request_id in input_batch.req_ids]
        enabled = self.faults.enabled
        for reason, count in self.drafts.skipped.items():
            self.worker.tally.skip(reason if enabled or reason != "unprofitable" else "fault", count)
        if not enabled:
            self.worker.tally.skip("fault", sum(length > 0 for length in lengths))
        return lengths

    def _withdraw(self, input_batch: InputBatch) -> torch.Tensor:
        """These requests have no drafts. Rows that are planned all the same hold token 0, judged as certain."""
        drafts = self.draft_tokens[: input_batch.num_reqs].zero_()
        self.without.fill_(True)
        if self.draft_logits is not None:
            self.draft_logits.clear(input_batch.idx_mapping)
        return drafts

    def _non_finite(self, bad: list[str], requests: int) -> None:
        """Of so many drafted requests these came out as NaN or infinite: their context so far is not used again."""
        if self.together:
            # Known already, and on its way through the scheduler.
            requests -= len(bad)
            bad = [request_id for request_id in bad if request_id not in self.restarting]
            requests += len(bad)
        self.faults.non_finite(len(bad), requests)
        if not bad:
            return
        starts = self.context.ends(bad, self.batch)
        if self.together:
            self.restarting.update(starts)
            self.restarts |= starts
        else:
            self.context.restart(starts)
            self.worker.leave_behind(bad)

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        if self.goes_without:
            return None
        if self.starts is not None:
            count, groups = len(self.starts), self.draft_kv_cache_group_ids
            self.no_context, left_out = leave_out(
                self.starts,
                self.context.block_sizes,
                [self.block_tables.input_block_tables[group][:count] for group in groups],
                self.input_buffers.seq_lens[:count],
                self._anchor_positions(count),
                self.num_query_per_req,
            )
            bound = kwargs["seq_lens_cpu_upper_bound"][:count] - torch.tensor(left_out, dtype=torch.int32)
            kwargs["seq_lens_cpu_upper_bound"] = bound.clamp(min=0)
        return super()._build_uniform_attn_metadata(*args, **kwargs)

    def _validate_local_argmax_reduction(self) -> None:
        """Candidates are always reduced over the ranks, never whole logits."""

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: Any,
    ) -> None:
        slots = block_tables.slot_mappings
        if slots.shape[1] < self.most_rows:
            block_tables.slot_mappings = slots.new_zeros(slots.shape[0], self.most_rows)
        super().set_attn(model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups)
        self.writer = None
        groups = self.draft_kv_cache_group_ids
        sizes = [block_tables.block_sizes[group] * self.dcp_size for group in groups]
        self.context = DraftContext(kv_cache_config, groups, sizes, self.num_speculative_steps)
        self._check_causality()

    def _check_causality(self) -> None:
        """Stock keeps one causality a KV cache group."""
        by_group: dict[int, set[bool]] = {}
        assert self._layer_group_idx is not None
        for group, causal in zip(self._layer_group_idx, self.model.get_draft_attn_causal(), strict=True):
            by_group.setdefault(group, set()).add(causal)
        if any(len(kinds) > 1 for kinds in by_group.values()):
            raise ValueError(
                "The drafter mixes causal and non-causal layers, and they share one KV cache group here. Leave out "
                "--disable-hybrid-kv-cache-manager, which puts layers with and without a window into one group."
            )

    def capture(self) -> None:
        self._writer()
        super().capture()

    def _writer(self) -> ContextWriter:
        """Made at the first step, once the caches are bound."""
        if self.writer is None:
            assert self._layer_group_idx is not None
            sizes = [
                self.block_tables.block_sizes[self.draft_kv_cache_group_ids[group]] for group in self._layer_group_idx
            ]
            self.writer = ContextWriter(self.model, sizes)
            groups = torch.tensor(self._layer_group_idx, device=self.device)
            self._layer_groups = groups if len(self.draft_kv_cache_group_ids) > 1 else None
        return self.writer

    def _precompute_context_kv(self, start: int, end: int, dummy_run: bool = False) -> None:
        features, positions = self.hidden_states[start:end], self.context_positions[start:end]
        if dummy_run:
            self.model.precompute_and_store_context_kv(features, positions)
            return
        writer = self._writer()
        slots = self._context_slot_mappings[:, start:end]
        own = slots[0] if self._layer_groups is None else slots.index_select(0, self._layer_groups)
        writer.write(features, positions, own)
        self.written = start == 0
        if not self.goes_without:
            self.stages.next("draft", 0)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        if self.goes_without:
            return
        drafts, block = self.num_speculative_steps, self.num_query_per_req
        rows = num_reqs * block
        if attn_metadata is not None:
            self._keep_to_the_limit(num_reqs)
        hidden = self._run_model(
            num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode
        )
        self.stages.next("select", num_reqs * drafts)
        slots = self.sample_idx_mapping[: num_reqs * drafts : drafts]
        known = slots.clamp(min=0)
        anchors = Anchors(
            (),
            self.input_buffers.input_ids[:rows:block].to(torch.int64),
            self._anchor_positions(num_reqs),
            self.temperature[known],
            self.seeds[known],
            self.max_model_len,
        )
        token_ids, candidate_ids, scores = self.worker.path(hidden[:rows].view(num_reqs, block, -1), anchors)
        if self.no_context is not None:
            token_ids = token_ids.masked_fill(self.no_context.unsqueeze(1), -1)
        torch.lt(token_ids[:, 0], 0, out=self.without[:num_reqs])
        if self.draft_logits is not None:
            self.draft_logits.write(slots, token_ids, candidate_ids, scores)
        # The target embeds what it is given, so a missing draft becomes token 0; it is judged as certain, like any
        # draft that was not sampled.
        self.draft_tokens[:num_reqs] = token_ids.clamp(min=0)
        if self.acceptance_estimator is not None:
            self.acceptance_estimator.predict(
                scores.flatten(0, 1),
                self.sample_idx_mapping[: num_reqs * drafts],
                self.sample_col[: num_reqs * drafts],
                self.draft_token_confidence_probs,
                self.temperature if self.draft_logits is None else self._ones,
            )

    def _anchor_positions(self, num_reqs: int) -> torch.Tensor:
        """[B] int64, as they are: stock's own query positions are clamped. -1 for a row of padding."""
        drafts = self.num_speculative_steps
        return self.sample_pos[: num_reqs * drafts : drafts] - 1

    def _keep_to_the_limit(self, num_reqs: int) -> None:
        """Rows at or past the limit own no slot; stock lets them write over the last block's rows."""
        block = self.num_query_per_req
        positions = self._anchor_positions(num_reqs).unsqueeze(1) + self._steps
        beyond = positions >= self.max_model_len
        for group in self.draft_kv_cache_group_ids:
            slots = self.block_tables.slot_mappings[group, : num_reqs * block]
            slots.view(num_reqs, block).masked_fill_(beyond, PAD_SLOT_ID)
