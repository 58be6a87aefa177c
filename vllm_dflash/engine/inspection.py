# SPDX-License-Identifier: Apache-2.0
"""What a server would do with a pair: the configuration is built as `vllm serve` builds it, and nothing is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint import (
    CheckpointError,
    DraftCheckpoint,
    Finding,
    TargetFacts,
    check_pair,
    is_ours,
    load_draft,
    read_draft_config,
)
from vllm_dflash.engine import configuration, seams
from vllm_dflash.engine.inspection_seams import SEAMS


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind: how many, the bytes of KV a token and layer, and the window in tokens (None: all)."""

    layers: int
    bytes_per_token: int
    window: int | None = None

    def bytes_of(self, tokens: int) -> int:
        """Bytes of KV of one request with this many tokens."""
        return self.layers * self.bytes_per_token * (tokens if self.window is None else min(tokens, self.window))


@dataclass(frozen=True)
class Settings:
    """What the server's configuration says, per device where tensor parallelism splits it.

    memory: bytes of one device, None on a CPU. A backend is None where none can serve, and its problem says why.
    state_bytes: one state slot of all state-space layers, 0 for a pure transformer.
    """

    device: str
    memory: int | None
    memory_share: float
    runner: str
    target_backend: str | None
    draft_backend: str | None
    backend_problems: dict[str, str]
    model_dtype: str
    kv_cache_dtype: str
    draft_kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    draft_sample_method: str
    vocab_size: int
    tensor_parallel_size: int
    target_kv: tuple[LayerGroup, ...]
    draft_kv: tuple[LayerGroup, ...]
    state_bytes: int
    prefix_caching: bool
    async_scheduling: bool


@dataclass
class Inspection:
    """What was found out. `settings` is None where the configuration cannot be built."""

    target: TargetFacts | None = None
    draft_name: str | None = None
    draft: DraftCheckpoint | None = None
    served_by_stock: bool = False
    settings: Settings | None = None
    findings: list[Finding] = field(default_factory=list)


def engine_args(target: str, draft: str | None, serve_arguments: Sequence[str]) -> Any:
    """vLLM's EngineArgs of `vllm serve TARGET --speculative-config {"method": "dflash", "model": DRAFT} ...`.

    A --speculative-config among `serve_arguments` is kept; method and model are filled in. Exits as `vllm serve`
    does for arguments that it does not know. Raises ValueError where two drafts are named.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _require_seams()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm-dflash check"))
    namespace = parser.parse_args([target, *serve_arguments])
    namespace.model = target
    arguments = AsyncEngineArgs.from_cli_args(namespace)
    given = arguments.speculative_config
    given = json.loads(given) if isinstance(given, str) else dict(given or {})
    named = arguments.spec_model or given.get("model")
    if draft is not None and named not in (None, draft):
        raise ValueError(f"The draft is named twice: {draft}, and {named} in --speculative-config.")
    if arguments.spec_method is None:
        given.setdefault("method", "dflash")
    if draft is not None and named is None:
        given["model"] = draft
    arguments.speculative_config = given
    return arguments


def _require_seams() -> None:
    import vllm

    broken = {seam: why for seam, why in seams.check(Path(vllm.__file__).parent, SEAMS).items() if why}
    if broken:
        listed = "; ".join(f"{seam}: {why}" for seam, why in broken.items())
        raise ValueError(f"check does not fit the installed vLLM {vllm.__version__}: {listed}.")


def inspect(arguments: Any) -> Inspection:
    """Everything that speaks against these EngineArgs, from the same code that a server runs at its start."""
    result = Inspection()
    try:
        target = arguments.create_model_config()
        result.target = configuration.target_facts(target)
    except Exception as error:
        result.findings.append(_target_problem(arguments.model, error))
        result.target = _facts_without_vllm(arguments.model, arguments.revision)
        if result.target is None:
            return result
    try:
        request = configuration.asked_for(arguments)
        if request is None:
            method = (arguments.speculative_config or {}).get("method")
            raise CheckpointError(
                "method",
                f"The speculative method is {method}.",
                "Only dflash is this package's.",
                'Leave "method" out, or set it to "dflash".',
            )
        _check_draft(request, result.target, result)
    except ValueError as error:
        result.findings.append(_as_finding("draft", error))
    if any(finding.severity == "error" for finding in result.findings):
        return result
    try:
        config = _engine_config(arguments)
    except Exception as error:
        result.findings.append(_as_finding("configuration", error, "vLLM refuses this configuration"))
        return result
    result.settings = _settings(config, result.draft)
    return result


def _target_problem(name: str, error: Exception) -> Finding:
    finding = _as_finding("target", error, f"vLLM cannot serve the target {name}")
    if "failed to be inspected" not in finding.what:
        return finding
    why = "vLLM imports the target's code to configure it, and on this machine that import fails."
    fix = "Install what the import lacks (VLLM_LOGGING_LEVEL=DEBUG shows it); for multimodal targets often torchvision."
    return Finding(finding.code, "error", finding.what, why, fix)


def _facts_without_vllm(name: str, revision: str | None) -> TargetFacts | None:
    """The target's facts from its config.json alone, so that the pair is checked even where vLLM gives up on it."""
    try:
        return TargetFacts.from_hf_config(read_draft_config(name, revision), name)
    except CheckpointError:
        return None


