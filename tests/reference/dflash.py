# SPDX-License-Identifier: Apache-2.0
"""DFlash and DFlash 2 in plain torch: batch 1, dense masks, no engine.

Written from the formulas only (arXiv 2602.06036 for DFlash; the DFlash 2 announcement for convolution and
selector), so that it can judge the product. It shares no code with it. Symbols: T context rows, B block size,
K = B - 1, H hidden size, V vocabulary, C candidates, R selector rank, nkv/hd key-value heads and head size.
Functions that see block rows take several blocks at once ([N, B, …]); the engine's reference use has N = 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.reference.config import ReferenceConfig, read_config
from tests.reference.target import ReferenceTarget

ContextKV = list[tuple[torch.Tensor, torch.Tensor]]
"""One (key, value) pair a layer, each [T, nkv, hd]: what the drafter's KV cache holds for the context."""


@dataclass(frozen=True)
class Draft:
    """What one block proposes. Candidates and scores are there for DFlash 2 only."""

    token_ids: list[int]
    logits: torch.Tensor
    candidate_ids: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class ReferenceDrafter:
    """A drafter's weights with the functions of its forward pass. `weights` carry checkpoint names."""

    def __init__(
        self,
        config: ReferenceConfig,
        weights: Mapping[str, torch.Tensor],
        target: ReferenceTarget,
        mask_embedding: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.weights = {
            name: weight.to(target.dtype) if weight.is_floating_point() else weight for name, weight in weights.items()
        }
        self.embedding = self.weights.get("embed_tokens.weight", target.embedding)
        self.lm_head = self.weights.get("lm_head.weight", target.lm_head)
        self.mask_embedding = None if mask_embedding is None else mask_embedding.to(target.dtype)
        self.inverse_frequencies, self.rope_scale = _rope_frequencies(config)

    def context_features(self, taps: torch.Tensor) -> torch.Tensor:
        """c [T, H] = RMSNorm(W_fc · taps), taps [T, F·Ht] (section 3 of the paper)."""
        return self._norm("hidden_norm", F.linear(taps, self.weights["fc.weight"]))

    def context_kv(self, features: torch.Tensor, positions: torch.Tensor) -> ContextKV:
        """Key-value injection: c [T, H] at absolute `positions` [T] -> the rows of every layer's KV cache."""
        return [self._key_value(layer, features, positions) for layer in range(self.config.num_layers)]

    def block_hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ContextKV,
        context_positions: torch.Tensor,
    ) -> torch.Tensor:
        """Final-normed hidden states [N, B, H] of blocks `token_ids` [N, B] at `positions` [N, B].

        Row 0 of a block is the anchor. A block sees the context rows before its anchor, and itself.
        """
        hidden = self.embed(token_ids)
        for layer in range(self.config.num_layers):
            name = f"layers.{layer}"
            normed = self._norm(f"{name}.input_layernorm", hidden)
            attend = self._attention(layer, positions, context[layer], context_positions)
            hidden = hidden + self.convolved(f"{name}.attention_conv", normed, attend)
            normed = self._norm(f"{name}.post_attention_layernorm", hidden)
            hidden = hidden + self.convolved(f"{name}.mlp_conv", normed, self._mlp(layer))
        return self._norm("norm", hidden)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the (target's) embedding, the mask row replaced where the checkpoint brings one, scaled."""
        rows = F.embedding(token_ids, self.embedding)
        if self.mask_embedding is not None:
            rows = torch.where((token_ids == self.config.mask_token_id)[..., None], self.mask_embedding, rows)
        return rows * self.config.embedding_scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits [..., Vd] of final-normed hidden states: multiplied first, then capped."""
        logits = F.linear(hidden, self.lm_head)
        if not self.config.second:
            return logits * self.config.logit_scale
        logits = logits * self.config.output_multiplier
        cap = self.config.softcap
        return cap * torch.tanh(logits / cap) if cap > 0 else logits

    def transition(self, hidden: torch.Tensor, predecessor: torch.Tensor, successors: torch.Tensor) -> torch.Tensor:
        """Σ_r A[a, r] · e[r] · Bc[b, r] for predecessors [...], successors [..., C], hidden [..., H]."""
        weights = self.weights
        projected = F.linear(hidden, weights["candidate_selector.hidden_projection.weight"])
        left = weights["candidate_selector.predecessor_codebook"][predecessor] * projected
        return (weights["candidate_selector.successor_codebook"][successors] @ left[..., None])[..., 0]

    def draft(
        self,
        context: ContextKV,
        anchor_id: int,
        num_drafts: int | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        start: int = 0,
    ) -> Draft:
        """Drafts K tokens after `anchor_id`, which stands behind the T context rows of positions start, start + 1, ...

        Temperature shapes DFlash 2's proposal only; DFlash always proposes its argmax.
        """
        num_drafts = self.config.block_size - 1 if num_drafts is None else num_drafts
        length = len(context[0][0])
        block = torch.tensor([[anchor_id] + [self.config.mask_token_id] * num_drafts])
        positions = start + length + torch.arange(1 + num_drafts)[None]
        hidden = self.block_hidden(block, positions, context, start + torch.arange(length))[0, 1:]
        logits = self.logits(hidden)
        if not self.config.second:
            token_ids = logits.argmax(-1)
            if "d2t" in self.weights:
                token_ids = token_ids + self.weights["d2t"][token_ids]
            return Draft(token_ids.tolist(), logits)
        unary, candidates = logits.topk(self.config.selector_top_k)
        path: list[int] = []
        scores = []
        for slot in range(num_drafts):
            predecessor = torch.tensor(path[-1] if path else anchor_id)
            row = unary[slot] + self.transition(hidden[slot], predecessor, candidates[slot])
            if temperature > 0:
                row = row / temperature
                chosen = torch.multinomial(row.softmax(-1), 1, generator=generator)
            else:
                chosen = row.argmax()
            scores.append(row)
            path.append(int(candidates[slot, chosen]))
        return Draft(path, logits, candidates, torch.stack(scores))

    def convolved(self, name: str, x: torch.Tensor, sublayer) -> torch.Tensor:
        """conv_1(sublayer(conv_0(x))) with taps that x [N, B, H] moves; for DFlash, sublayer(x)."""
        if not self.config.second:
            return sublayer(x)
        taps = self.config.conv_kernel_size
        base = self.weights[f"{name}.base_kernel"]
        dynamic = F.linear(x, self.weights[f"{name}.kernel_projection.weight"])
        dynamic = dynamic.unflatten(-1, (2, taps, -1)).repeat_interleave(self.config.conv_group_size, dim=-1)
        kernels = base + dynamic

        def convolve(y: torch.Tensor, side: int) -> torch.Tensor:
            out = torch.zeros_like(y)
            for tap in range(taps):
                earlier = F.pad(y, (0, 0, tap, 0))[:, : y.shape[1]]
                out = out + kernels[:, :, side, tap] * earlier
            return out

        return convolve(sublayer(convolve(x, 0)), 1)

    def _attention(self, layer: int, positions: torch.Tensor, context, context_positions: torch.Tensor):
        """The attention sublayer over [context ; own block] as a function of its input [N, B, H]."""
        config, name = self.config, f"layers.{layer}.self_attn"

        def attend(x: torch.Tensor) -> torch.Tensor:
            blocks, rows, _ = x.shape
            query = self._linear(f"{name}.q_proj", x).unflatten(-1, (config.num_heads, config.head_dim))
            query = self._rotate(self._norm(f"{name}.q_norm", query), positions)
            key, value = self._key_value(layer, x, positions)
            keys = torch.cat([context[0].expand(blocks, *context[0].shape), key], dim=1)
            values = torch.cat([context[1].expand(blocks, *context[1].shape), value], dim=1)
            group = config.num_heads // config.num_kv_heads
            keys, values = (tensor.repeat_interleave(group, dim=2) for tensor in (keys, values))
            weights = torch.einsum("nqhd,nkhd->nhqk", query, keys) * config.head_dim**-0.5
            visible = self.visible(layer, positions, context_positions)
            weights = weights.masked_fill(~visible[:, None], float("-inf"))
            if config.has_sinks:
                sinks = self.weights[f"{name}.attention_sink_bias"][None, :, None, None]
                weights = torch.cat([weights, sinks.expand(blocks, -1, rows, 1)], dim=-1).softmax(-1)[..., :-1]
            else:
                weights = weights.softmax(-1)
            out = torch.einsum("nhqk,nkhd->nqhd", weights, values).flatten(2)
            return self._linear(f"{name}.o_proj", out)

        return attend

    def visible(self, layer: int, positions: torch.Tensor, context_positions: torch.Tensor) -> torch.Tensor:
        """Mask [N, B, T+B]: context before the anchor in the window; of the block all, or the rows so far."""
        window, causal = self.config.windows[layer], self.config.causal[layer]
        before_anchor = context_positions[None, None] < positions[:, :1, None]
        before_anchor = before_anchor.expand(-1, positions.shape[1], -1)
        in_block = torch.ones(len(positions), positions.shape[1], positions.shape[1], dtype=torch.bool)
        visible = torch.cat([before_anchor, in_block], dim=-1)
        keys = torch.cat([context_positions.expand(len(positions), -1), positions], dim=1)
        distance = positions[:, :, None] - keys[:, None, :]
        if causal:
            visible = visible & (distance >= 0)
        if window is not None:
            visible = visible & (distance < window)
            if not causal:
                visible = visible & (-distance < window)
        return visible

    def _key_value(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., nkv, hd] of rows x [..., H]: one set of weights for context and block."""
        config, name = self.config, f"layers.{layer}.self_attn"
        heads = (config.num_kv_heads, config.head_dim)
        key = self._linear(f"{name}.k_proj", x).unflatten(-1, heads)
        value = self._linear(f"{name}.v_proj", x).unflatten(-1, heads)
        return self._rotate(self._norm(f"{name}.k_norm", key), positions), value * config.value_scale

    def _mlp(self, layer: int):
        name = f"layers.{layer}.mlp"

        def mlp(x: torch.Tensor) -> torch.Tensor:
            gate = F.linear(x, self.weights[f"{name}.gate_proj.weight"])
            up = F.linear(x, self.weights[f"{name}.up_proj.weight"])
            return F.linear(F.silu(gate) * up, self.weights[f"{name}.down_proj.weight"])

        return mlp

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.weights[f"{name}.bias"] if self.config.attention_bias else None
        return F.linear(x, self.weights[f"{name}.weight"], bias)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.eps)
        return x * scale * self.weights[f"{name}.weight"]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of x [..., heads, hd] at `positions` [...]; pairs are halves (neox) or neighbours."""
        angles = positions[..., None, None].to(x.dtype) * self.inverse_frequencies.to(x.dtype)
        cosine, sine = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale
        if self.config.is_neox_style:
            first, second = x.chunk(2, dim=-1)
            return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        first, second = x[..., 0::2], x[..., 1::2]
        turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        return turned.flatten(-2)


def _rope_frequencies(config: ReferenceConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [hd/2] and the factor on cosine and sine (1 but for scaled kinds)."""
    rope_type = config.rope["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        return config.rope["rope_theta"] ** -exponents, 1.0
    carrier = Qwen3Config(
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=config.rope,
    )
    return ROPE_INIT_FUNCTIONS[rope_type](carrier, "cpu")


def read_drafter(directory: Path, target: ReferenceTarget) -> ReferenceDrafter:
    """Reads a drafter checkpoint; what it does not bring (embedding, head) is the target's."""
    config = read_config(directory, len(target.layers))
    weights = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        for alias, own in _ALIASES:
            name = name.replace(alias, own)
        weights[name] = weight
    mask_embedding = None
    if (directory / "mask_embedding.pt").exists():
        mask_embedding = torch.load(directory / "mask_embedding.pt", weights_only=True)
        if isinstance(mask_embedding, dict):
            assert mask_embedding.get("mask_token_id", config.mask_token_id) == config.mask_token_id
            mask_embedding = mask_embedding["embedding"]
        mask_embedding = mask_embedding.reshape(-1)
    return ReferenceDrafter(config, weights, target, mask_embedding)


_ALIASES: Sequence[tuple[str, str]] = (
    ("midlayer.", "layers.0."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("encoder.fc.", "fc."),
)
