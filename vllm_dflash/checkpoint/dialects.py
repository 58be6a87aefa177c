# SPDX-License-Identifier: Apache-2.0
"""config.json to DraftConfig, for the z-lab dialect (flat keys and dflash_config) and the speculators one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint.attention import resolve_causality, resolve_layer_types, resolve_windows
from vllm_dflash.checkpoint.bounded_json import read_json_object
from vllm_dflash.checkpoint.config import DFLASH, DFLASH2, DFLASH2_KEYS, DraftConfig, build_draft_config
from vllm_dflash.checkpoint.errors import CheckpointError
from vllm_dflash.checkpoint.keys import (
    DRAFTER_KEYS,
    DraftKeys,
    as_count,
    as_flag,
    as_layer_ids,
    as_object,
    shown,
)
from vllm_dflash.checkpoint.rope import resolve_rope

MUSE_GLIMMER = ("MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel")
# Names under which stock vLLM 0.32 serves the network of arXiv 2602.06036.
DFLASH_ARCHITECTURES = (DFLASH, *MUSE_GLIMMER)
DFLASH2_ARCHITECTURES = (DFLASH2,)
# Run under method dflash too, or have DFlash in their name, but compute something else.
FOREIGN_ARCHITECTURES = {
    "LiLiCorrDraftModel": "LiLiCorr has a correction head of its own",
    "DFlashLagunaForCausalLM": "Laguna's draft has other layers",
    "LagunaForCausalLM": "Laguna's draft has other layers",
    "Qwen3DSparkModel": "DSpark predicts from the anchor slot (vllm#49614); use method dspark",
    "Gemma4DSparkModel": "DSpark predicts from the anchor slot; use method dspark",
    "DSparkDraftModel": "DSpark predicts from the anchor slot; use method dspark",
}
SPECULATORS_TYPES = {"dflash": DFLASH, "dflash2": DFLASH2}
SPECULATORS_DRAFT_VOCAB = 32000

_LAYER_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "has_own_lm_head",
    "target_hidden_size",
    "is_neox_style",
    "logit_scale",
)
_DRAFTER_FIELDS = (
    "mask_token_id",
    "use_aux_hidden_state",
    "attention_value_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
    *DFLASH2_KEYS,
)


def is_ours(raw: Any) -> bool:
    """Whether this package serves a draft with this config.json; anything else is left to stock vLLM.

    True for DFlashDraftModel, its aliases and DFlash2DraftModel, and for speculators checkpoints of type
    dflash and dflash2. Never raises.
    """
    return _architecture(raw) is not None


def parse_config(raw: Any, *, num_target_layers: int | None = None) -> DraftConfig:
    """The DraftConfig that the object `raw` of a config.json describes.

    `num_target_layers` is the target's number of decoder layers: old checkpoints name no taps, and their
    formula needs it where the config does not give it. Raises CheckpointError, always with a sentence.
    """
    found = _architecture(raw)
    if found is None:
        raise _not_ours(raw)
    architecture, declared = found
    speculators = raw.get("speculators_model_type") is not None
    keys = _speculators_keys(raw) if speculators else _zlab_keys(raw, declared)
    _refuse_foreign_layout(keys, raw)
    top = keys.top
    layers = as_count("num_hidden_layers", top.get("num_hidden_layers"))
    if layers is None or layers > 1024:
        raise CheckpointError(
            "bad_config", f"num_hidden_layers is {shown(layers)} in config.json; it must be from 1 to 1024."
        )
    layer_types = resolve_layer_types(keys, layers)
    rope, partial = resolve_rope(top, layer_types)
    fields: dict[str, Any] = {key: top.get(key) for key in _LAYER_KEYS}
    fields |= {key: keys.drafter(key) for key in _DRAFTER_FIELDS}
    fields |= _head_fields(top)
    sink = keys.drafter_flag("attention_sink_bias")
    fields["attention_sink_bias"] = keys.top_flag("add_swa_attention_sink_bias") if sink is None else sink
    block_size = keys.drafter("block_size")
    stated = {key: value for key, value in fields.items() if value is not None}
    return build_draft_config(
        architecture=architecture,
        declared_architecture=declared,
        dialect="speculators" if speculators else "z-lab",
        target_layer_ids=_taps(keys, layers, num_target_layers),
        block_size=(8 if speculators else 16) if block_size is None else block_size,
        num_target_layers=keys.drafter("num_target_layers"),
        layer_windows=resolve_windows(keys, layer_types, layers),
        layer_causal=resolve_causality(keys, layer_types, layers),
        rope_parameters=rope,
        partial_rotary_factor=partial,
        dtype=_dtype(raw, top),
        quant_method=_quant_method(raw, top),
        unknown_keys=tuple(sorted(key for key in keys.nested if key not in DRAFTER_KEYS)),
        **stated,
    )


def read_config(path: Path, *, num_target_layers: int | None = None) -> DraftConfig:
    """parse_config of the file `path`. Raises CheckpointError."""
    return parse_config(read_json_object(path), num_target_layers=num_target_layers)


def default_target_layers(num_draft_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Taps of a checkpoint that names none: L = 1 -> n//2, else round(1 + k·((n-3)-1)/(L-1)).

    Source: the z-lab reference of arXiv 2602.06036. (n = 36, L = 5 gives 1, 9, 17, 25, 33.)
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + k * span / (num_draft_layers - 1)) for k in range(num_draft_layers))


def _architecture(raw: Any) -> tuple[str, str] | None:
    """(canonical architecture, the name in the file), or None for what is not ours."""
    if not isinstance(raw, Mapping):
        return None
    if raw.get("speculators_model_type") is not None:
        kind = raw["speculators_model_type"]
        canonical = SPECULATORS_TYPES.get(kind) if isinstance(kind, str) else None
        return (canonical, f"speculators {kind}") if canonical else None
    names = raw.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if any(name in FOREIGN_ARCHITECTURES for name in names):
        return None
    for name in names:
        if name in DFLASH2_ARCHITECTURES:
            return DFLASH2, name
    for name in names:
        if name in DFLASH_ARCHITECTURES:
            return DFLASH, name
    return None


def _not_ours(raw: Any) -> CheckpointError:
    if not isinstance(raw, Mapping):
        return CheckpointError("bad_json", f"config.json holds a {type(raw).__name__}, not a JSON object.")
    if raw.get("speculators_model_type") is not None:
        return CheckpointError(
            "not_ours",
            f"The checkpoint is a speculators draft of type {shown(raw['speculators_model_type'])}.",
            fix="This package serves the types dflash and dflash2; leave others to stock vLLM.",
        )
    names = raw.get("architectures")
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    reason = next((FOREIGN_ARCHITECTURES[name] for name in known if name in FOREIGN_ARCHITECTURES), None)
    return CheckpointError(
        "not_ours",
        f"The checkpoint's architectures are {shown(names)}.",
        f"That is another method: {reason}." if reason else "",
        f"This package serves {', '.join((*DFLASH_ARCHITECTURES, *DFLASH2_ARCHITECTURES))}; "
        "leave others to stock vLLM.",
    )


def _zlab_keys(raw: Mapping[str, Any], declared: str) -> DraftKeys:
    nested = dict(as_object("dflash_config", raw.get("dflash_config")))
    if declared in MUSE_GLIMMER:
        # Its layers are all named sliding, but the block was trained non-causal; the file does not say so.
        nested = {"causal": False} | {key: value for key, value in nested.items() if value is not None}
    return DraftKeys(nested, raw)


def _speculators_keys(raw: Mapping[str, Any]) -> DraftKeys:
    """The speculators dialect as the two levels of the z-lab one.

    Layer ids there count from 1. `sliding_window_non_causal` false makes sliding layers causal (full ones
    never are); missing is read as true, as vLLM does.
    """
    top = dict(as_object("transformer_layer_config", raw.get("transformer_layer_config")))
    if not top:
        raise CheckpointError("bad_config", "config.json lacks transformer_layer_config, the draft's layer shape.")
    nested = {key: raw[key] for key in DRAFTER_KEYS if raw.get(key) is not None}
    if raw.get("aux_hidden_state_layer_ids") is None:
        raise CheckpointError("bad_config", "config.json lacks aux_hidden_state_layer_ids, the tapped target layers.")
    nested["target_layer_ids"] = _counted_from_one("aux_hidden_state_layer_ids", raw["aux_hidden_state_layer_ids"])
    if as_flag("sliding_window_non_causal", raw.get("sliding_window_non_causal")) is not False:
        nested["causal"] = False
    for key in ("target_hidden_size", "draft_vocab_size", "has_own_lm_head", "is_causal"):
        if raw.get(key) is not None:
            top[key] = raw[key]
    vocab = top.get("vocab_size")
    if (
        "draft_vocab_size" not in raw
        and raw["speculators_model_type"] == "dflash"
        and isinstance(vocab, int)
        and vocab > SPECULATORS_DRAFT_VOCAB
    ):
        top["draft_vocab_size"] = SPECULATORS_DRAFT_VOCAB
    return DraftKeys(nested, top)


def _counted_from_one(key: str, value: Any) -> list[int]:
    """Layer ids in the i + 1 convention as 0-based ones; raises CheckpointError for an id below 1."""
    ids = as_layer_ids(key, value)
    if ids and min(ids) < 1:
        raise CheckpointError(
            "bad_config",
            f"{key} {list(ids)} has the id {min(ids)}; ids there count from 1.",
            "0 would be the embedding, which a DFlash draft does not tap.",
        )
    return [layer - 1 for layer in ids]


def _taps(keys: DraftKeys, num_draft_layers: int, num_target_layers: int | None) -> tuple[int, ...]:
    """The 0-based tapped layers: stated, else from the old checkpoints' formula."""
    stated = keys.drafter("target_layer_ids")
    eagle = keys.top.get("eagle_aux_hidden_state_layer_ids")
    from_eagle = None if eagle is None else _counted_from_one("eagle_aux_hidden_state_layer_ids", eagle)
    if stated is not None:
        taps = as_layer_ids("target_layer_ids", stated)
        if from_eagle is not None and tuple(from_eagle) != taps:
            raise CheckpointError(
                "bad_config",
                f"target_layer_ids {list(taps)} and eagle_aux_hidden_state_layer_ids {shown(eagle)} disagree.",
                "The second counts from 1, so it should be the first plus one.",
                "Keep the ids the draft was trained with; off by one is silent and only acceptance drops.",
            )
        return taps
    if from_eagle is not None:
        return tuple(from_eagle)
    stated_layers = as_count("num_target_layers", keys.drafter("num_target_layers")) or num_target_layers
    if stated_layers is None:
        raise CheckpointError(
            "no_taps",
            "config.json names no target_layer_ids, and no num_target_layers to derive them from.",
            fix="Add dflash_config.target_layer_ids: the tapped decoder layers, counted from 0.",
        )
    return default_target_layers(num_draft_layers, stated_layers)