def _check_draft(request: configuration.Request, target: TargetFacts, result: Inspection) -> None:
    name, revision = configuration.drafter_of(request, target.name)
    result.draft_name = name
    raw = read_draft_config(name, revision)
    if not is_ours(raw):
        result.served_by_stock = True
        return
    result.draft = load_draft(name, revision, num_target_layers=target.num_layers)
    result.findings += check_pair(
        target, result.draft.config, result.draft.tensors, configuration.asked_tokens(request)
    )


def _engine_config(arguments: Any) -> Any:
    from vllm.usage.usage_lib import UsageContext

    return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)


def _as_finding(code: str, error: Exception, what: str = "") -> Finding:
    """An exception as an error finding; a CheckpointError's own finding where it has one."""
    if isinstance(error, CheckpointError):
        return error.finding
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic: "1 validation error for X", then "  Value error, ..." and a line that points to its documentation.
    reasons = [line.partition("Value error, ")[2].partition(" [type=")[0] for line in lines if "Value error, " in line]
    reason = (reasons or lines or [type(error).__name__])[0][:600]
    text = f"{what}: {reason}" if what else reason
    return Finding(code, "error", text if text.endswith((".", "!", "?")) else text + ".")


def _settings(config: Any, draft: DraftCheckpoint | None) -> Settings:
    from vllm.platforms import current_platform

    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    speculative = config.speculative_config
    target_dtype = _kv_dtype(cache.cache_dtype, model)
    draft_dtype = _kv_dtype(speculative.kv_cache_dtype or cache.cache_dtype, speculative.draft_model_config)
    problems: dict[str, str] = {}
    tp = config.parallel_config.tensor_parallel_size
    return Settings(
        device=current_platform.get_device_name() if current_platform.is_cuda() else current_platform.device_name,
        memory=current_platform.get_device_total_memory() if current_platform.is_cuda() else None,
        memory_share=cache.gpu_memory_utilization,
        runner="V2" if config.use_v2_model_runner else "V1",
        target_backend=_target_backend(config, problems),
        draft_backend=_draft_backend(config, draft, problems),
        backend_problems=problems,
        model_dtype=_name(model.dtype),
        kv_cache_dtype=target_dtype,
        draft_kv_cache_dtype=draft_dtype,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_speculative_tokens=speculative.num_speculative_tokens,
        draft_sample_method=speculative.draft_sample_method,
        vocab_size=model.get_vocab_size(),
        tensor_parallel_size=tp,
        target_kv=_target_kv(config, bytes_of(target_dtype)),
        draft_kv=() if draft is None else draft_layers(draft, bytes_of(draft_dtype), tp),
        state_bytes=_state_bytes(config),
        prefix_caching=bool(cache.enable_prefix_caching),
        async_scheduling=bool(scheduler.async_scheduling),
    )


