# SPDX-License-Identifier: Apache-2.0
"""A tiny EAGLE-3 head with random weights, in the layout of published ones (one Llama layer on three taps)."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.checkpoints import TargetShape


def make_eagle3(folder: Path, target: TargetShape) -> Path:
    """Writes a head for `target` and returns its folder; its embeddings are the target's."""
    hidden, mlp = target.hidden_size, target.intermediate_size
    query, key_value = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    generator = torch.Generator().manual_seed(5)

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    attention = "midlayer.self_attn"
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights = {f"midlayer.{name}.weight": torch.ones(hidden) for name in norms} | {
        "norm.weight": torch.ones(hidden),
        "fc.weight": linear(hidden, 3 * hidden),
        f"{attention}.q_proj.weight": linear(query, 2 * hidden),
        f"{attention}.k_proj.weight": linear(key_value, 2 * hidden),
        f"{attention}.v_proj.weight": linear(key_value, 2 * hidden),
        f"{attention}.o_proj.weight": linear(hidden, query),
        "midlayer.mlp.gate_proj.weight": linear(mlp, hidden),
        "midlayer.mlp.up_proj.weight": linear(mlp, hidden),
        "midlayer.mlp.down_proj.weight": linear(hidden, mlp),
        "lm_head.weight": linear(target.vocab_size, hidden),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "intermediate_size": mlp,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],  # the default of so few layers names one twice
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors")
    return folder
