# SPDX-License-Identifier: Apache-2.0
"""Where stock's V2 runner is extended or leaned on. Held against 0.32 and 0.33 like the others of engine/seams.py."""

from __future__ import annotations

from vllm_dflash.engine.seam import Seam

RUNNER = "vllm.v1.worker.gpu.model_runner"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dflash.speculator"
BASE = "vllm.v1.worker.gpu.spec_decode.speculator"
REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"


def _used(module: str, name: str, parameters: tuple[str, ...] | None, why: str) -> Seam:
    return Seam(module, name, parameters, None, "worker", why, "v2")


SEAMS = (
    Seam(
        RUNNER,
        "init_speculator",
        None,
        "v2.speculator:init_speculator",
        "worker",
        "the runner builds its speculator by this name",
        "v2",
    ),
    Seam(
        RUNNER,
        "RejectionSampler",
        None,
        "v2.rejection:SparseRejectionSampler",
        "worker",
        "the runner builds its verifier from this name",
        "v2",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner.execute_model",
        ("self", "scheduler_output", "intermediate_tensors", "dummy_run"),
        "v2.steps:execute_model",
        "worker",
        "where a step begins",
        "v2",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner.sample",
        ("self", "hidden_states", "input_batch", "grammar_output"),
        "v2.steps:sample",
        "worker",
        "how many tokens each request got",
        "v2",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner.sample_tokens",
        ("self", "grammar_output"),
        "v2.steps:sample_tokens",
        "worker",
        "the end of a step: observers are told what became of the drafts and how long the stages took",
        "v2",
    ),
    _used(
        "vllm.v1.worker.gpu.async_utils",
        "StepTimingCollector.record_batch",
        ("self", "input_batch", "full_cudagraph"),
        "base class of the marks: the step's rows",
    ),
    _used(
        "vllm.v1.worker.gpu.async_utils",
        "StepTimingCollector.forward_start",
        ("self",),
        "called right before the target's forward",
    ),
    _used(SPECULATOR, "DFlashSpeculator.__init__", ("self", "vllm_config", "device"), "base class of the speculator"),
    _used(
        SPECULATOR,
        "DFlashSpeculator.propose",
        (
            "self",
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "temperature",
            "seeds",
            "dp_sync_state",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "mm_inputs",
            "is_profile",
            "num_speculative_tokens",
        ),
        "prepares a draft step, picks its graph and keeps data-parallel ranks in step",
    ),
    _used(
        SPECULATOR,
        "DFlashSpeculator._generate_draft",
        (
            "self",
            "num_reqs",
            "num_tokens_padded",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
        ),
        "overridden: the block's forward, the path through its candidates, and q",
    ),
    _used(
        SPECULATOR,
        "DFlashSpeculator._precompute_context_kv",
        ("self", "start", "end", "dummy_run"),
        "overridden: context rows go to the cache in one operation after the GEMM",
    ),
    _used(
        SPECULATOR,
        "DFlashSpeculator._run_model",
        ("self", "num_tokens", "attn_metadata", "slot_mappings", "num_tokens_across_dp", "cudagraph_runtime_mode"),
        "the drafter's forward in its attention context",
    ),
    _used(SPECULATOR, "DFlashSpeculator.capture", ("self",), "overridden: the cache's layout is found out before"),
    _used(
        SPECULATOR,
        "DFlashSpeculator.set_attn",
        ("self", "model_state", "kv_cache_config", "block_tables", "target_input_buffers", "target_attn_groups"),
        "overridden: the draft layers' cache groups and their causality",
    ),
    _used(
        SPECULATOR,
        "_prepare_dflash_inputs_kernel",
        None,
        "writes rows of padding with slot -1, request slot -1 and position 0, which ours relies on",
    ),
    _used(
        BASE,
        "DraftModelSpeculator.load_draft_model",
        ("self", "target_model", "target_attn_layer_names"),
        "overridden: loads the drafter",
    ),
    _used(
        BASE,
        "DraftModelSpeculator._validate_local_argmax_reduction",
        ("self",),
        "overridden: candidates are always reduced over the ranks",
    ),
    _used(
        "vllm.v1.worker.gpu.spec_decode.acceptance_estimator",
        "OnlineAcceptanceEstimator.predict",
        ("self", "logits", "idx_mapping", "draft_step", "confidence_probs", "temperature"),
        "adaptive verification: the confidence of each draft from its candidates' scores",
    ),
    _used(
        REJECTION,
        "RejectionSampler.__call__",
        ("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
        "overridden: gets the speculator's draft_logits, whose place the sparse q takes",
    ),
    _used(
        REJECTION,
        "RejectionSampler._verify",
        (
            "self",
            "logits",
            "draft_logits",
            "draft_sampled",
            "pos",
            "cu_num_logits",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "verify_draft_sampled",
        ),
        "overridden: verification with a sparse q",
    ),
    _used(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
        "rejection_sample",
        (
            "target_logits",
            "draft_logits",
            "draft_sampled",
            "cu_num_logits",
            "pos",
            "idx_mapping",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "temperature",
            "seed",
            "num_speculative_steps",
            "synthetic_conditional_rates",
        ),
        "block verification and synthetic acceptance",
    ),
    _used(
        "vllm.v1.worker.gpu.sample.sampler",
        "Sampler.apply_sampling_params",
        (
            "self",
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
        ),
        "temperature, penalties, masks, min_p, top-k and top-p on every row to verify",
    ),
    _used(
        "vllm.v1.worker.gpu.sample.gumbel",
        "gumbel_sample",
        ("logits", "expanded_idx_mapping", "temperature", "seed", "pos"),
        "the token of a request that has no drafts in a batch where others have",
    ),
    _used(
        "vllm.v1.worker.gpu.spec_decode.utils",
        "get_pp_safe_draft_load_config",
        ("load_config",),
        "a loader that works on the last pipeline stage alone",
    ),
)
