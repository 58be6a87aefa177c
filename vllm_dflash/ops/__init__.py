# SPDX-License-Identifier: Apache-2.0
"""Numeric operations of a draft step: one function and one torch reference each."""

from vllm_dflash.ops.backend import backend
from vllm_dflash.ops.context_kv import context_kv_rows, inject_context_kv
from vllm_dflash.ops.convolution import grouped_convolution
from vllm_dflash.ops.projection import fold_hidden_norm, project_context_kv
from vllm_dflash.ops.rejection import reject_sparse
from vllm_dflash.ops.selector import select_path

__all__ = [
    "backend",
    "context_kv_rows",
    "fold_hidden_norm",
    "grouped_convolution",
    "inject_context_kv",
    "project_context_kv",
    "reject_sparse",
    "select_path",
]
