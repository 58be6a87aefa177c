# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's process: which of vLLM's functions and classes are other objects than before."""

import importlib
import sys
import types
from typing import Any

# What an engine imports late; here it must be there before the first look.
MODULES = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.worker_base",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.spec_decode.dflash2.speculator",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.spec_decode.dflash",
    "vllm.v1.sample.rejection_sampler",
    "vllm.model_executor.models.registry",
    "vllm.model_executor.models.qwen3_dflash",
    "vllm.model_executor.models.qwen3_dflash2",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.sampling_params",
)

_before: dict[str, Any] = {}
_architectures: dict[str, Any] = {}


def objects() -> dict[str, Any]:
    """Functions and classes of all loaded vLLM modules, and what their classes hold, by "module:name"."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm.") or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType | type):
                found[f"{name}:{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for member, held in list(vars(value).items()):
                    if isinstance(held, types.FunctionType | property | classmethod | staticmethod):
                        found[f"{name}:{attribute}.{member}"] = held
    return found


def remember(llm: Any) -> int:
    """Looks at stock's objects before any plug-in is loaded; returns how many there are."""
    assert "vllm_dflash" not in sys.modules
    for name in MODULES:
        importlib.import_module(name)
    from vllm import ModelRegistry

    _before.update(objects())
    _architectures.update(ModelRegistry.models)
    return len(_before)


def changed(llm: Any) -> dict[str, bool]:
    """Names whose object is another one now (or none), and whether the new one wraps the old.

    A start of stock's engine changes some itself: Triton kernels give way to CPU ones, and lookups get caches.
    """
    now = objects()
    return {
        name: getattr(now.get(name), "__wrapped__", None) is stock
        for name, stock in _before.items()
        if now.get(name) is not stock
    }


def changed_architectures(llm: Any) -> list[str]:
    from vllm import ModelRegistry

    names = _architectures.keys() | ModelRegistry.models.keys()
    return sorted(name for name in names if ModelRegistry.models.get(name) is not _architectures.get(name))


def plugin_classes_in_use(llm: Any) -> list[str]:
    """Objects of this package's classes that the garbage collector knows."""
    import gc

    return sorted({repr(type(one)) for one in gc.get_objects() if type(one).__module__.startswith("vllm_dflash.")})


def metrics(llm: Any) -> tuple[int, list[str]]:
    """How many metrics the process has that begin with vLLM's prefix, and the names of this package's."""
    from prometheus_client import REGISTRY

    names = [family.name for family in REGISTRY.collect()]
    return sum(name.startswith("vllm:") for name in names), [name for name in names if "dflash" in name]
