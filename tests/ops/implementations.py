# SPDX-License-Identifier: Apache-2.0
"""The implementations of the operations that this machine can run, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vllm_dflash import ops
from vllm_dflash.ops import projection
from vllm_dflash.ops.reference import context_kv, convolution, rejection, selector


def project_context_kv(
    features: torch.Tensor,
    kv_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    k_norm: torch.Tensor,
    eps: float,
    **rest: Any,
) -> None:
    kv = projection.project(features, kv_weight, weight_scale, bias, eps, *k_norm.shape)
    context_kv.inject_context_kv(kv, k_norm, eps, k_scale=1.0, v_scale=1.0, **rest)


REFERENCE = SimpleNamespace(
    project_context_kv=project_context_kv,
    grouped_convolution=convolution.grouped_convolution,
    select_path=selector.select_path,
    reject_sparse=rejection.reject_sparse,
    context_kv_rows=context_kv.context_kv_rows,
    inject_context_kv=context_kv.inject_context_kv,
)


def instruction_sets() -> list[str]:
    """Those of the extension that this processor has, best last; none without the extension."""
    if ops.backend("cpu") != "native":
        return []
    found = []
    for name in ("baseline", "avx2", "avx512", "avx512bf16"):
        try:
            found.append(torch.ops.vllm_dflash.cpu_isa(name))
        except RuntimeError:
            continue
    torch.ops.vllm_dflash.cpu_isa(None)
    return found


NAMES = ["reference", *instruction_sets()]


def implementation(name: str) -> SimpleNamespace:
    """The operations as one namespace; an instruction set stays chosen for the process."""
    if name == "reference":
        return REFERENCE
    torch.ops.vllm_dflash.cpu_isa(name)
    return SimpleNamespace(**{operation: getattr(ops, operation) for operation in vars(REFERENCE)})
