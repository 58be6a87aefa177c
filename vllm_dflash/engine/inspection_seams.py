# SPDX-License-Identifier: Apache-2.0
"""What `vllm-dflash check` leans on in vLLM. Serving needs none of it, so these are held apart from the others."""

from __future__ import annotations

from vllm_dflash.engine.seam import Seam


def _used(module: str, name: str, parameters: tuple[str, ...] | None, why: str) -> Seam:
    return Seam(module, name, parameters, None, "check", why)


MODEL, CUDA = "vllm.config.model", "vllm.platforms.cuda"
SEAMS = (
    _used("vllm.entrypoints.cli.serve", "make_arg_parser", None, "the arguments of vllm serve"),
    _used("vllm.engine.arg_utils", "EngineArgs.from_cli_args", ("cls", "args"), "from them to EngineArgs"),
    _used("vllm.engine.arg_utils", "EngineArgs.create_model_config", ("self",), "the target as vLLM understands it"),
    _used("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("self", "usage_context"), "the whole of it"),
    _used("vllm.config.vllm", "VllmConfig.use_v2_model_runner", ("self",), "which runner"),
    _used("vllm.config.vllm", "HAS_TRITON", None, "decides it; set where a GPU is only named"),
    _used(
        "vllm.v1.attention.selector",
        "get_attn_backend",
        ("head_size", "dtype", "kv_cache_dtype", "use_mla", "has_sink"),
        "which attention backend, or why none",
    ),
    _used(MODEL, "ModelConfig.get_num_kv_heads", ("self", "parallel_config"), "KV bytes a token"),
    _used(MODEL, "ModelConfig.get_head_size", ("self",), "the same"),
    _used(MODEL, "ModelConfig.get_sliding_window", ("self",), "the same"),
    _used(
        MODEL, "ModelConfig.get_num_layers_by_block_type", ("self", "parallel_config", "block_type"), "attention layers"
    ),
    _used(CUDA, "CudaPlatformBase.get_device_capability", ("cls", "device_id"), "answered for a GPU that is named"),
    _used(CUDA, "CudaPlatformBase.get_device_total_memory", ("cls", "device_id"), "the same"),
    _used(CUDA, "CudaPlatformBase.get_device_name", ("cls", "device_id"), "the same"),
)
