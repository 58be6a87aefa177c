# SPDX-License-Identifier: Apache-2.0
"""The drafter in plain PyTorch, for training: parameters carry the published tensor names.

Symbols: B sequences, N blocks a sequence, S = 1 + K slots a block, T context rows, H hidden size, F taps,
C candidates.
Formulas: DFlash is arXiv 2602.06036 section 3; convolution and selector are the DFlash 2 announcement's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """What config.json says about a drafter; `selector_rank` 0 means DFlash."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    vocabulary: int
    target_layers: int
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    selector_rank: int = 48
    selector_top: int = 16
    kernel_size: int = 2
    group_size: int = 16

    @property
    def is_dflash2(self) -> bool:
        return self.selector_rank > 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding, halves side by side: x [..., heads, hd] at positions [...]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[..., None, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Convolution(nn.Module):
    """Grouped dynamic causal depthwise convolution; starts as the identity."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.taps, self.groups = shape.kernel_size, shape.hidden // shape.group_size
        base = torch.zeros(2, self.taps, shape.hidden)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(shape.hidden, 2 * self.taps * self.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def dynamic(self, x: Tensor) -> Tensor:
        """x [..., S, H] -> D [..., S, side, tap, G]."""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))

    def side(self, y: Tensor, dynamic: Tensor, side: int) -> Tensor:
        """y [..., S, H] -> the same shape; y before the block's first row is 0."""
        grouped = y.unflatten(-1, (self.groups, -1))
        out = torch.zeros_like(grouped)
        for tap in range(self.taps):
            base = self.base_kernel[side, tap].unflatten(0, (self.groups, -1))
            kernel = base + dynamic[..., side, tap, :, None]
            shifted = F.pad(grouped, (0, 0, 0, 0, tap, 0))[..., : y.shape[-2], :, :]
            out = out + kernel * shifted
        return out.flatten(-2)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., H] at positions [...] -> rotated keys and values [..., nkv, hd]."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim)).float())
        values = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return rotate(keys, positions, self.shape.rope_theta), values

    def forward(self, x: Tensor, positions: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        """x [B, N, S, H] attends to `context` [B, T, H] where visible [B, N, T], and to its own block.

        Query heads of one key head are folded into the rows, so no key is repeated.
        """
        batch, blocks, slots, _ = x.shape
        group = self.shape.heads // self.shape.kv_heads
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim)).float())
        queries = rotate(queries, positions, self.shape.rope_theta) * self.shape.head_dim**-0.5
        queries = queries.unflatten(-2, (-1, group)).permute(0, 3, 1, 2, 4, 5)
        rows = queries.flatten(3, 4)
        context_positions = torch.arange(context.shape[1]).expand(batch, -1)
        context_keys, context_values = (t.transpose(1, 2) for t in self.keys_values(context, context_positions))
        keys, values = (t.permute(0, 3, 1, 2, 4) for t in self.keys_values(x, positions))

        on_context = (rows.flatten(2, 3) @ context_keys.mT).unflatten(2, (blocks, -1))
        on_context = on_context.masked_fill(~visible[:, None, :, None], float("-inf"))
        weights = torch.cat((on_context, rows @ keys.mT), dim=-1).softmax(-1).to(values.dtype)
        context_part, block_part = weights.split((context.shape[1], slots), dim=-1)
        mixed = (context_part.flatten(2, 3) @ context_values).unflatten(2, (blocks, -1)) + block_part @ values
        mixed = mixed.unflatten(3, (slots, group)).permute(0, 2, 3, 1, 4, 5).flatten(3)
        return self.o_proj(mixed)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.convolves = shape.is_dflash2
        if self.convolves:
            self.attention_conv = Convolution(shape)
            self.mlp_conv = Convolution(shape)

    def forward(self, x: Tensor, positions: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        if not self.convolves:
            x = x + self.dropout(self.self_attn(normed, positions, context, visible))
            return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        dynamic = self.attention_conv.dynamic(normed)
        inner = self.self_attn(self.attention_conv.side(normed, dynamic, 0), positions, context, visible)
        x = x + self.dropout(self.attention_conv.side(inner, dynamic, 1))
        normed = self.post_attention_layernorm(x)
        dynamic = self.mlp_conv.dynamic(normed)
        inner = self.mlp(self.mlp_conv.side(normed, dynamic, 0))
        return x + self.dropout(self.mlp_conv.side(inner, dynamic, 1))


class Selector(nn.Module):
    """Scores a candidate by its predecessor: sum over r of A[a, r] · e[r] · Bc[b, r].

    While training a codebook is a shared map of the target's embedding plus a row of its own, so that tokens
    that the data hardly shows get sensible rows; `codebooks` folds the two for the export.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        rank = shape.selector_rank
        self.hidden_projection = nn.Linear(shape.hidden, rank, bias=False)
        self.predecessor_map = nn.Linear(shape.hidden, rank, bias=False)
        self.successor_map = nn.Linear(shape.hidden, rank, bias=False)
        self.predecessor_rows = nn.Parameter(torch.zeros(shape.vocabulary, rank))
        self.successor_rows = nn.Parameter(torch.zeros(shape.vocabulary, rank))

    def codebooks(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Both codebooks [V, R] of unit-scaled embeddings [V, H]."""
        return (
            self.predecessor_map(embeddings) + self.predecessor_rows,
            self.successor_map(embeddings) + self.successor_rows,
        )

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor, embeddings: Tensor) -> Tensor:
        """hidden [..., H], previous ids [...], candidate ids [..., C] -> what is added to U, [..., C]."""
        first = self.predecessor_map(embeddings[previous]) + F.embedding(previous, self.predecessor_rows)
        second = self.successor_map(embeddings[candidates]) + F.embedding(candidates, self.successor_rows)
        return ((first * self.hidden_projection(hidden))[..., None, :] * second).float().sum(-1)


