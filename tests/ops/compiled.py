# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for GPUs that are not here: an NVIDIA one of each kind named and an AMD one.

The interpreter takes much that the compiler refuses. Triton brings all that it needs to make machine code; what is
missing here is only a device to run it. `python -m tests.ops.compiled` prints a line a kernel.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.ops import cases
from vllm_dflash.ops import triton as ours
from vllm_dflash.ops.triton.attention import paged_attention, write_rows

TARGETS = {
    "75": GPUTarget("cuda", 75, 32),
    "80": GPUTarget("cuda", 80, 32),
    "90": GPUTarget("cuda", 90, 32),
    "120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i64" if abs(value) >= 1 << 31 else "i32"


def compile_for(targets: list[str], call: Callable[[], Any]) -> list[str]:
    """Compiles every kernel that the call would launch, and launches none; (kernel, target) as text."""
    made: list[str] = []

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bound = inspect.signature(self.fn).bind(*args, **kwargs).arguments
        fixed = {p.name: bound[p.name] for p in self.params if p.is_constexpr}
        signature = {name: "constexpr" if name in fixed else kind(value) for name, value in bound.items()}
        for name in targets:
            triton.compile(ASTSource(self, signature, fixed), target=TARGETS[name])
            made.append(f"{self.fn.__name__} for {name}")

    stock, JITFunction.run = JITFunction.run, compile_only
    try:
        call()
    finally:
        JITFunction.run = stock
    return made


def calls(dtype: torch.dtype) -> list[Callable[[], Any]]:
    """One of each operation, in shapes of real drafters."""

    def injected(cache: torch.dtype) -> None:
        case = cases.context(0, 9, 2, 2, 128, dtype, True)
        keys, values = cases.caches(0, 2, 5, 4, 2, 128, cache, "HND")
        ours.inject_context_kv(
            **case, key_caches=keys, value_caches=values, slot_mapping=torch.arange(9), block_size=4, k_scale=0.5
        )

    def projected(weight: str, rows: int) -> None:
        case = cases.projection(1, rows, 2, 2, 128, 256, dtype, weight)
        keys, values = cases.caches(0, 2, 20, 4, 2, 128, dtype, "HND")
        ours.project_context_kv(
            **case, key_caches=keys, value_caches=values, slot_mapping=torch.arange(rows), block_size=4
        )

    def attended(causal: bool, window: int | None) -> None:
        cache = torch.zeros(8, 2, 16, 256, dtype=dtype).transpose(1, 2)
        query = torch.zeros(16, 8, 128, dtype=dtype)
        at = torch.zeros(2, 4, dtype=torch.int32)
        sinks = torch.zeros(8) if causal else None
        paged_attention(query, *cache.chunk(2, -1), at, at[:, 0], at[0, :3], query, 0.1, causal, window, 8, sinks)

    return [
        lambda: ours.grouped_convolution._init_fn(**cases.convolution(0, 4, 8, 8, 16, 2, dtype)),
        lambda: ours.select_path(**cases.path(0, 4, 7, 16, 256, 100, dtype)),
        lambda: ours.reject_sparse(**cases.rejection(0, [7, 0, 3], 9000, 16, dtype)),
        lambda: ours.context_kv_rows(**cases.context(1, 9, 2, 2, 128, dtype, False)),
        lambda: injected(torch.float8_e4m3fn),
        lambda: projected("dense", 8),
        lambda: projected("fp8", 40),
        lambda: attended(False, None),
        lambda: attended(True, 24),
        lambda: write_rows(torch.zeros(4, 3, 80, dtype=dtype), torch.zeros(2, 8, 3, 80, dtype=dtype), torch.arange(4)),
    ]


def main(targets: list[str]) -> None:
    for call in calls(torch.float16) if targets == ["75"] else [*calls(torch.float16)[:2], *calls(torch.bfloat16)]:
        print("\n".join(compile_for(targets, call)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))
