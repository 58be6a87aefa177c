# SPDX-License-Identifier: Apache-2.0
"""One decoder layer of the drafter: pre-norm Qwen3 attention and MLP, and DFlash 2's convolutions."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_dflash.checkpoint import DraftConfig
from vllm_dflash.drafter.convolution import GroupedConvolution


class DraftAttention(nn.Module):
    """Attention of the block's own rows over [context KV ; block KV] (arXiv 2602.06036, section 4).

    The context's K and V are in the paged cache before this runs; the block's own are written by `attn`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: DraftConfig,
        layer: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        world = get_tensor_model_parallel_world_size()
        if config.num_attention_heads % world:
            raise ValueError(
                f"The drafter's {config.num_attention_heads} attention heads cannot be divided over tensor parallel "
                f"size {world}. Use a tensor parallel size that divides {config.num_attention_heads}."
            )
        self.num_heads = config.num_attention_heads // world
        self.num_kv_heads = max(1, config.num_key_value_heads // world)
        self.head_dim = config.head_dim
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.value_scale = config.attention_value_scale
        self.causal = config.is_causal(layer)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            return_bias=False,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            return_bias=False,
        )
        self.rotary_emb = get_rope(
            self.head_dim,
            # Context rows stand at every position of the target, whatever the draft was trained on.
            max_position=max(config.max_position_embeddings, vllm_config.model_config.max_model_len),
            is_neox_style=config.is_neox_style,
            rope_parameters=dict(config.rope_parameters),
        )
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.attention_sink_bias = (
            nn.Parameter(torch.empty(self.num_heads), requires_grad=False) if config.attention_sink_bias else None
        )
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=config.window(layer),
            prefix=f"{prefix}.attn",
            sinks=self.attention_sink_bias,
        )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """positions [rows] int64, hidden [rows, H] -> [rows, H]."""
        q, k, v = self.qkv_proj(hidden).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.reshape(-1, self.num_heads, self.head_dim)).view(-1, self.q_size)
        k = self.k_norm(k.reshape(-1, self.num_kv_heads, self.head_dim)).view(-1, self.kv_size)
        q, k = self.rotary_emb(positions, q, k)
        if self.value_scale is not None:
            v = v * self.value_scale
        return self.o_proj(self.attn(q, k, v))


class DraftMLP(nn.Module):
    """SwiGLU: down(act(gate(x)) * up(x))."""

    def __init__(self, config: DraftConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
            return_bias=False,
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
            return_bias=False,
        )
        self.act = get_act_and_mul_fn(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class DraftLayer(nn.Module):
    """input_layernorm -> attention -> residual -> post_attention_layernorm -> MLP -> residual."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: DraftConfig,
        layer: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = DraftAttention(vllm_config, config, layer, quant_config, f"{prefix}.self_attn")
        self.mlp = DraftMLP(config, quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = self._convolution(vllm_config, config, quant_config, f"{prefix}.attention_conv")
        self.mlp_conv = self._convolution(vllm_config, config, quant_config, f"{prefix}.mlp_conv")

    @staticmethod
    def _convolution(
        vllm_config: VllmConfig, config: DraftConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> GroupedConvolution | None:
        if not config.is_dflash2:
            return None
        assert config.conv_kernel_size is not None and config.conv_group_size is not None
        return GroupedConvolution(
            config.hidden_size,
            config.conv_kernel_size,
            config.conv_group_size,
            vllm_config.model_config.dtype,
            quant_config,
            prefix,
        )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden, residual [rows, H] -> (sublayer output still to be added, residual)."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        if self.attention_conv is None:
            hidden = self.self_attn(positions, hidden)
        else:
            d = self.attention_conv.coefficients(hidden)
            hidden = self.self_attn(positions, self.attention_conv(hidden, d, 0, block))
            hidden = self.attention_conv(hidden, d, 1, block)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        if self.mlp_conv is None:
            return self.mlp(hidden), residual
        d = self.mlp_conv.coefficients(hidden)
        hidden = self.mlp(self.mlp_conv(hidden, d, 0, block))
        return self.mlp_conv(hidden, d, 1, block), residual