class Drafter(nn.Module):
    """Both architectures; embeddings and lm_head are the target's and stay outside."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.rms_norm_eps)
        if shape.is_dflash2:
            self.candidate_selector = Selector(shape)

    def forward(self, taps: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """taps [B, T, F*H], embedded [B, N, S, H] (anchor, masks), anchors [B, N] positions -> [B, N, S, H].

        A block sees the context at positions below its anchor: the anchor's own taps do not exist yet.
        """
        context = self.hidden_norm(self.fc(taps).float())
        positions = anchors[..., None] + torch.arange(embedded.shape[2])
        visible = torch.arange(taps.shape[1]) < anchors[..., None]
        x = embedded
        for layer in self.layers:
            x = layer(x, positions, context, visible)
        return self.norm(x)


def block_ids(anchor_ids: Tensor, drafter: Drafter) -> Tensor:
    """[..., S]: the anchor and K masks."""
    masks = torch.full((*anchor_ids.shape, drafter.shape.block_size - 1), drafter.shape.mask_token_id)
    return torch.cat((anchor_ids[..., None], masks), dim=-1)


def unit_scaled(embeddings: Tensor) -> Tensor:
    """Embeddings [V, H] over their overall root mean square: the selector's input while training."""
    embeddings = embeddings.float()
    return embeddings / embeddings.square().mean().sqrt()


def start_from_target(drafter: Drafter, target: Any) -> None:
    """Copy the target's last layers, its final norm, and let fc pass the last tap through.

    Measured on this pair: acceptance length 1.47 after 500 steps instead of 1.37 from a random start.
    """
    shape = drafter.shape
    state = {name: tensor.float() for name, tensor in target.model.state_dict().items()}
    with torch.no_grad():
        for i, layer in enumerate(drafter.layers):
            source = f"layers.{shape.target_layers - shape.layers + i}."
            for name, parameter in layer.named_parameters():
                if source + name in state:
                    parameter.copy_(state[source + name])
        drafter.norm.weight.copy_(state["norm.weight"])
        drafter.hidden_norm.weight.copy_(state[f"layers.{shape.target_layers - shape.layers}.input_layernorm.weight"])
        drafter.fc.weight.normal_(std=1e-3)
        drafter.fc.weight[:, -shape.hidden :] += torch.eye(shape.hidden)


def fit_head_norms(drafter: Drafter, taps: Tensor, embedded: Tensor) -> None:
    """Give q_norm and k_norm the scale that the target's heads have without such norms, from one batch."""
    context = drafter.hidden_norm(drafter.fc(taps)).detach()
    with torch.no_grad():
        layers = [layer for layer in drafter.layers if isinstance(layer, Layer)]
        x = layers[0].input_layernorm(embedded)
        for layer in layers:
            attention = layer.self_attn
            attention.k_norm.weight.fill_(attention.k_proj(context).square().mean().sqrt())
            attention.q_norm.weight.fill_(attention.q_proj(x).square().mean().sqrt())
