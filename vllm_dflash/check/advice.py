# SPDX-License-Identifier: Apache-2.0
"""What a configuration that starts will still run into: attention, token budget, memory, state slots."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_dflash.check.sizes import Sizes, shown_bytes
from vllm_dflash.checkpoint import DraftCheckpoint, Finding
from vllm_dflash.engine.inspection import Settings


def advice(settings: Settings, draft: DraftCheckpoint, sizes: Sizes) -> list[Finding]:
    """Findings about `settings`, errors first."""
    found = [*_backends(settings, draft), *_budget(settings), *_memory(settings, sizes)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def _backends(settings: Settings, draft: DraftCheckpoint) -> Iterator[Finding]:
    kinds = "causal" if all(draft.config.layer_causal) else "non-causal"
    for whose, what, dtype in (
        ("target", "the target's attention", settings.kv_cache_dtype),
        ("draft", f"the draft's {kinds} attention", settings.draft_kv_cache_dtype),
    ):
        problem = settings.backend_problems.get(whose)
        if problem is None:
            continue
        fixes = []
        if whose == "draft" and "fp8" in dtype:
            fixes.append('keep the draft\'s KV unquantised ("kv_cache_dtype": "auto" in --speculative-config)')
        if whose == "draft":
            fixes.append('name another backend ("attention_backend" in --speculative-config)')
        else:
            fixes.append("name another with --attention-backend, or leave it out")
        yield Finding(
            f"{whose}_backend",
            "error",
            f"No attention backend serves {what} here (KV cache {dtype}): {problem[:500]}",
            "The server would end while it loads.",
            f"{'; or '.join(fixes).capitalize()}.",
        )


def _budget(settings: Settings) -> Iterator[Finding]:
    """vLLM's scheduler takes 1 + K rows to verify and K draft slots of max_num_batched_tokens a decoding request."""
    k, budget, most = settings.num_speculative_tokens, settings.max_num_batched_tokens, settings.max_num_seqs
    a_request = 2 * k + 1
    fit = budget // a_request
    if fit < most:
        yield Finding(
            "batched_tokens",
            "warning",
            f"max_num_batched_tokens is {budget}: with {k} drafts a decoding request takes {a_request} of it, so only "
            f"{fit} of the {most} requests of max_num_seqs are decoded in one step.",
            "The others wait for the next step without a word (vllm#53970).",
            f"Set --max-num-batched-tokens {most * a_request} or more, or --max-num-seqs {max(1, fit)}.",
        )


def _memory(settings: Settings, sizes: Sizes) -> Iterator[Finding]:
    if sizes.kv_bytes is None or sizes.requests_that_fit is None:
        return
    if sizes.kv_bytes <= 0:
        yield Finding(
            "memory",
            "error",
            f"The weights take {shown_bytes((sizes.target_weights or 0) + sizes.draft_weights)} a device, which is all "
            "of the memory that the server may use.",
            "There is no room for any KV.",
            "Use a larger --tensor-parallel-size, quantised weights, or more memory.",
        )
        return
    if sizes.requests_that_fit == 0:
        yield Finding(
            "memory",
            "error",
            f"One request of {settings.max_model_len} tokens takes {shown_bytes(sizes.request_bytes)} of KV, and "
            f"{shown_bytes(sizes.kv_bytes)} are left for it.",
            "vLLM does not start where one request of the full length cannot be held.",
            "Set a smaller --max-model-len, or a larger --gpu-memory-utilization.",
        )
        return
    if sizes.state_slots:
        slots = sizes.kv_bytes // max(1, sizes.state_slots * sizes.state_bytes)
        if slots < settings.max_num_seqs:
            yield Finding(
                "state_slots",
                "warning",
                f"The target keeps a state of {shown_bytes(sizes.state_bytes)} a sequence, and with "
                f"{settings.num_speculative_tokens} drafts {sizes.state_slots} of them: {slots} requests fit beside no "
                f"other KV, max_num_seqs is {settings.max_num_seqs}.",
                "More running requests than that preempt one another again and again.",
                f"Set --max-num-seqs {max(1, slots)} or less, or fewer num_speculative_tokens.",
            )
