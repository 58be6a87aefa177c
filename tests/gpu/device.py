# SPDX-License-Identifier: Apache-2.0
"""Runs an operation on the GPU for checks whose inputs and oracles are on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def to(device: str, value: Any) -> Any:
    """Tensors in value (or in a list or tuple) on the device, with the strides they have."""
    if isinstance(value, list | tuple):
        return type(value)(to(device, x) for x in value)
    if not isinstance(value, torch.Tensor):
        return value
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)


def on_gpu(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation with its arguments moved to the GPU, its result and the caches it wrote moved back."""

    def run(**arguments: Any) -> Any:
        moved = {name: to("cuda", value) for name, value in arguments.items()}
        result = operation(**moved)
        for name in ("key_caches", "value_caches"):
            for here, there in zip(arguments.get(name, ()), moved.get(name, ()), strict=True):
                here.copy_(there)
        return to("cpu", result)

    return run
