# SPDX-License-Identifier: Apache-2.0
"""The start-up warnings' arithmetic, on vLLM's own objects."""

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from vllm_dflash.engine.limits import scheduled_rows_warning, state_slots_warning, token_budget_warning


@pytest.mark.parametrize(
    "batched, seqs, drafts, words",
    [
        (3840, 256, 7, None),
        (3839, 256, 7, "Set --max-num-batched-tokens 3840, or --max-num-seqs 255."),
        (2048, 256, 8, "Set --max-num-batched-tokens 4352, or --max-num-seqs 120."),
        (10, 4, 7, "Set --max-num-batched-tokens 60, or draft fewer tokens."),
    ],
)
def test_the_token_budget_names_the_value_that_fits(batched, seqs, drafts, words):
    warning = token_budget_warning(batched, seqs, drafts)
    assert warning is None if words is None else warning is not None and warning.endswith(words)


@pytest.mark.parametrize(
    "scheduled, seqs, drafts, words",
    [
        (2048, 256, 7, None),
        (2047, 256, 7, "Set --max-num-scheduled-tokens 2048, or --max-num-seqs 255."),
        (5, 4, 7, "Set --max-num-scheduled-tokens 32, or draft fewer tokens."),
    ],
)
def test_a_limit_of_its_own_for_the_rows_of_a_step(scheduled, seqs, drafts, words):
    warning = scheduled_rows_warning(scheduled, seqs, drafts)
    assert warning is None if words is None else warning is not None and warning.endswith(words)


def cache(blocks: int, *specs) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)


def state(drafts: int) -> MambaSpec:
    return MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), num_speculative_blocks=drafts)


def test_state_slots_of_a_hybrid_target_name_the_requests_that_fit():
    """qwen38-27b-rtx3090#25: eight streams, each with 1+K state slots, thrashed on a card with room for fewer."""
    warning = state_slots_warning(cache(101, FULL, state(7), state(7)), 8, 7)
    assert warning is not None
    assert "takes at least 17 of them while 7 tokens are drafted: 5 requests fit" in warning
    assert "Set --max-num-seqs 5," in warning


def test_no_word_where_they_fit_or_the_target_has_no_state():
    assert state_slots_warning(cache(200, FULL, state(7), state(7)), 8, 7) is None
    assert state_slots_warning(cache(2, FULL), 256, 7) is None
