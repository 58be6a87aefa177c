# SPDX-License-Identifier: Apache-2.0
"""The operations in Triton, for GPUs that the compiled extension has no code for (AMD, new architectures). The same
signatures and results as the others; imported only where they run."""

from vllm_dflash.ops.triton.context_kv import context_kv_rows, inject_context_kv
from vllm_dflash.ops.triton.convolution import grouped_convolution
from vllm_dflash.ops.triton.projection import project_context_kv
from vllm_dflash.ops.triton.rejection import reject_sparse
from vllm_dflash.ops.triton.selector import select_path

__all__ = [
    "context_kv_rows",
    "grouped_convolution",
    "inject_context_kv",
    "project_context_kv",
    "reject_sparse",
    "select_path",
]
