# SPDX-License-Identifier: Apache-2.0
"""What a drafter's config.json says, reduced to what the reference computes with. Both dialects."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLIDING = "sliding_attention"


@dataclass(frozen=True)
class ReferenceConfig:
    """A drafter's hyperparameters. `windows` (None: full attention) and `causal` have one entry a layer."""

    second: bool
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: dict[str, Any]
    is_neox_style: bool
    max_positions: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    value_scale: float
    has_sinks: bool
    attention_bias: bool
    logit_scale: float
    draft_vocab_size: int
    embedding_scale: float
    output_multiplier: float
    softcap: float
    conv_kernel_size: int
    conv_group_size: int
    selector_top_k: int


def read_config(directory: Path, num_target_layers: int) -> ReferenceConfig:
    """Reads DIRECTORY/config.json. `num_target_layers` serves checkpoints without layer ids."""
    raw = json.loads((directory / "config.json").read_text())
    if "speculators_model_type" in raw:
        raw = _from_speculators(raw)
    inner = raw.get("dflash_config") or {}

    def either(name: str, default: Any = None) -> Any:
        return inner.get(name, raw.get(name, default))

    assert not either("sample_from_anchor", False), "blocks that sample from their anchor belong to another method"
    num_layers = raw["num_hidden_layers"]
    layer_types = raw.get("layer_types") or ["full_attention"] * num_layers
    uses_window = [kind == SLIDING for kind in layer_types]
    if either("use_swa", False) and not any(uses_window):
        uses_window = [True] * num_layers
    window = inner.get("swa_window_size", raw.get("sliding_window"))
    assert window is not None or not any(uses_window), "a sliding layer without a window size"
    causal = raw.get("is_causal")
    if causal is None:
        causal = inner.get("causal")
    ids = either("target_layer_ids")
    if ids is None:
        ids = default_layer_ids(num_target_layers, num_layers)
    return ReferenceConfig(
        second=raw["architectures"][0] == "DFlash2DraftModel",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=num_layers,
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        eps=raw["rms_norm_eps"],
        rope=_rope(raw),
        is_neox_style=raw.get("is_neox_style", True),
        max_positions=raw["max_position_embeddings"],
        target_layer_ids=tuple(ids),
        mask_token_id=either("mask_token_id"),
        block_size=either("block_size", 16),
        windows=tuple(window if windowed else None for windowed in uses_window),
        causal=tuple(kind == SLIDING if causal is None else causal for kind in layer_types),
        value_scale=either("attention_value_scale", 1.0),
        has_sinks=bool(either("attention_sink_bias", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        logit_scale=raw.get("logit_scale", 1.0),
        draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
        embedding_scale=inner.get("input_embedding_scale", 1.0),
        output_multiplier=inner.get("output_multiplier", 1.0),
        softcap=inner.get("final_logit_softcapping") or 0.0,
        conv_kernel_size=inner.get("conv_kernel_size", 0),
        conv_group_size=inner.get("conv_group_size", 0),
        selector_top_k=inner.get("selector_top_k", 0),
    )


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Tapped layers of checkpoints that name none: evenly spaced from layer 1 to the third from the end."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 3 - 1
    return tuple(round(1 + k * span / (num_draft_layers - 1)) for k in range(num_draft_layers))


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 1e6))
    return rope


def _from_speculators(raw: dict[str, Any]) -> dict[str, Any]:
    """The same keys in the z-lab layout. Layer ids are stored one higher there."""
    inner = {key: raw[key] for key in _INNER_KEYS if raw.get(key) is not None}
    inner["target_layer_ids"] = [index - 1 for index in raw["aux_hidden_state_layer_ids"]]
    inner["block_size"] = raw.get("block_size", 8)
    inner["causal"] = not raw.get("sliding_window_non_causal", True)
    second = raw["speculators_model_type"] == "dflash2"
    layer = dict(raw["transformer_layer_config"])
    return layer | {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "draft_vocab_size": raw.get("draft_vocab_size") or (layer["vocab_size"] if second else 32000),
        "dflash_config": inner,
    }


_INNER_KEYS = (
    "mask_token_id",
    "sample_from_anchor",
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
    "attention_value_scale",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)
