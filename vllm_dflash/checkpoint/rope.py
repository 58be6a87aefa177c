# SPDX-License-Identifier: Apache-2.0
"""Rotary parameters of the draft, resolved from the two ways config.json spells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_dflash.checkpoint.errors import CheckpointError
from vllm_dflash.checkpoint.keys import as_object, shown

DEFAULT_THETA = 1e6
ROPE_TYPES = ("default", "linear", "dynamic", "ntk", "yarn", "llama3", "longrope")
# Positions are plain 1-D, for multimodal targets too, so their sections mean nothing to the draft.
_DROPPED = ("type", "mrope_section", "mrope_interleaved", "partial_rotary_factor")


def resolve_rope(top: Mapping[str, Any], layer_types: tuple[str, ...] | None) -> tuple[dict[str, Any], float]:
    """(rope_parameters with rope_type and rope_theta always set, the partial_rotary_factor it mentions).

    Reads `rope_parameters`, else `rope_scaling`, with `rope_theta` inside or at the top level (default 1e6).
    The factor is returned apart, because a DFlash draft rotates its full head. Raises CheckpointError for two
    spellings that disagree, layers that differ, an unknown type, or a number that is none.
    """
    stated = {key: as_object(key, top.get(key)) for key in ("rope_parameters", "rope_scaling")}
    flat = [_one_for_all(key, value, layer_types) for key, value in stated.items() if value]
    if len(flat) == 2 and _normal(flat[0], top) != _normal(flat[1], top):
        raise CheckpointError(
            "bad_rope",
            f"rope_parameters {shown(flat[0])} and rope_scaling {shown(flat[1])} disagree in config.json.",
            "A wrong rotation is silent: acceptance collapses and nothing else shows it.",
            "Keep the one that the draft was trained with.",
        )
    parameters = dict(flat[0]) if flat else {}
    rope_type = parameters.get("rope_type", parameters.get("type")) or "default"
    if rope_type == "mrope":
        rope_type = "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError("bad_rope", f"rope_type is {shown(rope_type)}; known are {', '.join(ROPE_TYPES)}.")
    partial = _number("partial_rotary_factor", parameters.get("partial_rotary_factor"), top, 1.0)
    theta = _number("rope_theta", parameters.get("rope_theta"), top, DEFAULT_THETA)
    if rope_type in ("linear", "dynamic", "yarn", "llama3"):
        _number("factor", parameters.get("factor"), {}, None)
    if rope_type in ("yarn", "llama3", "longrope"):
        original = top.get("original_max_position_embeddings") or top.get("max_position_embeddings")
        parameters.setdefault("original_max_position_embeddings", original)
    kept = {key: value for key, value in parameters.items() if key not in _DROPPED}
    return kept | {"rope_type": rope_type, "rope_theta": theta}, partial


def _one_for_all(key: str, stated: Mapping[str, Any], layer_types: tuple[str, ...] | None) -> Mapping[str, Any]:
    """`stated`, or the one set that all layers share where it is given a layer type at a time."""
    by_type = {kind: value for kind, value in stated.items() if kind.endswith("_attention")}
    if not by_type:
        return stated
    used = sorted(set(layer_types or ())) or sorted(by_type)
    chosen = [as_object(f"{key}.{kind}", by_type.get(kind)) for kind in used]
    if any(_normal(parameters, {}) != _normal(chosen[0], {}) for parameters in chosen):
        raise CheckpointError(
            "bad_rope",
            f"{key} differs between {' and '.join(used)} in config.json.",
            "The context's keys are rotated once for all draft layers.",
            "A draft with a rotation of its own in some layers cannot be served.",
        )
    return chosen[0]


def _normal(parameters: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`parameters` with the defaults filled in, for comparing two spellings."""
    kept = {key: value for key, value in parameters.items() if key not in _DROPPED and value is not None}
    defaults = {"rope_type": parameters.get("type", "default"), "rope_theta": top.get("rope_theta")}
    return defaults | kept


def _number(key: str, value: Any, top: Mapping[str, Any], default: float | None) -> float:
    """`value`, else top[key], else `default`, as a positive float. Raises CheckpointError."""
    value = top.get(key) if value is None else value
    value = default if value is None else value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1e30:
        return float(value)
    raise CheckpointError("bad_rope", f"RoPE's {key} is {shown(value)} in config.json; it must be a number above 0.")
