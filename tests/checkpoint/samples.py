# SPDX-License-Identifier: Apache-2.0
"""Configs and weight files to test with: small ones made here, and the published ones by their figures."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint import TargetFacts

DATA = Path(__file__).parent / "data"
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "BOOL": 1}


def data(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text())


def zlab(**changes: Any) -> dict[str, Any]:
    """A small DFlash config in the z-lab dialect; a key set to None is left out."""
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": [1, 3, 5]},
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 1024,
        "vocab_size": 256,
        "num_target_layers": 8,
    }
    raw |= changes
    return {key: value for key, value in raw.items() if value is not None}


def nested(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`raw` with keys of dflash_config changed; a key set to None is left out."""
    inner = raw["dflash_config"] | changes
    return raw | {"dflash_config": {key: value for key, value in inner.items() if value is not None}}


def zlab2(**changes: Any) -> dict[str, Any]:
    """A small DFlash 2 config in the z-lab dialect."""
    raw = zlab(architectures=["DFlash2DraftModel"], **changes)
    return nested(raw, conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4)


def speculators(kind: str = "dflash", **changes: Any) -> dict[str, Any]:
    """A small config in the speculators dialect; a key set to None is left out."""
    layer = zlab()
    for key in ("architectures", "block_size", "dflash_config", "num_target_layers"):
        del layer[key]
    raw = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "mask_token_id": 255,
        "draft_vocab_size": 256,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": "example/target", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    if kind == "dflash2":
        raw |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    raw |= changes
    return {key: value for key, value in raw.items() if value is not None}


def target(**changes: Any) -> TargetFacts:
    """The target that the small configs fit."""
    facts: dict[str, Any] = {
        "name": "example/target",
        "vocab_size": 256,
        "hidden_size": 64,
        "num_layers": 8,
        "max_position_embeddings": 1024,
    }
    return TargetFacts(**(facts | changes))


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str] | None = None
) -> Path:
    """A safetensors file with tensors of these shapes, its data a hole in the file (zeros)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "BF16")
        end = at + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return path


def write_checkpoint(
    folder: Path,
    raw: dict[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str] | None = None,
) -> Path:
    """A checkpoint folder: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    write_safetensors(folder / "model.safetensors", shapes, dtypes)
    return folder
