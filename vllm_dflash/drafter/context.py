# SPDX-License-Identifier: Apache-2.0
"""KV injection: the target's features become K and V of every draft layer (arXiv 2602.06036, section 4.1)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_dflash import ops
from vllm_dflash.drafter.layer import DraftAttention


class ContextProjection:
    """c [T, H] -> K = RoPE(RMSNorm_k(W_k c)) and V = W_v c (times the value scale) of all layers, after one GEMM.

    W_k and W_v are the rows that the block's own tokens use, copied once into one [L*2*nkv*hd, H] weight. Quantised
    layers keep their own weights, which only their own method can read: there it is one GEMM a layer.
    """

    def __init__(self, layers: Sequence[DraftAttention]) -> None:
        first = layers[0]
        self.layers = layers
        self.stale = False
        """Whether the layers' weights have changed since they were copied."""
        self.shape = (len(layers), 2, first.num_kv_heads, first.head_dim)
        self.eps = first.k_norm.variance_epsilon
        self.rotary = first.rotary_emb
        self.value_scale = first.value_scale
        self.k_norm = torch.stack([layer.k_norm.weight.data for layer in layers])
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        projections = [layer.qkv_proj for layer in layers]
        rows = first.q_size + 2 * first.kv_size
        # Where a CPU has packed the weights away (only --load-format dummy comes here so late), they are not plain.
        plain = all(isinstance(p.quant_method, UnquantizedLinearMethod) for p in projections)
        if plain and all(p.weight.dim() == 2 and p.weight.shape[0] == rows for p in projections):
            self.weight = torch.cat([p.weight.data[first.q_size :] for p in projections])
            if projections[0].bias is not None:
                self.bias = torch.cat([p.bias.data[first.q_size :] for p in projections])

    def folded(self, hidden_norm: torch.Tensor) -> torch.Tensor | None:
        """The one weight with hidden_norm's folded in, for `ops.project_context_kv`; None where each layer has its own.

        It takes the plain one's place: calls then go by each layer's own weights.
        """
        if self.weight is None:
            return None
        weight, self.weight = ops.fold_hidden_norm(self.weight, hidden_norm), None
        return weight

    def refresh(self, folded: torch.Tensor | None, hidden_norm: torch.Tensor) -> torch.Tensor | None:
        """Copy the layers' weights anew, into the same memory as captured graphs read it: -> what `folded` is now.

        None where the weights are no longer plain: calls go by each layer's own. Raises what torch does of weights that
        are not there yet, in the midst of an update.
        """
        new = ContextProjection(self.layers)
        self.k_norm.copy_(new.k_norm)
        if self.bias is not None and new.bias is not None:
            self.bias.copy_(new.bias)
        if folded is not None:
            weight = new.folded(hidden_norm)
            folded = None if weight is None else folded.copy_(weight)
        elif self.weight is not None:
            self.weight = None if new.weight is None else self.weight.copy_(new.weight)
        self.stale = False
        return folded

    def __call__(self, features: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """features c [T, H], positions [T] int64 -> (K, V), each [L, T, nkv, hd] in c's dtype."""
        return ops.context_kv_rows(
            self.project(features),
            self.k_norm,
            self.eps,
            positions,
            self.rotary.cos_sin_cache,
            self.rotary.is_neox_style,
            self.value_scale,
        )

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """features c [T, H] -> kv [T, L, 2, nkv, hd], before k-norm, RoPE and value scale."""
        rows = features.shape[0]
        if self.weight is not None:
            return F.linear(features, self.weight, self.bias).view(rows, *self.shape)
        one = (rows, *self.shape[1:])
        return torch.stack([a.qkv_proj(features)[:, a.q_size :].reshape(one) for a in self.layers], dim=1)
