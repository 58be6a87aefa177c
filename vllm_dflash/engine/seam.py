# SPDX-License-Identifier: Apache-2.0
"""One point where stock vLLM is extended or leaned on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """One name in one module of vLLM.

    parameters: those that the function (or the class's __init__) must take, in this order; extra ones may follow.
    ours: what replaces it, "module:name" below vllm_dflash.engine: a class that derives from stock's, or a function
    that makes ours from stock's. None where stock's is only used.
    stage: "always" in every process, "config" where a DFlash configuration is built or used, "worker" in workers.
    runner: the model runner that it belongs to, "v1" or "v2"; None for both.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None
    ours: str | None
    stage: str
    why: str
    runner: str | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"
