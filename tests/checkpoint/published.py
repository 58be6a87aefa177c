# SPDX-License-Identifier: Apache-2.0
"""The published checkpoints by the figures that are publicly reported of their config.json."""

from dataclasses import dataclass
from typing import Any

S, F = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Published:
    """One draft. `heads` is (query heads, key heads, head size); `window` 0 means full attention."""

    draft: str
    target: str
    layers: int
    hidden: int
    mlp: int
    heads: tuple[int, int, int]
    block: int
    window: int
    taps: tuple[int, ...]
    target_layers: int
    mask: int
    vocab: int
    theta: float = 1e6

    @property
    def is_dflash2(self) -> bool:
        return self.draft.endswith("DFlash2")

    @property
    def layer_types(self) -> list[str]:
        if self.is_dflash2:
            return [S] * self.layers
        return [S] * (self.layers - 1) + [F] if self.window else [F] * self.layers

    def raw(self) -> dict[str, Any]:
        """Its config.json as the z-lab checkpoints write it."""
        heads, kv_heads, head_dim = self.heads
        inner: dict[str, Any] = {"mask_token_id": self.mask, "target_layer_ids": list(self.taps)}
        raw: dict[str, Any] = {
            "architectures": ["DFlash2DraftModel" if self.is_dflash2 else "DFlashDraftModel"],
            "attention_bias": False,
            "dflash_config": inner,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "layer_types": self.layer_types,
            "max_position_embeddings": 40960,
            "max_window_layers": self.layers,
            "model_type": "qwen3",
            "num_attention_heads": heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": kv_heads,
            "num_target_layers": self.target_layers,
            "rms_norm_eps": 1e-6,
            "sliding_window": self.window or None,
            "tie_word_embeddings": False,
            "use_sliding_window": bool(self.window),
            "vocab_size": self.vocab,
        }
        if self.is_dflash2:
            raw |= {"is_causal": False, "rope_parameters": {"rope_theta": self.theta, "rope_type": "default"}}
            inner |= {"block_size": self.block, "conv_kernel_size": 2, "conv_group_size": 16}
            inner |= {"selector_rank": 256, "selector_top_k": 16}
        else:
            raw |= {"block_size": self.block, "rope_scaling": None, "rope_theta": self.theta}
        return raw


Q3, Q35 = (151669, 151936), (248070, 248320)
PUBLISHED = (
    Published(
        "z-lab/Qwen3.8-27B-DFlash2", "Qwen/Qwen3.8-27B",
        5, 5120, 17408, (32, 8, 128), 8, 2048, (5, 19, 33, 47, 61), 64, *Q35, 1e7,
    ),
    Published(
        "incoai/Muse-Glimmer-30B-DFlash2", "meta-models/Muse-Glimmer-30B",
        5, 6656, 19968, (32, 8, 128), 16, 2048, (1, 13, 25, 37, 49), 52, 201818, 202048, 5e5,
    ),
    Published(
        "z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B",
        5, 4096, 12288, (32, 8, 128), 16, 0, (1, 9, 17, 25, 33), 36, *Q3,
    ),
    Published(
        "z-lab/Qwen3-4B-DFlash-b16", "Qwen/Qwen3-4B",
        5, 2560, 9728, (32, 8, 128), 16, 0, (1, 9, 17, 25, 33), 36, *Q3,
    ),
    Published(
        "z-lab/Qwen3.6-27B-DFlash", "Qwen/Qwen3.6-27B",
        5, 5120, 17408, (32, 8, 128), 16, 2048, (1, 16, 31, 46, 61), 64, *Q35, 1e7,
    ),
    Published(
        "z-lab/Qwen3.6-35B-A3B-DFlash", "Qwen/Qwen3.6-35B-A3B",
        6, 2048, 6144, (32, 8, 128), 16, 4096, (1, 6, 11, 16, 22, 27, 32, 37), 40, *Q35, 1e7,
    ),
    Published(
        "z-lab/Qwen3.5-4B-DFlash", "Qwen/Qwen3.5-4B",
        6, 2560, 9216, (32, 8, 128), 16, 4096, (1, 5, 9, 13, 17, 21, 25, 29), 32, *Q35, 1e7,
    ),
    Published(
        "z-lab/Qwen3.5-122B-A10B-DFlash", "Qwen/Qwen3.5-122B-A10B",
        6, 3072, 9216, (32, 8, 128), 16, 4096, (1, 7, 14, 20, 26, 32, 39, 45), 48, *Q35, 1e7,
    ),
    Published(
        "z-lab/Qwen3-Coder-30B-A3B-DFlash", "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        8, 2048, 6144, (32, 4, 128), 16, 0, (1, 12, 23, 34, 45), 48, *Q3, 1e7,
    ),
    Published(
        "z-lab/gpt-oss-20b-DFlash", "openai/gpt-oss-20b",
        8, 2880, 7680, (64, 8, 64), 8, 0, (1, 6, 11, 16, 21), 24, 200000, 201088,
    ),
    Published(
        "z-lab/Kimi-K2.5-DFlash", "moonshotai/Kimi-K2.5",
        6, 7168, 18432, (64, 8, 128), 8, 0, (1, 12, 24, 35, 47, 58), 61, 163838, 163840,
    ),
)  # fmt: skip
