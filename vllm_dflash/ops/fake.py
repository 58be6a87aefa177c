# SPDX-License-Identifier: Apache-2.0
"""Shapes of the compiled operations' results, for torch.compile. Imported with the extension."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.register_fake("vllm_dflash::grouped_convolution")
def _(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, block: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("vllm_dflash::select_path")
def _(candidate_ids: torch.Tensor, candidate_logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return candidate_ids.new_empty(candidate_ids.shape[:2]), candidate_logits.new_empty(candidate_ids.shape)


@torch.library.register_fake("vllm_dflash::reject_sparse")
def _(logits: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cu_drafts, max_drafts = arguments[3], arguments[-1]
    batch = cu_drafts.shape[0] - 1
    return cu_drafts.new_empty((batch, max_drafts + 1)), cu_drafts.new_empty((batch,))


@torch.library.register_fake("vllm_dflash::context_kv_rows")
def _(kv: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows, layers, _two, heads, size = kv.shape
    return kv.new_empty((layers, rows, heads, size)), kv.new_empty((layers, rows, heads, size))


@torch.library.register_fake("vllm_dflash::project_context_kv")
@torch.library.register_fake("vllm_dflash::inject_context_kv")
def _(*_: Any) -> None:
    return None
