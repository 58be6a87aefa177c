# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not in this machine, for looking at a server's configuration ahead of time."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
# Memory as the driver counts it, rounded down to GiB.
KNOWN = {
    "t4": ((7, 5), 15),
    "a10": ((8, 6), 22),
    "a100": ((8, 0), 80),
    "rtx3090": ((8, 6), 24),
    "l4": ((8, 9), 22),
    "l40s": ((8, 9), 45),
    "rtx4090": ((8, 9), 24),
    "h100": ((9, 0), 80),
    "h200": ((9, 0), 140),
    "b200": ((10, 0), 179),
    "b300": ((10, 3), 268),
    "rtx5090": ((12, 0), 32),
    "rtxpro6000": ((12, 0), 95),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU's name, its compute capability (9, 0), and its memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


def parse_gpu(text: str) -> Gpu:
    """A name of KNOWN such as "h100", or CAPABILITY:GIB such as "9.0:80". Raises ValueError, a sentence."""
    key = re.sub(r"[^a-z0-9]", "", text.lower().removeprefix("nvidia"))
    if key in KNOWN:
        capability, memory = KNOWN[key]
        return Gpu(text.upper(), capability, memory * GIB)
    numbers = re.fullmatch(r"(\d{1,2})\.(\d):(\d+(?:\.\d+)?)", text)
    if numbers is None:
        raise ValueError(
            f"{text!r} is no GPU known here. Give its compute capability and memory in GiB, for example 9.0:80, or "
            f"one of {', '.join(KNOWN)}."
        )
    major, minor, gib = numbers.groups()
    return Gpu(f"GPU of capability {major}.{minor}", (int(major), int(minor)), int(float(gib) * GIB))


# Compiled parts that a CPU build lacks. Configuring asks whether they are there and calls none of them.
COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


def pretend(gpu: Gpu) -> None:
    """Make vLLM configure itself in this process as its CUDA build does on `gpu`. Nothing may run on it afterwards.

    Call it before anything else of vLLM is imported. vLLM has no way to be told of a device that it does not find.
    """
    import vllm.platforms as platforms

    lacking = [name for name in COMPILED if not _there(name)]
    for name in lacking:
        sys.modules[name] = types.ModuleType(name)
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class NamedCudaPlatform(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return gpu.memory

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

    platforms._current_platform = NamedCudaPlatform()
    # Triton counts as usable where it finds a driver; that decides between the two model runners.
    import vllm.config.vllm as vllm_config
    import vllm.triton_utils as triton_utils

    triton_utils.HAS_TRITON = vllm_config.HAS_TRITON = True
    if lacking:
        import vllm.vllm_flash_attn.flash_attn_interface as flash_attention

        flash_attention.FA4_AVAILABLE = True


def _there(module: str) -> bool:
    """Whether a compiled module is installed, found without importing the package around it."""
    import vllm

    folder = Path(vllm.__file__).parent.joinpath(*module.split(".")[1:-1])
    return any(folder.glob(f"{module.rpartition('.')[2]}*.so"))
