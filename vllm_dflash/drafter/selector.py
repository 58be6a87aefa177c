# SPDX-License-Identifier: Apache-2.0
"""DFlash 2's candidate selector: a low-rank score between neighbouring slots' candidates."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear


class CandidateSelector(nn.Module):
    """The tables and the projection of S_j(a, b) = U_j(b) + sum_r A[a, r] * e_j[r] * Bc[b, r] (DFlash 2 announcement).

    `predecessor_codebook` A and `successor_codebook` Bc are [V, R]; e_j = hidden_projection(h_j). The walk over the
    scores is `ops.select_path`, which reads only the chosen predecessor's row.
    """

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank, dtype=dtype), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank, dtype=dtype), requires_grad=False)
        self.hidden_projection = ReplicatedLinear(
            hidden_size,
            rank,
            bias=False,
            params_dtype=dtype,
            quant_config=None,
            prefix=f"{prefix}.hidden_projection",
            return_bias=False,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Slots' hidden states [..., H] -> e [..., R]."""
        return self.hidden_projection(hidden)
