# SPDX-License-Identifier: Apache-2.0
"""Runs in every worker of an engine (`LLM.collective_rpc`): what each rank drafted and accepted."""

import functools
from typing import Any


def watch(worker: Any) -> str:
    """From now on, notes each verification's and each walk's result. Returns the name of the rank's model runner."""
    from vllm_dflash import ops

    worker.noted = []
    for name in ("reject_sparse", "select_path"):
        operation = getattr(ops, name)

        def noting(*arguments: Any, operation: Any = operation, name: str = name) -> Any:
            result = operation(*arguments)
            worker.noted.append((name, *(tensor.tolist() for tensor in result)))
            return result

        setattr(ops, name, functools.wraps(operation)(noting))
    return f"{type(worker.model_runner).__module__}.{type(worker.model_runner).__qualname__}"


def noted(worker: Any) -> list[tuple]:
    return worker.noted


def everywhere(llm: Any, function: Any) -> list[Any]:
    """The function's answer of each rank (a probe: the engine's process asks its workers)."""
    return llm.collective_rpc(function)
