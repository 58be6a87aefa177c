# SPDX-License-Identifier: Apache-2.0
"""The grouped dynamic convolution around a sublayer of DFlash 2."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_dflash import ops


class GroupedConvolution(nn.Module):
    """Causal depthwise convolution within each draft block, before and after one sublayer (DFlash 2 announcement).

    With x the layer-normed input of the sublayer and D = kernel_projection(x) viewed [rows, side, tap, group]:

        conv_s(y)[i, c] = sum_t (base[s, t, c] + D[i, s, t, group(c)]) * y[i - t, c]
        out = conv_1(sublayer(conv_0(x)))

    Rows are [request][block]; a tap never leaves its block.
    """

    def __init__(
        self,
        hidden_size: int,
        taps: int,
        group_size: int,
        dtype: torch.dtype,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.taps = taps
        self.groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size, dtype=dtype), requires_grad=False)
        self.kernel_projection = ReplicatedLinear(
            hidden_size,
            2 * taps * self.groups,
            bias=False,
            params_dtype=dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.kernel_projection",
            return_bias=False,
        )

    def coefficients(self, x: torch.Tensor) -> torch.Tensor:
        """Dynamic coefficients D [rows, 2, taps, groups] of both sides from x [rows, H]."""
        return self.kernel_projection(x).view(x.shape[0], 2, self.taps, self.groups)

    def forward(self, y: torch.Tensor, coefficients: torch.Tensor, side: int, block: int) -> torch.Tensor:
        """conv_side(y) for y [rows, H], rows a multiple of `block`; same shape and dtype."""
        return ops.grouped_convolution(y, coefficients[:, side], self.base_kernel[side], block)
