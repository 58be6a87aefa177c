# SPDX-License-Identifier: Apache-2.0
"""Checkpoint tensors into the drafter's parameters."""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm_dflash.checkpoint import canonical_name

STACKED = (
    (".q_proj.", ".qkv_proj.", "q"),
    (".k_proj.", ".qkv_proj.", "k"),
    (".v_proj.", ".qkv_proj.", "v"),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)
OUTSIDE_MODEL = ("lm_head.", "d2t")
# Quantisation methods create these; a checkpoint may leave them out.
OPTIONAL = ("_scale", "_scale_inv", "_zero_point", "_g_idx")


def load_into(drafter: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], complete: bool = True) -> set[str]:
    """Load (name, tensor) pairs in the published names, sharded over tensor parallel ranks; returns the names filled.

    `t2d`, the inverse of `d2t`, and stored rotary frequencies are ignored. Raises ValueError naming tensors without a
    parameter and, where they are to be complete, parameters that no tensor filled.
    """
    parameters = dict(drafter.named_parameters())
    filled: set[str] = set()
    unknown: list[str] = []
    for raw_name, tensor in weights:
        name = canonical_name(raw_name)
        if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
            continue
        if not name.startswith(OUTSIDE_MODEL):
            name = f"model.{name}"
        shard: str | int | None = None
        for part, stacked, stacked_shard in STACKED:
            if part in name:
                name, shard = name.replace(part, stacked), stacked_shard
                break
        parameter = parameters.get(name)
        if parameter is None:
            unknown.append(raw_name)
            continue
        if name.endswith("attention_sink_bias"):
            tensor = tensor.chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()]
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        if shard is None:
            loader(parameter, tensor)
        else:
            loader(parameter, tensor, shard)
        filled.add(name)
    missing = sorted(n for n in set(parameters) - filled if not n.endswith(OPTIONAL)) if complete else []
    if unknown or missing:
        raise ValueError(
            f"The draft checkpoint does not fit the drafter: tensors without a place {unknown or 'none'}, "
            f"parameters without a tensor {missing or 'none'}. Is it a complete DFlash or DFlash 2 checkpoint?"
        )
    return filled
