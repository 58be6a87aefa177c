# SPDX-License-Identifier: Apache-2.0
"""A check as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from vllm_dflash.check.sizes import Sizes, shown_bytes
from vllm_dflash.checkpoint import DraftConfig, Finding
from vllm_dflash.engine.inspection import Inspection

MARKS = {"error": "ERROR  ", "warning": "warning"}


def as_json(inspection: Inspection, sizes: Sizes | None, findings: list[Finding], exit_code: int) -> dict[str, Any]:
    """The whole check as plain data; keys are stable."""
    draft = inspection.draft
    return {
        "exit_code": exit_code,
        "target": None if inspection.target is None else inspection.target.model_dump(),
        "draft": None
        if draft is None
        else {"name": inspection.draft_name, **draft.config.model_dump(mode="json"), "tensors": len(draft.tensors)},
        "served_by": "stock" if inspection.served_by_stock else "vllm-dflash",
        "settings": None if inspection.settings is None else asdict(inspection.settings),
        "sizes": None if sizes is None else asdict(sizes),
        "findings": [asdict(finding) for finding in findings],
    }


def as_text(inspection: Inspection, sizes: Sizes | None, findings: list[Finding], width: int = 100) -> str:
    """A table of facts, then the findings, each with what, why and fix."""
    facts = list(_facts(inspection, sizes))
    column = max((len(name) for name, _ in facts), default=0)
    lines = [f"{name:<{column}}  {value}" for name, value in facts]
    for finding in findings:
        lines.append("")
        lines += _wrapped(f"{MARKS[finding.severity]}  ", f"[{finding.code}] {finding.what}", width)
        lines += _wrapped("    why  ", finding.why, width) if finding.why else []
        lines += _wrapped("    fix  ", finding.fix, width) if finding.fix else []
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = len(findings) - errors
    verdict = "will not work" if errors else "will work"
    counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return "\n".join([*lines, "", f"This pair {verdict}: {counts}."])


def _wrapped(first: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _facts(inspection: Inspection, sizes: Sizes | None) -> Iterator[tuple[str, str]]:
    target, draft, settings = inspection.target, inspection.draft, inspection.settings
    if target is not None:
        yield "target", f"{target.name}: {_size(target.num_layers, target.hidden_size)}, {target.vocab_size} tokens"
    if inspection.served_by_stock:
        yield "draft", f"{inspection.draft_name}: not this package's kind, stock vLLM serves it"
    if draft is not None:
        yield from _draft_facts(inspection.draft_name or draft.source, draft.config)
    if settings is not None:
        yield "device", settings.device + (f", {shown_bytes(settings.memory)}" if settings.memory else "")
        yield "model runner", settings.runner
        backends = f"target {settings.target_backend or 'none'}, draft {settings.draft_backend or 'none'}"
        yield "attention backend", backends
        yield "KV cache", f"target {settings.kv_cache_dtype}, draft {settings.draft_kv_cache_dtype}"
        yield "drafts a step", f"{settings.num_speculative_tokens}, {settings.draft_sample_method}"
        yield "longest request", f"{settings.max_model_len} tokens"
        yield "batch", f"{settings.max_num_seqs} requests, {settings.max_num_batched_tokens} tokens a step"
    if sizes is not None and settings is not None:
        weights = f"target {shown_bytes(sizes.target_weights)}, draft {shown_bytes(sizes.draft_weights)} a device"
        yield "weights", weights
        target_kv, draft_kv = sizes.target_kv_bytes_per_token, sizes.draft_kv_bytes_per_token
        yield "KV a token", f"target {shown_bytes(target_kv)}, draft {shown_bytes(draft_kv)}"
        sparse = "" if sizes.q_sparse is None else f", sparse {shown_bytes(sizes.q_sparse)}"
        yield "q of a full batch", f"dense {shown_bytes(sizes.q_dense)}{sparse}"
        if sizes.state_slots:
            yield "state slots", f"{sizes.state_slots} a request of {shown_bytes(sizes.state_bytes)} each"
        if sizes.requests_that_fit is not None:
            yield (
                "room",
                f"{shown_bytes(sizes.kv_bytes)} for KV before activations and graphs: {sizes.requests_that_fit} "
                f"requests of {settings.max_model_len} tokens",
            )


def _draft_facts(name: str, config: DraftConfig) -> Iterator[tuple[str, str]]:
    kind = "DFlash 2" if config.is_dflash2 else "DFlash"
    yield "draft", f"{name}: {kind} ({config.declared_architecture}, dialect {config.dialect})"
    heads = f"{config.num_attention_heads}/{config.num_key_value_heads}/{config.head_dim}"
    size = _size(config.num_hidden_layers, config.hidden_size)
    yield "draft size", f"{size}, heads {heads}, MLP {config.intermediate_size}"
    yield "tapped layers", ", ".join(map(str, config.target_layer_ids)) + " (counted from 0)"
    yield "block", f"{config.block_size}: at most {config.num_draft_tokens} drafts"
    yield "mask token", str(config.mask_token_id)
    if config.reduced_vocabulary:
        yield "vocabulary", f"{config.draft_vocab_size} of the target's, mapped by d2t"
    yield "attention", _attention(config)
    rope = config.rope_parameters
    style = "neox" if config.is_neox_style else "interleaved"
    theta, longest = f"{rope['rope_theta']:g}", config.max_position_embeddings
    yield "RoPE", f"{rope['rope_type']}, theta {theta}, {style}, to position {longest}"
    if config.quant_method:
        yield "quantisation", config.quant_method


def _attention(config: DraftConfig) -> str:
    layers, causal = len(config.layer_windows), sum(config.layer_causal)
    windows = [window for window in config.layer_windows if window is not None]
    sizes = ", ".join(str(window) for window in sorted(set(windows)))
    reach = f"window {sizes} in {len(windows)} of {layers} layers" if windows else "full"
    order = {0: "non-causal", layers: "causal"}.get(causal, f"causal in {causal} layers")
    return f"{reach}; {order}"


def _size(layers: int, width: int) -> str:
    return f"{layers} layers, {width} wide"
