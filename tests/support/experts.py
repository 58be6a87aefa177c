# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts target that computes what a dense one does: vLLM keeps only such targets' ranks in step."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EXPERTS, CHOSEN = 4, 2


def as_mixture(target: Path, directory: Path) -> Path:
    """Writes a tiny Qwen3 target as a Qwen3 MoE all of whose experts are its MLP, so that any routing is the MLP."""
    shutil.copytree(target, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": True,
        "moe_intermediate_size": config["intermediate_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        layer, found, projection = name.partition(".mlp.")
        if not found:
            weights[name] = weight
            continue
        for expert in range(EXPERTS):
            weights[f"{layer}.mlp.experts.{expert}.{projection}"] = weight.clone()
        weights[f"{layer}.mlp.gate.weight"] = torch.randn(EXPERTS, config["hidden_size"], generator=generator)
    save_file(weights, directory / "model.safetensors")
    return directory
