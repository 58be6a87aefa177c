# SPDX-License-Identifier: Apache-2.0
"""What a worker can say about itself once it is loaded: sizes, versions and backends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import vllm_dflash
from vllm_dflash.ops.backend import backend
from vllm_dflash.spec_decode import SpecDecodeWorker


def kv_bytes(draft_layers: Iterable[str], caches: dict[str, Any]) -> int:
    """Bytes of KV cache of these layers on this rank. caches: layer name -> its tensor (or a list of them).

    Layers of different groups may share one tensor block by block; it is then split evenly between its layers.
    """
    sharing: dict[int, int] = {}
    sizes: dict[str, list[torch.Tensor]] = {}
    for name, cache in caches.items():
        sizes[name] = [cache] if isinstance(cache, torch.Tensor) else [t for t in cache if isinstance(t, torch.Tensor)]
        for tensor in sizes[name]:
            sharing[tensor.data_ptr()] = sharing.get(tensor.data_ptr(), 0) + 1
    return sum(tensor.nbytes // sharing[tensor.data_ptr()] for name in draft_layers for tensor in sizes.get(name, ()))


def q_bytes(worker: SpecDecodeWorker, requests: int) -> int:
    """Bytes of a DraftBlock of `requests` requests: token ids, and what a sampling drafter drew them from."""
    slot = 8 + (worker.candidates * (8 + 4) if worker.probabilistic else 0)
    return requests * worker.drafts * slot


def info(vllm_config: Any, runner: str, device: str, attention_backend: str) -> dict[str, str]:
    """The labels of the metric `vllm_dflash:info`."""
    import vllm

    draft = vllm_config.speculative_config.draft_model_config
    return {
        "version": vllm_dflash.__version__,
        "vllm_version": vllm.__version__,
        "drafter": str(draft.model),
        "architecture": ",".join(draft.architectures or ()),
        "runner": runner,
        "ops_backend": backend(device),
        "attention_backend": attention_backend,
    }