def draft_layers(draft: DraftCheckpoint, element_bytes: int, tensor_parallel_size: int = 1) -> tuple[LayerGroup, ...]:
    """The draft's KV layers by window, per device."""
    heads = max(1, draft.config.num_key_value_heads // tensor_parallel_size)
    per_token = 2 * heads * draft.config.head_dim * element_bytes
    windows = draft.config.layer_windows
    return tuple(LayerGroup(windows.count(window), per_token, window) for window in dict.fromkeys(windows))


def bytes_of(dtype: str) -> int:
    """Bytes of one element of a KV cache dtype's name."""
    if "fp8" in dtype or "int8" in dtype or "float8" in dtype:
        return 1
    return {"float32": 4, "float": 4}.get(dtype, 2)


def _kv_dtype(cache_dtype: str, model: Any) -> str:
    return _name(model.dtype) if cache_dtype == "auto" else str(cache_dtype)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _target_kv(config: Any, element_bytes: int) -> tuple[LayerGroup, ...]:
    """The target's attention layers as its config describes them; window layers by their layer_types."""
    model, parallel = config.model_config, config.parallel_config
    layers = model.get_num_layers_by_block_type(parallel, "attention")
    sides = 1 if model.use_mla else 2
    per_token = sides * model.get_num_kv_heads(parallel) * model.get_head_size() * element_bytes
    window = model.get_sliding_window()
    kinds = list(getattr(model.hf_text_config, "layer_types", None) or ())
    sliding = kinds.count("sliding_attention") if window else 0
    if not kinds and window:
        sliding = layers
    sliding = min(sliding, layers)
    groups = (LayerGroup(layers - sliding, per_token), LayerGroup(sliding, per_token, window))
    return tuple(group for group in groups if group.layers)


def _state_bytes(config: Any) -> int:
    """Bytes of one state slot over all state-space layers of a hybrid target, per device; 0 for others."""
    model = config.model_config
    if not model.is_hybrid:
        return 0
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.utils.torch_utils import get_dtype_size

    architecture = get_model_cls(model)
    shapes = architecture.get_mamba_state_shape_from_config(config)
    dtypes = architecture.get_mamba_state_dtype_from_config(config)
    slot = sum(math.prod(shape) * get_dtype_size(dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    attention = model.get_num_layers_by_block_type(config.parallel_config, "attention")
    return slot * (model.get_num_layers(config.parallel_config) - attention)


def _target_backend(config: Any, problems: dict[str, str]) -> str | None:
    model = config.model_config
    window = model.get_sliding_window()
    return _select(config, model, problems, "target", sliding=bool(window), sink=False)


def _draft_backend(config: Any, draft: DraftCheckpoint | None, problems: dict[str, str]) -> str | None:
    """The backend for the draft's layers, asked for as the runners do when they load it."""
    if draft is None:
        return None
    from dataclasses import replace

    speculative = config.speculative_config
    attention = replace(config.attention_config, use_non_causal=not all(draft.config.layer_causal))
    if config.use_v2_model_runner or speculative.attention_backend is not None:
        attention = replace(attention, backend=speculative.attention_backend)
    cache = config.cache_config
    if speculative.kv_cache_dtype is not None:
        cache = replace(cache, cache_dtype=speculative.kv_cache_dtype)
    own = replace(config, attention_config=attention, cache_config=cache)
    return _select(
        own,
        speculative.draft_model_config,
        problems,
        "draft",
        sliding=any(draft.config.layer_windows),
        sink=draft.config.attention_sink_bias,
    )


def _select(config: Any, model: Any, problems: dict[str, str], whose: str, *, sliding: bool, sink: bool) -> str | None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    try:
        with set_current_vllm_config(config):
            backend = get_attn_backend(
                model.get_head_size(),
                model.dtype,
                config.cache_config.cache_dtype,
                use_mla=model.use_mla,
                has_sink=sink,
                num_heads=model.get_num_attention_heads(config.parallel_config),
                has_sliding_window=sliding,
            )
        return backend.get_name()
    except (ValueError, NotImplementedError, ImportError) as error:
        problems[whose] = " ".join(str(error).split())
        return None
