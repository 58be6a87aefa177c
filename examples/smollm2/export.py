# SPDX-License-Identifier: Apache-2.0
"""Step 5: write a trained drafter in the published layout: config.json and model.safetensors (bf16).

python -m examples.smollm2.export --out .demo/my-drafter
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.smollm2.data import TRAINING
from examples.smollm2.features import load_target
from examples.smollm2.model import Drafter, Shape, unit_scaled

CODEBOOKS = ("predecessor", "successor")


def config_of(shape: Shape, target_config: Any) -> dict[str, Any]:
    """config.json, in the dialect of the published checkpoints."""
    dflash: dict[str, Any] = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.taps),
    }
    if shape.is_dflash2:
        dflash |= {
            "conv_kernel_size": shape.kernel_size,
            "conv_group_size": shape.group_size,
            "selector_rank": shape.selector_rank,
            "selector_top_k": shape.selector_top,
        }
    return {
        "architectures": ["DFlash2DraftModel" if shape.is_dflash2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block_size,
        "bos_token_id": target_config.bos_token_id,
        "dflash_config": dflash,
        "dtype": "bfloat16",
        "eos_token_id": target_config.eos_token_id,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "is_causal": False,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": shape.max_position,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_target_layers": shape.target_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "use_cache": False,
        "vocab_size": shape.vocabulary,
    }


def published(drafter: Drafter, embeddings: Tensor) -> dict[str, Tensor]:
    """The tensors under their published names, bf16; the selector's maps are folded into its codebooks."""
    weights = {
        name: tensor
        for name, tensor in drafter.state_dict().items()
        if not name.startswith(tuple(f"candidate_selector.{side}" for side in CODEBOOKS))
    }
    if drafter.shape.is_dflash2:
        with torch.no_grad():
            folded = drafter.candidate_selector.codebooks(unit_scaled(embeddings))
        for side, codebook in zip(CODEBOOKS, folded, strict=True):
            weights[f"candidate_selector.{side}_codebook"] = codebook
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}


def export(best: Path, target: Any, out: Path) -> None:
    """Write the drafter of the file `best` (from train.py) to the folder `out`."""
    state = torch.load(best, map_location="cpu", weights_only=True)
    shape = Shape(**{**state["shape"], "taps": tuple(state["shape"]["taps"])})
    drafter = Drafter(shape)
    drafter.load_state_dict(state["drafter"])
    out.mkdir(parents=True, exist_ok=True)
    path = out / "model.safetensors"
    save_file(published(drafter, target.get_input_embeddings().weight), path, metadata={"format": "pt"})
    path.chmod(0o644)
    (out / "config.json").write_text(json.dumps(config_of(shape, target.config), indent=2) + "\n")
    print(f"export: wrote {out}: {path.stat().st_size / 1e6:.1f} MB, step {state['record']['step']}")


def load_exported(folder: Path) -> Drafter:
    """Read an exported folder back into the plain drafter, in float32."""
    config = json.loads((folder / "config.json").read_text())
    dflash = config["dflash_config"]
    shape = Shape(
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        target_layers=config["num_target_layers"],
        taps=tuple(dflash["target_layer_ids"]),
        block_size=dflash["block_size"],
        mask_token_id=dflash["mask_token_id"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        max_position=config["max_position_embeddings"],
        selector_rank=dflash.get("selector_rank", 0),
        selector_top=dflash.get("selector_top_k", 16),
        kernel_size=dflash.get("conv_kernel_size", 2),
        group_size=dflash.get("conv_group_size", 16),
    )
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    for side in CODEBOOKS if shape.is_dflash2 else ():
        part = f"candidate_selector.{side}"
        weights[f"{part}_rows"] = weights.pop(f"{part}_codebook")
        weights[f"{part}_map.weight"] = torch.zeros(shape.selector_rank, shape.hidden)
    drafter = Drafter(shape)
    drafter.load_state_dict(weights)
    return drafter.eval()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--best", type=Path, default=TRAINING / "dflash2" / "best.pt", help="file of train.py")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    export(arguments.best, load_target(arguments.target), arguments.out)


if __name__ == "__main__":
    main()
