# SPDX-License-Identifier: Apache-2.0
"""The operations on a GPU: the checks of the other implementations, and replays of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.device import on_gpu, to
from tests.ops import cases, checks
from vllm_dflash import ops
from vllm_dflash.ops.projection import fits_one_launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 1 << 30)
many = settings(deadline=None, max_examples=60)


def test_the_extension_runs_here() -> None:
    assert ops.backend("cuda") == "native"


@many
@given(SEEDS, st.integers(0, 5), st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 3, 16]), DTYPES)
def test_convolution(seed: int, blocks: int, block: int, groups: int, size: int, dtype: torch.dtype) -> None:
    case = cases.convolution(seed, blocks, block, groups, size, 1 + seed % 4, dtype)
    checks.check_convolution(on_gpu(ops.grouped_convolution), case)


@many
@given(SEEDS, st.integers(0, 6), st.integers(1, 5), st.integers(1, 40), st.sampled_from([1, 5, 64, 256]), DTYPES)
def test_path(seed: int, batch: int, slots: int, candidates: int, rank: int, dtype: torch.dtype) -> None:
    case = cases.path(seed, batch, slots, candidates, rank, 60, dtype)
    checks.check_path(on_gpu(ops.select_path), case)


@many
@given(SEEDS, st.lists(st.integers(0, 6), max_size=6), st.sampled_from([1, 7, 9000, 151936]), st.integers(1, 9), DTYPES)
def test_rejection(seed: int, counts: list[int], vocabulary: int, candidates: int, dtype: torch.dtype) -> None:
    case = cases.rejection(seed, counts, vocabulary, candidates, dtype)
    checks.check_rejection(on_gpu(ops.reject_sparse), case)


def test_conversions() -> None:
    checks.check_conversions(on_gpu(ops.inject_context_kv))


def test_odd_rows() -> None:
    checks.check_path_without_finite_scores(on_gpu(ops.select_path))
    checks.check_rejection_of_odd_rows(on_gpu(ops.reject_sparse))


@many
@given(SEEDS, st.integers(0, 40), st.integers(1, 5), st.sampled_from([8, 64, 96, 128, 256]), DTYPES, st.booleans())
def test_context_rows(seed: int, rows: int, layers: int, size: int, dtype: torch.dtype, is_neox: bool) -> None:
    case = cases.context(seed, rows, layers, 1 + seed % 3, size, dtype, is_neox, [size, size // 2][seed % 2])
    checks.check_context_rows(on_gpu(ops.context_kv_rows), case)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@many
@given(SEEDS, st.integers(0, 9), st.booleans())
def test_injection(layout: str, dtype: torch.dtype, seed: int, rows: int, per_layer: bool) -> None:
    case, keys, values = cases.injection(seed, rows, dtype, layout, per_layer, size=[16, 128][seed % 2])
    checks.check_injection(on_gpu(ops.inject_context_kv), case, keys, values)


@pytest.mark.parametrize("weight", ["dense", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 16, 17])
def test_projection(rows: int, dtype: torch.dtype, weight: str) -> None:
    """One launch keeps fp32 to the end; the library's GEMM above 16 rows rounds the normed features and K and V."""
    case = cases.projection(rows, rows, 3, 2, 128, 1024, dtype, weight)
    keys, values = cases.caches(rows, 3, 5, 4, 2, 128, dtype, "HND")
    case |= {"slot_mapping": torch.randperm(20, generator=cases.generator(rows))[:rows] - 1, "block_size": 4}
    features, kv_weight, k_norm = (to("cuda", case[name]) for name in ("features", "kv_weight", "k_norm"))
    one_launch = fits_one_launch(features, kv_weight, k_norm)
    rounding = 0.0 if one_launch else 4 * checks.ONE_ROUNDING[dtype]
    checks.check_projection(on_gpu(ops.project_context_kv), case, keys, values, rounding)


def check_graph(operation: Callable[..., Any], first: cases.Arguments, second: cases.Arguments) -> None:
    """A graph captured over the first case, replayed after its inputs became the second's, gives the second's
    result."""
    static = {name: to("cuda", value) for name, value in first.items()}
    operation(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = operation(**static)
    for name, value in second.items():
        if isinstance(value, torch.Tensor):
            static[name].copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    want = operation(**{name: to("cuda", value) for name, value in second.items()})
    torch.testing.assert_close(result, want, rtol=0, atol=0)


def test_graphs() -> None:
    for operation, case in (
        (ops.select_path, lambda seed: cases.path(seed, 4, 3, 8, 64, 60, torch.bfloat16)),
        (ops.reject_sparse, lambda seed: cases.rejection(seed, [3, 0, 5], 9000, 8, torch.bfloat16)),
        (ops.grouped_convolution, lambda seed: cases.convolution(2 * seed, 3, 8, 4, 16, 2, torch.bfloat16)),
        (ops.context_kv_rows, lambda seed: cases.context(2 * seed, 9, 3, 2, 128, torch.bfloat16, True)),
    ):
        check_graph(operation, case(1), case(2))
