# SPDX-License-Identifier: Apache-2.0
"""Sliding windows and causality of the draft's layers, resolved from config.json."""

from __future__ import annotations

from typing import Any

from vllm_dflash.checkpoint.errors import CheckpointError
from vllm_dflash.checkpoint.keys import DraftKeys, as_count, shown

SLIDING = "sliding_attention"
FULL = "full_attention"


def resolve_layer_types(keys: DraftKeys, num_layers: int) -> tuple[str, ...] | None:
    """The attention type of each layer, or None where the checkpoint names none.

    Without `layer_types`, Hugging Face's Qwen3 rule applies to a config that uses a window: the layers from
    `max_window_layers` (28) on slide. Raises CheckpointError for a wrong length or an unknown type.
    """
    types: Any = keys.top.get("layer_types")
    if types is None:
        if not keys.top_flag("use_sliding_window"):
            return None
        stated = keys.top.get("max_window_layers")
        first = (as_count("max_window_layers", stated) or 28) if stated != 0 else 0
        return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise CheckpointError(
            "bad_config", f"layer_types is {shown(types)} in config.json; it must be a list of names."
        )
    if len(types) != num_layers:
        raise CheckpointError(
            "bad_config",
            f"layer_types has {len(types)} entries, but num_hidden_layers is {num_layers}.",
            fix="Give one entry a draft layer.",
        )
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise CheckpointError(
            "bad_config", f"layer_types has {shown(unknown[0])}; a DFlash draft has {FULL!r} and {SLIDING!r} only."
        )
    return tuple(types)


def resolve_windows(keys: DraftKeys, layer_types: tuple[str, ...] | None, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, None for full attention.

    A layer slides where `layer_types` says so; `use_swa` makes all slide unless `layer_types` already names
    some. The size is `swa_window_size`, else the top-level `sliding_window`. Raises CheckpointError for a
    sliding layer without a size.
    """
    sliding = [kind == SLIDING for kind in layer_types or (FULL,) * num_layers]
    if keys.drafter_flag("use_swa") and not any(sliding):
        sliding = [True] * num_layers
    if not any(sliding):
        return (None,) * num_layers
    layers = [layer for layer, slides in enumerate(sliding) if slides]
    size = as_count("swa_window_size", keys.drafter("swa_window_size"))
    if size is None:
        size = as_count("sliding_window", keys.top.get("sliding_window"))
        if size is not None and keys.top_flag("use_sliding_window") is False:
            raise CheckpointError(
                "no_window",
                f"layer_types has {SLIDING!r} and sliding_window is {size}, but use_sliding_window is false.",
                "The two say opposite things about how the draft was trained.",
                f"Set use_sliding_window to true, or those layer_types to {FULL!r}.",
            )
    if size is None:
        raise CheckpointError(
            "no_window",
            f"Draft layers {layers} use sliding attention, but config.json gives no window.",
            fix="Set dflash_config.swa_window_size or sliding_window to the size the draft was trained with.",
        )
    return tuple(size if slides else None for slides in sliding)


def resolve_causality(keys: DraftKeys, layer_types: tuple[str, ...] | None, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer's block is causal: top-level `is_causal`, else `causal`, else where it slides."""
    for override in (keys.top_flag("is_causal"), keys.drafter_flag("causal")):
        if override is not None:
            return (override,) * num_layers
    return tuple(kind == SLIDING for kind in layer_types or (FULL,) * num_layers)