def _refuse_foreign_layout(keys: DraftKeys, raw: Mapping[str, Any]) -> None:
    """Refuse drafts that another method trained, whatever architecture their config.json names."""
    why = (
        "There the anchor slot already predicts, while DFlash predicts from the mask slots only: served as "
        "DFlash, every draft would stand one position off and under 1 % would be accepted (vllm#49614)."
    )
    fix = "Use a draft trained for DFlash, or serve this one with its own method."
    for key in (
        "sample_from_anchor",
        "query_zero_predicts_next",
        "shift_label",
        "markov_rank",
        "projector_type",
    ):
        value = keys.drafter(key)
        value = raw.get(key) if value is None else value
        if key == "projector_type" and value is not None:
            raise CheckpointError(
                "foreign_layout",
                f"The checkpoint says projector_type {shown(value)}, which is another method's head.",
                fix=fix,
            )
        if value is None or (key != "markov_rank" and as_flag(key, value) is False):
            continue
        raise CheckpointError("foreign_layout", f"The checkpoint says {key} {shown(value)}.", why, fix)


def _head_fields(top: Mapping[str, Any]) -> dict[str, Any]:
    """num_key_value_heads and head_dim where config.json leaves them to be derived."""
    heads, hidden = (as_count(key, top.get(key)) for key in ("num_attention_heads", "hidden_size"))
    kv_heads, head_dim = top.get("num_key_value_heads"), top.get("head_dim")
    if head_dim is None and heads and hidden:
        if hidden % heads:
            raise CheckpointError(
                "bad_config",
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given.",
            )
        head_dim = hidden // heads
    return {"num_key_value_heads": heads if kv_heads is None else kv_heads, "head_dim": head_dim}


def _dtype(raw: Mapping[str, Any], top: Mapping[str, Any]) -> str | None:
    stated = (level.get(key) for level in (top, raw) for key in ("dtype", "torch_dtype"))
    return next((value for value in stated if isinstance(value, str)), None)


def _quant_method(raw: Mapping[str, Any], top: Mapping[str, Any]) -> str | None:
    for level in (raw, top):
        for key in ("quantization_config", "compression_config"):
            stated = as_object(key, level.get(key))
            if stated:
                method = stated.get("quant_method", stated.get("quant_algo"))
                return method if isinstance(method, str) else "unnamed"
    return None
