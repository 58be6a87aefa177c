# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the operations runs: the compiled extension where it has code for the device, else Triton on
a GPU, else the torch references. Chosen once a device type, logged once."""

from __future__ import annotations

import functools
import importlib
import logging

import torch

logger = logging.getLogger("vllm_dflash.ops")

NATIVE, TRITON, REFERENCE = "native", "triton", "torch"


@functools.cache
def _extension() -> str | None:
    """Imports the extension, which registers torch.ops.vllm_dflash; None, or why it cannot be imported."""
    try:
        importlib.import_module("vllm_dflash._C")
        importlib.import_module("vllm_dflash.ops.fake")
    except (ImportError, OSError) as error:
        return str(error)
    return None


def _without_extension(device_type: str) -> str | None:
    """Why the extension cannot serve this type of device; None where it can."""
    missing = _extension()
    if missing is None and device_type not in ("cpu", "cuda"):
        return f"the extension has no code for {device_type}"
    if missing is None and device_type == "cuda":
        if not torch.ops.vllm_dflash.has_cuda():
            return "the extension was built without CUDA"
        # One small call: a build for other architectures only shows when its code is asked for.
        try:
            one = torch.ones(1, 1, device=device_type)
            torch.ops.vllm_dflash.grouped_convolution(one, one[None], one, 1)
        except RuntimeError as error:
            return str(error)
    return missing


def _without_triton(device_type: str) -> str | None:
    """Why Triton cannot serve this type of device; None where it can."""
    if device_type == "cpu":
        return "Triton has no code for processors"
    try:
        importlib.import_module("vllm_dflash.ops.triton")
        importlib.import_module("triton").runtime.driver.active.get_current_target()
    except Exception as error:  # whatever a driver that is not there raises
        return f"Triton does not run here: {error}"
    return None


@functools.cache
def backend(device_type: str = "cpu") -> str:
    """ "native", "triton" or "torch": what runs the operations on this type of device. Logged at the first call."""
    without_extension = _without_extension(device_type)
    if without_extension is None:
        logger.info("dflash operations on %s: compiled extension", device_type)
        return NATIVE
    without_triton = _without_triton(device_type)
    if without_triton is None:
        logger.info("dflash operations on %s: Triton (%s)", device_type, without_extension)
        return TRITON
    reasons = without_extension if device_type == "cpu" else f"{without_extension}; {without_triton}"
    logger.warning("dflash operations on %s: torch references, slower than the extension (%s)", device_type, reasons)
    return REFERENCE


@torch.compiler.assume_constant_result  # torch.compile need not trace the choice
def is_native(device_type: str) -> bool:
    """Whether the extension runs the operations on this type of device."""
    return backend(device_type) == NATIVE


@torch.compiler.assume_constant_result
def is_triton(device_type: str) -> bool:
    """Whether Triton runs the operations on this type of device."""
    return backend(device_type) == TRITON
