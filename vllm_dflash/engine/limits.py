# SPDX-License-Identifier: Apache-2.0
"""Limits that do not fit each other, told at start-up with the value that does."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec


def token_budget_warning(max_batched_tokens: int, max_seqs: int, drafts: int) -> str | None:
    """vllm#53970, vllm#51256: each decoding request costs 2K+1 of a step's tokens, and the surplus waits silently."""
    each = 2 * drafts + 1
    if max_batched_tokens >= max_seqs * each:
        return None
    return (
        f"max_num_batched_tokens is {max_batched_tokens}, but {max_seqs} decoding requests (max_num_seqs) with "
        f"{drafts} draft tokens take {max_seqs} x {each} = {max_seqs * each} a step: "
        + _advice("--max-num-batched-tokens", max_batched_tokens, max_seqs, each)
    )


def scheduled_rows_warning(max_scheduled: int, max_seqs: int, drafts: int) -> str | None:
    """The same of the rows that a step verifies, 1+K of each request, where they have a limit of their own."""
    each = 1 + drafts
    if max_scheduled >= max_seqs * each:
        return None
    return (
        f"max_num_scheduled_tokens is {max_scheduled}, but {max_seqs} decoding requests (max_num_seqs) with {drafts} "
        f"draft tokens have {max_seqs} x {each} = {max_seqs * each} rows a step: "
        + _advice("--max-num-scheduled-tokens", max_scheduled, max_seqs, each)
    )


def _advice(option: str, budget: int, max_seqs: int, each: int) -> str:
    """What happens where a request takes `each` of a step's `budget`, and what to set."""
    fit = budget // each
    other = f"--max-num-seqs {fit}" if fit else "draft fewer tokens"
    return f"more than {fit} of them wait for one another. Set {option} {max_seqs * each}, or {other}."


def state_slots_warning(kv_cache_config: KVCacheConfig, max_seqs: int, drafts: int) -> str | None:
    """A hybrid target keeps 1+K states a speculating request: with too few slots, requests preempt each other."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    each = sum(1 + spec.num_speculative_blocks for spec in specs if isinstance(spec, MambaSpec))
    if not each:
        return None
    # One block is the null block; a request needs one block of every other group as well.
    each += sum(not isinstance(spec, MambaSpec) for spec in specs)
    fit = (kv_cache_config.num_blocks - 1) // each
    if fit >= max_seqs:
        return None
    return (
        f"max_num_seqs is {max_seqs}, but the KV cache has {kv_cache_config.num_blocks} blocks, and a request of this "
        f"hybrid target takes at least {each} of them while {drafts} tokens are drafted: {fit} requests fit, and more "
        f"preempt each other. Set --max-num-seqs {max(fit, 1)}, draft fewer tokens, or give the cache more memory."
    )


def warnings(vllm_config: Any) -> list[str]:
    """What is known before the KV cache is made."""
    scheduler = vllm_config.scheduler_config
    drafts = vllm_config.speculative_config.num_speculative_tokens
    found = [token_budget_warning(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, drafts)]
    # vLLM sets it to max_num_batched_tokens unless the user did.
    scheduled = scheduler.max_num_scheduled_tokens
    if scheduled is not None and scheduled < scheduler.max_num_batched_tokens:
        found.append(scheduled_rows_warning(scheduled, scheduler.max_num_seqs, drafts))
    return [warning for warning in found if warning]
