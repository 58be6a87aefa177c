# SPDX-License-Identifier: Apache-2.0
"""config.json of the published drafts' targets, as far as a draft and the sizes depend on it.

vLLM imports a target's code to configure it. The multimodal ones import torchvision, which CPU machines lack; so
stand-ins with the same width, depth, vocabulary and kind of layers take their place: Qwen3-Next for hybrid targets,
DeepSeek V3 for one with latent attention, Qwen3 for the rest.
"""

from typing import Any

from tests.checkpoint.published import Published


def target_config(draft: Published) -> dict[str, Any]:
    """A target of the draft's width, depth and vocabulary, of the architecture that vLLM serves it with."""
    raw: dict[str, Any] = {
        "vocab_size": draft.vocab,
        "hidden_size": draft.hidden,
        "num_hidden_layers": draft.target_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": draft.mlp,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": draft.theta},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    family = draft.target.rpartition("/")[2]
    if family.startswith(("Qwen3.5", "Qwen3.6", "Qwen3.8")):
        return raw | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "head_dim": 256,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "layer_types": [
                "full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(draft.target_layers)
            ],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "shared_expert_intermediate_size": 768,
        }
    if "Kimi" in family:
        return raw | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.827,
        }
    return raw | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
