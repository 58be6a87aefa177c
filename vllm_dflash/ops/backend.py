# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the operations runs: the compiled extension where it was built for the device,
else the torch references. Chosen once a device type, logged once."""

from __future__ import annotations

import functools
import importlib
import logging

import torch

logger = logging.getLogger("vllm_dflash.ops")

NATIVE, REFERENCE = "native", "torch"


@functools.cache
def _extension() -> str | None:
    """Imports the extension, which registers torch.ops.vllm_dflash; None, or why it cannot be imported."""
    try:
        importlib.import_module("vllm_dflash._C")
        importlib.import_module("vllm_dflash.ops.fake")
    except (ImportError, OSError) as error:
        return str(error)
    return None


@functools.cache
def backend(device_type: str = "cpu") -> str:
    """ "native" or "torch": what runs the operations on this type of device. Logged at the first call."""
    missing = _extension()
    if missing is None and device_type == "cuda" and not torch.ops.vllm_dflash.has_cuda():
        missing = "the extension was built without CUDA"
    elif missing is None and device_type not in ("cpu", "cuda"):
        missing = f"the extension has no code for {device_type}"
    if missing is None:
        logger.info("dflash operations on %s: compiled extension", device_type)
        return NATIVE
    logger.warning("dflash operations on %s: torch references, slower than the extension (%s)", device_type, missing)
    return REFERENCE


@torch.compiler.assume_constant_result  # torch.compile need not trace the choice
def is_native(device_type: str) -> bool:
    """Whether the extension runs the operations on this type of device."""
    return backend(device_type) == NATIVE
