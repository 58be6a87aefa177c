# SPDX-License-Identifier: Apache-2.0
"""Drafting on V1: hands the runner's tensors to the SpecDecodeWorker and the drafts back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_dflash.drafter.model import DFlashDrafter
from vllm_dflash.engine.limits import state_slots_warning
from vllm_dflash.engine.load_memory import enough_memory
from vllm_dflash.engine.requests import RequestTable
from vllm_dflash.engine.seeds import request_seeds
from vllm_dflash.engine.v1.attention import DraftAttentionGroups
from vllm_dflash.engine.v1.context import Bounds, DraftContext
from vllm_dflash.engine.v1.lengths import StepLengths, as_first_rank
from vllm_dflash.engine.v1.metrics import V1Metrics
from vllm_dflash.engine.v1.pending import PendingContext
from vllm_dflash.engine.v1.step_batch import StepBatch
from vllm_dflash.engine.worker_metrics import wanted
from vllm_dflash.spec_decode import Anchors, DraftPlan, FaultGuard, SpecDecodeWorker
from vllm_dflash.spec_decode.faults import FORWARD, WRITING

logger = init_logger(__name__)

# What a DFlash (v1) drafter keeps a slot when it is asked to sample; its checkpoint names no number.
CANDIDATES_WITHOUT_SELECTOR = 16


class Proposer(DFlashProposer):
    """Stock's proposer to the runner (which checks for that class), the package's worker inside."""

    model: DFlashDrafter
    worker: SpecDecodeWorker
    plan: DraftPlan

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        rows = self.max_padded_query_tokens
        # Stock sizes input_ids by max_num_batched_tokens; max_num_seqs * (1 + K) can be more (vllm#53970).
        # Not what vLLM made of it: 0.33 raises the derived one to the target's.
        self.users_limit = self.speculative_config.max_model_len or self.max_model_len
        self.requests = RequestTable()
        self.batch = StepBatch([], [], False)
        self.asked: dict[str, int] = {}
        self.input_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)

    def load_model(self, target_model: nn.Module) -> None:
        source = self.speculative_config.draft_model_config
        with enough_memory(source.model, source.revision):
            super().load_model(target_model)
        config = self.model.draft_config
        probabilistic = self._enable_probabilistic_draft_probs
        without_selector = CANDIDATES_WITHOUT_SELECTOR if probabilistic else 1
        self.worker = SpecDecodeWorker(
            self.model,
            config.mask_token_id,
            self.speculative_config.num_speculative_tokens,
            config.selector_top_k or without_selector,
            probabilistic,
            self.device,
        )
        self.lengths = StepLengths(self.runner, self.worker)
        self.runner.vllm_dflash_metrics = V1Metrics(self.runner, self.worker) if wanted(self.vllm_config) else None
        # The runner stops drafting for the whole batch, and so leaves a hole in the draft KV, when one request nears
        # this length. Here each request has its own limit.
        self.draft_range = min(self.model.position_range, self.users_limit)
        self.faults = FaultGuard(self.worker.tally, lambda: self.worker.clock.step)
        self.worker.on_non_finite = self._non_finite
        self.model.on_failed_load = self.faults.failed_load
        self.model.on_new_weights = self.lengths.planner.controller.renewed
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            self.worker.hear_alike()
        self.runner.effective_drafter_max_model_len = self.max_model_len + self.worker.drafts + 1
        self.runner.rejection_sampler.attach(self)

    @property
    def limit(self) -> int:
        """The first position that no draft may take: the longest sequence, or the end of the draft's range.

        Read a step, since the runner may shorten the longest sequence after profiling.
        """
        return min(self.runner.max_model_len, self.draft_range)

    def _maybe_share_embeddings(self, target_language_model: nn.Module) -> None:
        if self.model.has_own_embed_tokens:
            return
        inner: Any = target_language_model.model
        self.model.share(embed_tokens=inner.embed_tokens if hasattr(inner, "embed_tokens") else inner.embedding)

    def _maybe_share_lm_head(self, target_language_model: nn.Module) -> None:
        if not self.model.has_own_lm_head:
            self.model.share(lm_head=target_language_model.lm_head)

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        self.attention = DraftAttentionGroups(
            self.vllm_config,
            self.device,
            self.model,
            kv_cache_config,
            kernel_block_sizes,
            self.max_padded_query_tokens,
        )
        self.draft_attn_groups = self.attention.stock_groups
        # The runner hands out the attention metadata of one KV cache group: the first of ours.
        self.kv_cache_gid = self.attention.groups[0].kv_cache_gid
        self.block_size = self.attention.groups[0].block_size
        self.context = DraftContext(self.runner, *self.attention.longest_group(kv_cache_config))
        max_seqs = self.vllm_config.scheduler_config.max_num_seqs
        self.pending = PendingContext(self.model, self.attention, max_seqs, self.device)
        # Data-parallel ranks run their forwards in step, so there every rank drafts for all.
        self.in_step = self.vllm_config.parallel_config.data_parallel_size > 1
        # An asynchronous scheduler has planned drafts for all, and a KV connector saves blocks as the step ends.
        self.may_wait = not (self.in_step or self.runner.use_async_scheduling or self.vllm_config.kv_transfer_config)
        self.planned = False
        # Engines that torchrun starts for the ranks of one model: each gives a request an id of its own.
        parallel = self.vllm_config.parallel_config
        several = parallel.tensor_parallel_size > 1
        self.launched_apart = several and parallel.distributed_executor_backend == "external_launcher"
        warning = state_slots_warning(kv_cache_config, max_seqs, self.speculative_config.num_speculative_tokens)
        if warning:
            logger.warning("%s", warning)

    def take_last_draft_probs(self) -> None:
        """Never a dense q."""
        return None

    @torch.inference_mode()
    def propose(  # type: ignore[override]
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor | list[list[int]]:
        """taps [T, F*Ht] of this step's rows and the next anchors [B] -> drafts [B, K]; lists where some lack."""
        cad = common_attn_metadata
        request_ids = self.runner.input_batch.req_ids
        planned, self.planned = self.planned, False
        positions = target_positions if target_positions.dim() == 1 else target_positions[0]
        tables = self.attention.block_tables(self.runner.input_batch, cad)

        if planned:
            # This step's rows go with those of the steps before it.
            self._keep([target_hidden_states], request_ids)
            if not self.write_pending():
                self.plan.skip_all("fault")
        else:
            self._tidy(request_ids)
            bounds = self.context.bounds(request_ids, cad, num_rejected_tokens_gpu is not None)
            self.write_pending()
            written = self.faults.enabled
            if written:
                try:
                    self._inject(target_hidden_states, positions, cad, num_rejected_tokens_gpu, tables)
                    self.faults.worked(WRITING)
                except Exception as error:
                    self.faults.exception(WRITING, error)
                    self.context.missed(request_ids, cad, bounds)
                    written = False
            self._plan(request_ids, num_speculative_tokens, cad.num_actual_tokens, bounds if written else None)
        self._count_skipped()
        rows = self.plan.rows
        if num_speculative_tokens == 0 or not (rows or self.in_step):
            return self._none(len(request_ids), num_speculative_tokens)

        context_lens = cad.seq_lens if num_rejected_tokens_gpu is None else cad.seq_lens - num_rejected_tokens_gpu
        context_lens = context_lens.to(torch.int64)
        seeds = self.seeds(sampling_metadata)
        temperature = sampling_metadata.temperature
        anchors = Anchors(
            request_ids,
            next_token_ids.to(torch.int64),
            context_lens,
            torch.zeros(len(request_ids), device=self.device) if temperature is None else temperature,
            seeds,
            self.limit,
            self.plan.lengths,
        )
        everyone = self.in_step or len(rows) == len(request_ids)
        if not everyone:
            at = torch.tensor(rows).to(self.device, non_blocking=True)
            anchors = anchors.select(rows, at)
            tables = [table[at] for table in tables]
        try:
            block = self.worker.draft(anchors, self._block_forward(anchors, tables, cad, None if everyone else rows))
        except Exception as error:
            self.faults.exception(FORWARD, error)
            self.worker.tally.skip("fault", len(rows))
            return self._none(len(request_ids), num_speculative_tokens)
        drafts = block.token_ids
        if not everyone:
            drafts = drafts.new_full((len(request_ids), self.worker.drafts), -1)
            drafts[at] = block.token_ids
        return self._hand_over(drafts[:, :num_speculative_tokens])

    def goes_without(self, drafts: int, taps: Sequence[torch.Tensor], cad: CommonAttentionMetadata) -> bool:
        """Whether nobody gets drafts in this step, decided before anything is prepared for them; `drafts` are asked
        for. The step's rows, taps F of [T, Ht], are kept for later then.
        """
        rows = cad.num_actual_tokens
        request_ids = self.runner.input_batch.req_ids
        enabled = self.faults.enabled
        # Rows beside one a request are drafts, of which some were rejected, or belong to a prompt.
        if not self.may_wait or (enabled and rows != len(request_ids)):
            return False
        if not self.pending.has_room(rows):
            self.write_pending()
        if not self.pending.steps:  # else the requests are those of the step before
            self._tidy(request_ids)
        bounds: Bounds | None = [] if enabled else None
        if enabled and not self.context.all_unlimited(1 + max(self.batch.computed), self.limit):
            bounds = self.context.bounds(request_ids, cad, False)
        plan = self._plan(request_ids, drafts, rows, bounds)
        if drafts and plan.rows:
            self.planned = True
            return False
        self._count_skipped()
        if not enabled:
            return True
        self._keep(taps, request_ids)
        if self.pending.is_due:
            self.write_pending()
        return True

    def _count_skipped(self) -> None:
        for reason, count in self.plan.skipped.items():
            self.worker.tally.skip(reason, count)

    def _keep(self, taps: Sequence[torch.Tensor], request_ids: list[str]) -> None:
        several = self.runner.uses_mrope
        rotary_positions = self.runner._get_positions(len(request_ids))[0] if several else None
        self.pending.keep(
            taps, self.runner.input_batch.block_table, request_ids, self.batch.computed, rotary_positions
        )

    def write_pending(self) -> bool:
        """Writes the context that is kept, if any; False: it could not be, and nobody will attend to it."""
        pending = self.pending
        if not pending.rows:
            return True
        written = self.faults.enabled
        if written:
            try:
                with self.worker.clock.stage("inject", rows=pending.rows):
                    pending.write()
                self.faults.worked(WRITING)
            except Exception as error:
                self.faults.exception(WRITING, error)
                self.context.missed_spans(pending.spans())
                written = False
        pending.clear()
        return written

    def _tidy(self, request_ids: list[str]) -> None:
        """Forgets blocks that were verified, and whatever belongs to requests that have ended."""
        requests = self.runner.requests
        if self.worker.block is not None:
            self.worker.forget(set(request_ids), requests)
        self.requests.forget(requests)
        self.context.validity.forget(requests)

    def _plan(self, request_ids: list[str], drafts: int, target_rows: int, bounds: Bounds | None) -> DraftPlan:
        """How many drafts each request gets in this step: at most `drafts`, which the engine asks for.

        bounds: its context tokens, empty where nobody is near a limit; None: this step's context was not written.
        """
        plan = DraftPlan(len(request_ids), drafts)
        # Rows without a sampled token are in the midst of their prompt.
        for row in self.batch.without_token:
            plan.cap(row, 0, "prompt")
        if not self.pending.steps:  # else the requests are those of the step before
            self.asked = self._asked(request_ids)
        for row, request_id in enumerate(request_ids if self.asked else ()):
            if request_id in self.asked:
                plan.cap(row, self.asked[request_id], "request")
        if bounds is None:
            plan.skip_all("fault")
        else:
            self.context.cap(plan, request_ids, bounds, self.limit, self.attention)
        self.lengths.cap(plan, request_ids, target_rows, len(self.batch.without_token))
        self.plan = plan
        return plan

    def _asked(self, request_ids: list[str]) -> dict[str, int]:
        """The most drafts of those that asked for fewer."""
        requests = self.runner.requests
        options = ((name, self.requests.options(name, requests[name].sampling_params)) for name in request_ids)
        return {name: one.max_draft_tokens for name, one in options if one.max_draft_tokens is not None}

    def _non_finite(self, bad: list[str], requests: int) -> None:
        """Of so many drafted requests these came out as NaN or infinite: their context so far is not used again."""
        self.faults.non_finite(len(bad), requests)
        self.context.restart(bad)
        self.worker.leave_behind(bad)

    def _inject(
        self,
        taps: torch.Tensor,
        positions: torch.Tensor,
        cad: CommonAttentionMetadata,
        num_rejected: torch.Tensor | None,
        tables: list[torch.Tensor],
    ) -> None:
        """Write the draft KV of this step's verified rows; rejected rows get slot -1 and write nothing."""
        rows = taps.shape[0]
        valid = None
        if rows == cad.num_reqs and num_rejected is None:
            # A step without drafts to verify: as little beside plain decoding as can be.
            request_of = torch.arange(rows, device=taps.device)
        else:
            starts = cad.query_start_loc.to(torch.int64)
            request_of = torch.repeat_interleave(
                torch.arange(cad.num_reqs, device=taps.device), torch.diff(starts), output_size=rows
            )
            if num_rejected is not None:
                row = torch.arange(rows, device=taps.device)
                valid = row < (starts[1:] - num_rejected)[request_of]
        with self.worker.clock.stage("inject", rows=rows):
            self.attention.write_context(self.model.combine_hidden_states(taps), positions, request_of, valid, tables)

    def _block_forward(
        self, anchors: Anchors, tables: list[torch.Tensor], cad: CommonAttentionMetadata, rows: list[int] | None
    ) -> Any:
        """The drafter's forward in the attention context of these anchors, the `rows` of the batch of `cad`."""
        lengths = anchors.lengths or [self.worker.drafts] * len(anchors.request_ids)
        # A request that gets no drafts is among them only to keep data-parallel ranks in step.
        starts: list[int] | None = [
            self.context.validity.start(request_id) if length else 0
            for request_id, length in zip(anchors.request_ids, lengths, strict=True)
        ]
        if not any(starts or ()):
            starts = None
        bound = cad.seq_lens_cpu_upper_bound
        if bound is not None and rows is not None:
            bound = bound[rows]

        def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            count = input_ids.shape[0]
            mode, padded, across_dp = self._determine_batch_execution_and_padding(count)
            self.input_ids[:count].copy_(input_ids)
            self.positions[:count].copy_(positions.clamp(max=self.limit - 1))
            metadata, slots = self.attention.block_metadata(
                anchors.positions,
                positions,
                tables,
                1 + self.worker.drafts,
                cad.max_seq_len,
                bound,
                self.limit,
                padded,
                starts,
            )
            with set_forward_context(
                metadata,
                self.vllm_config,
                num_tokens=padded,
                num_tokens_across_dp=across_dp,
                cudagraph_runtime_mode=mode,
                slot_mapping=slots,
            ):
                return self.model(self.input_ids[:padded], self.positions[:padded])[:count]

        return forward

    def _none(self, count: int, planned: int) -> torch.Tensor | list[list[int]]:
        """No draft for any of `count` requests, as the runner takes it."""
        if self.runner.use_async_scheduling:
            return torch.zeros(count, planned, dtype=torch.int64, device=self.device)
        return [[] for _ in range(count)]

    def _hand_over(self, drafts: torch.Tensor) -> torch.Tensor | list[list[int]]:
        """Drafts [B, k], -1 where there is none, as the runner takes them.

        The asynchronous scheduler has already planned k tokens a request, so there a missing draft becomes token 0;
        its row is rejected like any wrong draft.
        """
        if self.runner.use_async_scheduling:
            return drafts.clamp(min=0)
        if bool((drafts >= 0).all()):
            return drafts
        return [[token for token in row if token >= 0] for row in drafts.tolist()]

    def seeds(self, sampling_metadata: SamplingMetadata) -> torch.Tensor:
        """Of the noise of this step's requests, [B] int64 on the device."""
        seed = self.vllm_config.model_config.seed
        seeds = request_seeds(self.runner.input_batch.req_ids, sampling_metadata.generators, seed)
        if self.launched_apart:
            as_first_rank(seeds)
        return seeds.to(self.device, non_blocking=True)

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Context projection and one forward on padding, for profiling, warm-up and graph capture."""
        rows = min(num_tokens, self.max_query_tokens)
        mode, padded, across_dp = self._determine_batch_execution_and_padding(rows, use_cudagraphs=use_cudagraphs)
        weight = self.model.model.norm.weight
        self.worker.context_kv(
            torch.zeros(num_tokens, self.model.feature_size, dtype=weight.dtype, device=self.device),
            torch.zeros(num_tokens, dtype=torch.int64, device=self.device),
        )
        names = self._draft_attn_layer_names
        padding = torch.full((padded,), -1, dtype=torch.int64, device=self.device)
        with set_forward_context(
            None,
            self.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across_dp,
            cudagraph_runtime_mode=mode,
            slot_mapping=dict.fromkeys(names, padding) if slot_mappings else {},
        ):
            self.model(self.input_ids[:padded], self.positions[:padded])
