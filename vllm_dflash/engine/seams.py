# SPDX-License-Identifier: Apache-2.0
"""Every point where stock vLLM is extended or leaned on: where it is, what it must look like, what replaces it, why."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_dflash.engine import http_requests
from vllm_dflash.engine.seam import Seam
from vllm_dflash.engine.v2.seams import SEAMS as V2_SEAMS
from vllm_dflash.engine.versions import SUPPORTED


class SeamError(RuntimeError):
    """The installed vLLM does not look as the seams expect."""


RUNNER = "vllm.v1.worker.gpu_model_runner"
PROPOSER_BASE = "vllm.v1.spec_decode.llm_base_proposer"

SEAMS = (
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        ("self", "target_model_config", "target_parallel_config"),
        "hooks:create_speculative_config",
        "always",
        "fills in the drafter, K and the sampling method, and checks the pair before weights load",
    ),
    Seam(
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.init_device",
        ("self",),
        "hooks:init_device",
        "always",
        "the first call in a worker that knows the configuration and comes before the model runner is built",
    ),
    Seam(
        "vllm.config.vllm",
        "VllmConfig._get_v1_model_runner_unsupported_features",
        ("self",),
        "hooks:v1_unsupported_features",
        "config",
        "stock refuses DFlash 2 and mixed windows on V1; the package serves both there",
    ),
    Seam(
        "vllm.config.vllm",
        "VllmConfig._get_v2_model_runner_unsupported_features",
        ("self",),
        "hooks:v2_unsupported_features",
        "config",
        "refuses pipeline parallelism with synchronous scheduling, in which stock's V2 fails with any drafts",
    ),
    Seam(
        "vllm.sampling_params",
        "SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
        "requests:validate_spec_decode",
        "config",
        "refuses a bad request option in the front end, and admits min_p and logit_bias, which stock refuses",
    ),
    Seam(
        "vllm.model_executor.models.registry",
        "_SPECULATIVE_DECODING_MODELS",
        None,
        None,
        "config",
        "tells a draft of another kind, which is stock's, from an ordinary model",
    ),
    *(
        Seam(module, f"{name}.{http_requests.FIELD}", None, None, "config", "takes an object over HTTP too")
        for module, name in http_requests.REQUESTS
    ),
    *(
        Seam(module, f"{name}.{conversion}", ("self",), None, "config", "refuses a bad request option before a stream")
        for module, name in http_requests.REQUESTS
        for conversion in http_requests.CONVERSIONS.get(name, ())
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        "metrics:update_from_output",
        "config",
        "what a step measured goes to the front end with the step's statistics",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCoreProc.__init__",
        ("self", "vllm_config"),
        "metrics:engine_core",
        "config",
        "what runs, and how large it is, stands on /metrics before the first request",
    ),
    Seam(
        "vllm.v1.metrics.loggers",
        "StatLoggerManager.__init__",
        ("self", "vllm_config", "engine_idxs"),
        "metrics:stat_logger_manager",
        "config",
        "the front end makes its own metrics, and so does this package",
    ),
    Seam(
        "vllm.v1.metrics.loggers",
        "StatLoggerManager.record",
        ("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        "metrics:record",
        "config",
        "the front end counts what came with the statistics",
    ),
    Seam(
        RUNNER,
        "DFlashProposer",
        None,
        "v1.proposer:Proposer",
        "worker",
        "the runner builds its drafter from this name and checks it against this name",
        "v1",
    ),
    Seam(
        RUNNER,
        "RejectionSampler",
        None,
        "v1.sampler:SparseRejectionSampler",
        "worker",
        "the runner builds its verifier from this name",
        "v1",
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.allocate_slots",
        (
            "self",
            "request",
            "num_new_tokens",
            "num_new_computed_tokens",
            "new_computed_blocks",
            "num_lookahead_tokens",
            "num_external_computed_tokens",
        ),
        "restored:allocate_slots",
        "config",
        "positions that a KV connector restores have no draft KV",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule",
        ("self",),
        "restored:schedule",
        "config",
        "tells the worker which positions those are",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner._update_states",
        ("self", "scheduler_output"),
        "v1.context:update_states",
        "worker",
        "requests that enter, with blocks that hold draft KV or do not",
        "v1",
    ),
    Seam(
        RUNNER,
        "build_logitsprocs",
        None,
        "v1.logits:build_logitsprocs",
        "worker",
        "stock leaves min_p and logit_bias out of an engine that speculates",
        "v1",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner._sample",
        ("self", "logits", "spec_decode_metadata"),
        "v1.generators:sample",
        "worker",
        "a seeded request whose prompt comes in chunks ends stock's engine on a CPU",
        "v1",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner._model_forward",
        ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
        "v1.steps:model_forward",
        "worker",
        "the target's forward is timed: from here",
        "v1",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner.execute_model",
        ("self", "scheduler_output", "intermediate_tensors"),
        "v1.steps:execute_model",
        "worker",
        "to the end of this, logits included",
        "v1",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner.sample_tokens",
        ("self", "grammar_output"),
        "v1.steps:sample_tokens",
        "worker",
        "the end of a step: observers are told what became of the drafts and how long the stages took",
        "v1",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner._calc_spec_decode_metadata",
        ("self", "num_draft_tokens", "cu_num_scheduled_tokens"),
        "v1.undrafted:calc_spec_decode_metadata",
        "worker",
        "a step without drafts needs no indices of its own",
        "v1",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        (
            "self",
            "scheduler_output",
            "sampled_token_ids",
            "sampling_metadata",
            "hidden_states",
            "sample_hidden_states",
            "aux_hidden_states",
            "spec_decode_metadata",
            "common_attn_metadata",
            "slot_mappings",
        ),
        "v1.undrafted:propose_draft_token_ids",
        "worker",
        "a step without drafts is left before stock prepares for them",
        "v1",
    ),
    Seam(
        RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        ("self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens"),
        "v1.generators:bookkeeping_sync",
        "worker",
        "the same",
        "v1",
    ),
    Seam(
        "vllm.v1.spec_decode.dflash",
        "DFlashProposer.__init__",
        ("self", "vllm_config", "device", "runner"),
        None,
        "worker",
        "base class of the V1 proposer",
        "v1",
    ),
    Seam(
        PROPOSER_BASE,
        "SpecDecodeBaseProposer.propose",
        (
            "self",
            "num_speculative_tokens",
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "token_indices_to_sample",
            "common_attn_metadata",
            "sampling_metadata",
            "mm_embed_inputs",
            "num_rejected_tokens_gpu",
            "slot_mappings",
        ),
        None,
        "worker",
        "overridden: what the runner hands to a draft step",
        "v1",
    ),
    Seam(
        PROPOSER_BASE,
        "SpecDecodeBaseProposer._determine_batch_execution_and_padding",
        ("self", "num_tokens", "use_cudagraphs"),
        None,
        "worker",
        "pads the draft forward to a captured size and keeps data-parallel ranks in step",
        "v1",
    ),
    Seam(
        PROPOSER_BASE,
        "SpecDecodeBaseProposer.load_model",
        ("self", "target_model"),
        None,
        "worker",
        "loads the draft model and finds its attention layers",
        "v1",
    ),
    Seam(
        PROPOSER_BASE,
        "SpecDecodeBaseProposer._maybe_share_embeddings",
        ("self", "target_language_model"),
        None,
        "worker",
        "overridden: shares the target's embeddings",
        "v1",
    ),
    Seam(
        PROPOSER_BASE,
        "SpecDecodeBaseProposer._maybe_share_lm_head",
        ("self", "target_language_model"),
        None,
        "worker",
        "overridden: shares the target's lm_head",
        "v1",
    ),
    Seam(
        PROPOSER_BASE,
        "SpecDecodeBaseProposer.initialize_attn_backend",
        ("self", "kv_cache_config", "kernel_block_sizes"),
        None,
        "worker",
        "overridden: draft layers may be in several KV cache groups",
        "v1",
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
        None,
        "worker",
        "overridden: verification with a sparse q",
        "v1",
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.apply_logits_processors",
        ("self", "logits", "sampling_metadata", "metadata"),
        None,
        "worker",
        "penalties, masks and processors on the rows to verify",
        "v1",
    ),
    Seam(
        "vllm.v1.sample.sampler",
        "Sampler.apply_logits_processors",
        ("self", "logits", "sampling_metadata", "predict_bonus_token"),
        None,
        "worker",
        "penalties, masks and processors on the bonus rows",
        "v1",
    ),
    Seam(
        "vllm.v1.sample.sampler",
        "Sampler.apply_temperature",
        ("logits", "temp", "all_random"),
        None,
        "worker",
        "temperature on the bonus rows",
        "v1",
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "apply_top_k_top_p",
        ("logits", "k", "p"),
        None,
        "worker",
        "top-k and top-p on the bonus rows",
        "v1",
    ),
    Seam(
        "vllm.v1.worker.utils",
        "AttentionGroup.build_metadata_for_drafting",
        ("self", "common_attn_metadata", "draft_index"),
        None,
        "worker",
        "attention metadata of the draft block",
    ),
    Seam(
        "vllm.v1.attention.backends.registry",
        "register_backend",
        ("backend", "class_path"),
        None,
        "config",
        'gives "attention_backend": "XFORMERS" the place of a custom backend',
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale"),
        None,
        "worker",
        "overridden: the drafter's attention under the name XFORMERS",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionImpl.do_kv_cache_update",
        ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
        None,
        "worker",
        "overridden: the cache writes of the same",
    ),
    Seam(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor._apply_head",
        ("self", "lm_head", "hidden_states", "embedding_bias"),
        None,
        "worker",
        "a rank's own logits, for candidates over a split vocabulary",
    ),
    Seam(
        "vllm.model_executor.layers.logits_processor",
        "_topk",
        ("scores", "k"),
        None,
        "worker",
        "the same",
    ),
    Seam(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor.get_top_k_tokens",
        ("self", "lm_head", "hidden_states", "k"),
        None,
        "worker",
        "candidates over a vocabulary that one rank holds",
    ),
    *V2_SEAMS,
)

# Draft architectures that the package serves, as vLLM's registry names them after its own renaming.
ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlash2DraftModel",
    "MuseGlimmerAssistantModel",
    "DFlashMuseGlimmerAssistantModel",
)
DRAFTER = "vllm_dflash.drafter.model:DFlashDrafter"


def check(root: Path, seams: Iterable[Seam] = SEAMS) -> dict[Seam, str | None]:
    """Each seam against the source of a vLLM installation at `root` (the folder `vllm`): None, or what is wrong.

    Reads the source and imports nothing of it, so that a downloaded wheel can be checked too.
    """
    trees: dict[str, ast.Module | None] = {}
    found: dict[Seam, str | None] = {}
    for seam in seams:
        if seam.module not in trees:
            file = root.joinpath(*seam.module.split(".")[1:]).with_suffix(".py")
            trees[seam.module] = ast.parse(file.read_text()) if file.is_file() else None
        found[seam] = _problem(seam, trees[seam.module])
    return found


def _problem(seam: Seam, tree: ast.Module | None) -> str | None:
    if tree is None:
        return "the module is missing"
    node: ast.AST | None = tree
    for part in seam.name.split("."):
        node = _member(node, part)
        if node is None:
            return f"{part} is missing"
    if seam.parameters is None:
        return None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "it is no function"
    names = tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args))
    if names[: len(seam.parameters)] != seam.parameters:
        return f"it takes ({', '.join(names)}), expected ({', '.join(seam.parameters)})"
    return None


def _member(node: ast.AST | None, name: str) -> ast.AST | None:
    """A class, function, assignment or import of that name directly in a module's or class's body."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name:
            return child
        if isinstance(child, ast.Import | ast.ImportFrom):
            for alias in child.names:
                if (alias.asname or alias.name) == name:
                    return child
        if isinstance(child, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in child.targets):
            return child
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.target.id == name:
            return child
    return None


def require(root: Path, version: str) -> None:
    """Raise SeamError, one clear message, unless every seam holds for this installation."""
    broken = {seam: problem for seam, problem in check(root).items() if problem}
    if broken:
        listed = "".join(f"\n- {seam}: {problem}" for seam, problem in broken.items())
        raise SeamError(
            f"vllm-dflash does not fit vLLM {version}: it is written for vLLM {' and '.join(SUPPORTED)}, and these "
            f"points differ:{listed}\nInstall a supported vLLM, or run stock vLLM by leaving dflash out of "
            "VLLM_PLUGINS (for example VLLM_PLUGINS='')."
        )


def owner_of(seam: Seam) -> tuple[Any, str]:
    """The module or class that holds the seam's name, and the last part of that name."""
    owner: Any = importlib.import_module(seam.module)
    *path, last = seam.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, last
