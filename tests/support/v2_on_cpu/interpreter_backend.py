# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter pass for a working "cpu" backend, so that vLLM's V2 runner starts without a GPU.

Six facts of Triton 3.9 stand behind this file. vLLM takes Triton as present only if exactly one backend's driver
says it is active. The interpreter needs no compiler, but Triton asks the active driver for device, stream and target
before each launch. The interpreter indexes numpy arrays with a mask, so a mask of integers would pick elements 0 and
1 instead of masking; a scalar comparison that is spread over a block becomes numbers of the compared type. Its matrix
product takes bfloat16 for the integers that its bits are. And functions of libdevice have bodies only where a compiler
links its bitcode.
"""

import os

# Set to 1: scheduling stays asynchronous where a GPU's would be.
ASYNCHRONOUS = "V2_ON_CPU_ASYNCHRONOUS"


def install() -> None:
    """Call before anything imports torch or vLLM."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime
    from triton.backends import Backend, backends

    donor = next(iter(backends.values()))
    driver = _driver_class()
    backends["cpu"] = Backend(compiler=donor.compiler, driver=driver)
    triton.runtime.driver.set_active(driver())
    accept_integer_masks()
    widen_bfloat16_in_dots()
    _give_libdevice_a_log1p()
    _after_import("vllm.v1.sample.ops.topk_topp_sampler", _sort_for_top_k_top_p)
    _after_import("vllm.distributed.device_communicators.cpu_communicator", _gather_rows_of_data_parallel_ranks)
    if os.environ.get(ASYNCHRONOUS):
        _after_import("vllm.platforms.cpu", _keep_asynchronous_scheduling)


def _keep_asynchronous_scheduling(platform) -> None:
    """vLLM's CPU platform switches it off ("not required on CPU"); V2 under pipeline parallelism needs it."""
    stock = platform.CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    platform.CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def _gather_rows_of_data_parallel_ranks(communicator) -> None:
    """vLLM's CPU communicator lacks the two operations that experts want when ranks hold unlike numbers of rows."""
    import torch
    import torch.distributed as dist

    def all_gatherv(self, input_, dim=0, sizes=None):
        if isinstance(input_, list):
            return [all_gatherv(self, one, dim, sizes) for one in input_]
        assert dim == 0 and sizes is not None
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.cpu_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        assert dim == 0 and sizes is not None
        total = input_.clone()
        dist.all_reduce(total, group=self.cpu_group)
        first = sum(sizes[: self.rank_in_group])
        return total[first : first + sizes[self.rank_in_group]]

    communicator.CpuCommunicator.all_gatherv = all_gatherv
    communicator.CpuCommunicator.reduce_scatterv = reduce_scatterv


def _sort_for_top_k_top_p(sampler) -> None:
    """Its kernel calls `.to` on a loop's index, which is a plain int here; vLLM's own torch form serves instead."""
    sampler.HAS_TRITON = False


def _after_import(name: str, then) -> None:
    """`then(module)` once the module is imported."""
    import importlib.abc
    import importlib.util
    import sys

    class AfterImport(importlib.abc.MetaPathFinder):
        def find_spec(self, found, path=None, target=None):
            if found != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module

            def exec_module(module) -> None:
                load(module)
                then(module)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, AfterImport())


def _driver_class() -> type:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        """Answers that the one device is the CPU. Nothing is ever compiled or launched through it."""

        def __init__(self) -> None:
            pass

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", "interpreter", 1)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_active_torch_device(self):
            import torch

            return torch.device("cpu")

        def get_device_interface(self):
            import torch

            return torch.cpu

        def get_benchmarker(self):
            from time import perf_counter

            def benchmark(launch, **options) -> float:
                start = perf_counter()
                launch()
                return 1e3 * (perf_counter() - start)

            return benchmark

        def get_empty_cache_for_benchmark(self):
            return None

        def clear_cache(self, cache) -> None:
            return None

    return InterpreterDriver


def accept_integer_masks() -> None:
    import functools

    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def boolean(mask):
        if isinstance(mask, TensorHandle) and mask.data.dtype != numpy.bool_:
            return TensorHandle(mask.data.astype(numpy.bool_), mask.dtype)
        return mask

    for name, index in (("create_masked_load", 1), ("create_masked_store", 2)):
        stock = getattr(InterpreterBuilder, name)

        def wrapper(self, *arguments, _stock=stock, _index=index, **options):
            if len(arguments) > _index:
                arguments = (*arguments[:_index], boolean(arguments[_index]), *arguments[_index + 1 :])
            elif "mask" in options:
                options["mask"] = boolean(options["mask"])
            return _stock(self, *arguments, **options)

        setattr(InterpreterBuilder, name, functools.wraps(stock)(wrapper))

    splat = InterpreterBuilder.create_splat

    @functools.wraps(splat)
    def create_splat(self, ret_ty, arg):
        if arg.data.dtype != numpy.bool_:
            return splat(self, ret_ty, arg)
        return TensorHandle(numpy.full(ret_ty.shape, arg.data.flat[0], dtype=numpy.bool_), tl.int1)

    InterpreterBuilder.create_splat = create_splat


def widen_bfloat16_in_dots() -> None:
    import functools

    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    stock = InterpreterBuilder.create_dot

    def widened(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return TensorHandle((operand.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

    @functools.wraps(stock)
    def create_dot(self, a, b, *rest):
        return stock(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def _give_libdevice_a_log1p() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x: tl.log(1.0 + x)
