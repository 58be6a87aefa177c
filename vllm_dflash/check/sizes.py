# SPDX-License-Identifier: Apache-2.0
"""What a pair takes of a device's memory, from its configuration alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_dflash.checkpoint import DraftCheckpoint, TensorInfo
from vllm_dflash.checkpoint.safetensors_header import tensor_bytes
from vllm_dflash.engine.inspection import Settings

# A candidate of the sparse q: an int64 id and an fp32 logit (spec_decode/draft_block.py).
CANDIDATE_BYTES = 8 + 4
DENSE_Q_BYTES = 4


@dataclass(frozen=True)
class Sizes:
    """Bytes, per device. A None could not be known.

    kv_bytes: what is left for KV and states. request_bytes: one request of max_model_len tokens, state slots with it.
    state_slots: a request's, 0 for a pure transformer.
    """

    target_weights: int | None
    draft_weights: int
    draft_kv_bytes_per_token: int
    target_kv_bytes_per_token: int
    q_dense: int
    q_sparse: int | None
    request_bytes: int
    state_slots: int
    state_bytes: int
    kv_bytes: int | None
    requests_that_fit: int | None


def weight_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Bytes of the weights, from their headers."""
    return sum(tensor_bytes(info) for info in tensors)


def sizes(settings: Settings, draft: DraftCheckpoint, target_weights: int | None, memory: int | None) -> Sizes:
    """The sizes of a pair. target_weights: bytes of all its weights; memory: of one device, instead of its own."""
    k, parallel = settings.num_speculative_tokens, settings.tensor_parallel_size
    per_device = None if target_weights is None else math.ceil(target_weights / parallel)
    draft_weights = math.ceil(weight_bytes(draft.tensors.values()) / parallel)
    candidates = draft.config.selector_top_k
    rows = settings.max_num_seqs * k
    state_slots = 1 + k if settings.state_bytes else 0
    groups = (*settings.target_kv, *settings.draft_kv)
    request = sum(group.bytes_of(settings.max_model_len) for group in groups) + state_slots * settings.state_bytes
    total = settings.memory if memory is None else memory
    left = None
    if total is not None and per_device is not None:
        left = int(total * settings.memory_share) - per_device - draft_weights
    return Sizes(
        target_weights=per_device,
        draft_weights=draft_weights,
        draft_kv_bytes_per_token=sum(group.layers * group.bytes_per_token for group in settings.draft_kv),
        target_kv_bytes_per_token=sum(group.layers * group.bytes_per_token for group in settings.target_kv),
        q_dense=rows * settings.vocab_size * DENSE_Q_BYTES,
        q_sparse=None if candidates is None else rows * candidates * CANDIDATE_BYTES,
        request_bytes=request,
        state_slots=state_slots,
        state_bytes=settings.state_bytes,
        kv_bytes=left,
        requests_that_fit=None if left is None else max(0, left // max(1, request)),
    )


def shown_bytes(count: int | None) -> str:
    """A count of bytes as "1.4 GiB"; "unknown" for None."""
    if count is None:
        return "unknown"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"
